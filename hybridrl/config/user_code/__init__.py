"""User code that a config names by dotted path: imports, signatures, and trust.

classes.py locates workers, rewards and environments and checks their signatures. importing.py
first imports a module in a separate process, because an import may exit or hang; supervisor.py
ends such a process with all its children. untrusted_code.py refuses code, URLs and secrets named by
a config of unknown origin. Running rewards and environments belongs to trainer/ and rewards/.
Start with classes.py.
"""
