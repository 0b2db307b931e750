"""Checks of Ray (ids ray.*): versions, tokens, the head's port and its nodes.

facts.py is the probe that runs on every node without importing Ray; rules.py compares the facts;
stage.py asks the head. Not here: free GPUs (doctor/placement.py), Ray's ports for workers and
services (doctor/network/ray_ports.py). Start with stage.py.
"""
