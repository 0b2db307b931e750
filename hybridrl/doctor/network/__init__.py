"""Checks of the network between nodes (ids network.*).

nodes.py probes names, addresses and interfaces, and judges addresses; interfaces.py goes on.
server.py opens sockets on every node for ports.py and bandwidth.py. collective.py
starts ranks (collective_rank.py) and judges them. infiniband.py reads adapters;
ray_ports.py finds processes and ports.
Not here: Ray's own protocol (doctor/ray.py). Start with stage.py.
"""
