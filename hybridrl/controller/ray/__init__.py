"""Ray itself: its start and end (runtime.py), the nodes of a cluster, functions run on them.

compat.py has everything that depends on private names of Ray.
"""
