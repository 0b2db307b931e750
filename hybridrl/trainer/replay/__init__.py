"""Non-finite updates: the guard that stops a run (nonfinite.py), its files (batch.py), and
`hybridrl replay`, which finds the responses that cause it (session.py, workers/replay.py).
"""
