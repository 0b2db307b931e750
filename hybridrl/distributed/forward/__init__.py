"""Packed forward pass: responses of a micro-batch to log-probs, values or scores.

packing.py -> token_models.py -> attention.py (sequence_parallel.py) -> log_probs.py
(softmax_kernels.py)

Start with token_models.py. Losses and optimizer steps are in workers/.
"""
