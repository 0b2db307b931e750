"""Classes and functions that a config names, and how user code is imported."""
