"""Non-finite updates: the guard that stops a run, with its files (nonfinite.py), and
`hybridrl replay`, which finds the responses that cause it (session.py, workers/replay.py).
"""
