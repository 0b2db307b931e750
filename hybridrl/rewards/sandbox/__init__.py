"""Sandbox for untrusted programs: runs a program with each of its tests, limited and isolated.

    programs.py -> bubblewrap.py (namespaces) -> jail.py (process 1) -> one process per test

Only jail.py and kernel.py, the Linux calls that Python lacks, exist inside the sandbox, so they
import nothing else of the project.
The reward that uses it is rewards/code.py. Start with programs.run_tests.
"""
