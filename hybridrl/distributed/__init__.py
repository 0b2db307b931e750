"""Meshes, sharded models, packed attention, log-probs and collectives."""
