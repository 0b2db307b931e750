"""Processes that run user code: a pool (pool.py) hands items to processes (process.py), in each of
which child.py computes them. They exchange the messages of messages.py.
"""
