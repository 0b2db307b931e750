"""Checks of a typed config: generators of problems, one module per topic, listed in validate.py.

Types and ranges of single values are checked in config/typed.py.
"""
