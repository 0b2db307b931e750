"""Commands besides training: export, eval and replay.

Each command has one module with `main`: export.py, evaluate.py (with the folder evaluation/) and
replay.py. running.py has what they share: exit codes, and finding and verifying a checkpoint.
Training starts in hybridrl/main.py, the doctor in doctor/main.py. Start with running.py.
"""
