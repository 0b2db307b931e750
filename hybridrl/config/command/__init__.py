"""Command lines, provenance of values, secrets, and texts of input errors.

command_line.py parses argv and composes the config with Hydra, collecting every problem of the
overrides. provenance.py records which keys the user set. input_errors.py words errors of Hydra,
OmegaConf, YAML and the file system. report.py collects problems. secrets.py hides secrets in texts
and files. The schema and its checks do not live here. Start with command_line.py.
"""
