"""Checks of the network between nodes (ids network.*).

nodes.py probes names, addresses and interfaces, and judges addresses.
server.py opens ports on every node for ports.py, interfaces.py and bandwidth.py.
collective.py starts ranks (collective_rank.py) and judges them. infiniband.py reads adapters.
Not here: Ray's own protocol (doctor/ray.py). Start with stage.py.
"""
