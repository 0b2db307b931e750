"""Command lines, provenance of values, secrets, and texts of input errors."""
