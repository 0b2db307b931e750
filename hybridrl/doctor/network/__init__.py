"""Checks of the network between nodes: addresses, ports, bandwidth and collectives."""
