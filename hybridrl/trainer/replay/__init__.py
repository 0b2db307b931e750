"""Non-finite updates: the guard that stops a run, its files, and their replay.

nonfinite.py: `NonFiniteGuard`, called by the training loop; start reading there.
batch.py: files of the saved batch.
session.py: `hybridrl replay`, which finds the responses that cause it.

Elsewhere: workers/replay.py (the computation on the ranks).
"""
