"""Checks of a typed config, one module per topic.

A check is a generator of problems: "key = value, expected ..., because ...", then a line with the
remedy. config/validate.py lists the checks with the keys that each one reads; a check with an
unusable key is skipped. Checks of a single value do not live here: types are checked in
config/typed.py, ranges at the fields of config/schema.py. installation.py is the exception: it
runs before the config is examined. Start with sizes.py.
"""
