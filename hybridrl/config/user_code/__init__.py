"""User code that a config names by dotted path: imports, signatures, and trust."""
