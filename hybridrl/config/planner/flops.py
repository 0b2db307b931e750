"""Floating-point operations of a decoder, as model FLOPs utilisation (MFU) counts them.

A token costs 6 N operations in the weights and 6 L h S in causal attention, forward and backward;
forward alone is a third. Recomputation does not count.

Symbols: N = parameters   L = layers   h = hidden size   S = mean sequence length

Source: Chowdhery et al. 2022, appendix B, https://arxiv.org/abs/2204.02311, with attention halved,
because half of a causal score matrix is never computed
"""

from hybridrl.config.planner.model_shape import ModelShape

# Dense bfloat16 peak of one H100 or H200 (SXM), operations per second.
HOPPER_BF16_PEAK = 989e12
# Time of an operation in attention over that of one in the weights: FlashAttention-2, all that
# torch 2.11 has for packed sequences, against matrix products with the elementwise work around
# them, 198 and 589 TFLOP/s by the kernels' times in an update (350 and 1,030 ms of four
# micro-batches of 4,096-token sequences, Qwen2.5-1.5B's shape, H200; benchmarks/RESULTS.md).
ATTENTION_TIME = 3.0


def training_flops(
    shape: ModelShape, num_tokens: int, num_sequences: int, *, trains_all: bool = True
) -> float:
    """(6 N + 6 L h S) operations per token: forward and backward of packed sequences.

    Args:
        shape: the model's.
        num_tokens: of all sequences, prompts included.
        num_sequences: S = num_tokens / num_sequences.
        trains_all: false under adapters: frozen weights have no gradients, which leaves 4 N; the
            adapters' own operations, a few percent, are not counted.
    """
    if not num_tokens:
        return 0.0
    mean_length = num_tokens / num_sequences
    in_weights = (6 if trains_all else 4) * shape.parameters
    return num_tokens * (in_weights + 6 * shape.layers * shape.hidden * mean_length)


def forward_flops(shape: ModelShape, num_tokens: int, num_sequences: int) -> float:
    """(2 N + 2 L h S) operations per token: forward alone."""
    return training_flops(shape, num_tokens, num_sequences) / 3


def sequence_cost(shape: ModelShape, num_tokens: int) -> float:
    """Time of forward and backward of one sequence, in operations in the weights.

    What its length makes it take beside others: 6 N + 6 L h S ATTENTION_TIME per token.

    Args:
        shape: the model's.
        num_tokens: S, prompt included.
    """
    attention = 6 * shape.layers * shape.hidden * num_tokens
    return num_tokens * (6 * shape.parameters + ATTENTION_TIME * attention)
