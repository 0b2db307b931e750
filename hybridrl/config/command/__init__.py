"""Command lines and the texts of input errors."""
