"""One packed forward pass: attention, sequence parallelism, log-probs."""
