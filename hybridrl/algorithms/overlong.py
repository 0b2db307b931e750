"""What a response pays for being too long, in reward; a pure function of lengths.

Shapes:  B = responses
"""

from torch import Tensor

from hybridrl.algorithms.masked import at_least_float32


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """Soft overlong punishment: 0, then falling evenly to -1 over the last `buffer` tokens.

    0                                   where        L <= M - C
    ((M - C) - L) / C                   where M - C < L <= M
    -1                                  where    M < L

    with L = lengths, M = max_tokens and C = buffer. To be added to the outcome reward. A response
    that was cut off at max_tokens pays 1, as one that ended exactly there does.

    Args:
        lengths: [B] tokens of each response, integer or floating.
        max_tokens: tokens from which on a response pays 1; rollout.max_response_tokens or less.
        buffer: tokens before max_tokens over which the punishment grows, 1 to max_tokens.

    Returns:
        [B] in [-1, 0], float32 (float64 for float64 lengths), in the unit of the reward.

    Raises:
        ValueError: lengths is no vector, or holds NaN or a negative length; buffer is below 1 or
            above max_tokens.

    Source: Yu et al. 2025 (DAPO), equation 13, https://arxiv.org/abs/2503.14476
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(
            f"overlong_penalty needs 1 <= buffer <= max_tokens; got {buffer=}, {max_tokens=}"
        )
    if lengths.dim() != 1:
        raise ValueError(f"overlong_penalty needs lengths [B]; got {tuple(lengths.shape)}")
    if not (lengths >= 0).all():
        raise ValueError(
            "overlong_penalty needs lengths of at least 0 tokens; got "
            f"{lengths[~(lengths >= 0)].tolist()}"
        )
    begins = max_tokens - buffer
    return ((begins - at_least_float32(lengths)) / buffer).clamp(-1.0, 0.0)
