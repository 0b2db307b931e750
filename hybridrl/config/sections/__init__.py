"""Sections of the typed config with many parts (schema.py has the others)."""
