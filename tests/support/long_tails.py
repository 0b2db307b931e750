"""Lengths as responses have them, a few long and many short, and what they cost."""

import torch


def long_tailed(num: int, seed: int) -> list[int]:
    """Log-normal lengths around 1,000 tokens, at most 8,000."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(num, generator=generator).mul(0.8).exp().mul(1000).long()
    return lengths.clamp(16, 8000).tolist()


def attention_cost(tokens: int) -> float:
    """A sequence's cost in units of a short sequence's token."""
    return tokens + 2.8e-5 * tokens**2
