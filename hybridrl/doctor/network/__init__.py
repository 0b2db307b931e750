"""Checks of the network between nodes (ids network.*).

nodes.py probes names, addresses and interfaces, and judges addresses.
server.py opens ports on every node, ports.py connects to them.
ranks.py starts ranks (rank.py), which measure pairs (speeds.py) and a sum over torch.distributed.
infiniband.py reads adapters.
Not here: Ray's own protocol (doctor/ray.py). Start with stage.py.
"""
