"""Configuration of a run: schema, loading, and all checks before a run starts.

Nothing here imports torch, ray, vllm or transformers, so that config errors appear at once.

schema.py (with data_schema.py, algorithm_schema.py) has the types, ranges and resume rules; conf/
has defaults and comments. load.py turns composed YAML into a RunConfig or a list of problems.
validate.py lists the checks of checks/. command/ parses command lines, planner/ predicts memory and
FLOPs, user_code/ imports classes and functions that a config names. Models and data are not read
here. Start with load.py.
"""
