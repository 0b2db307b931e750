"""Length penalty of long responses, added to the outcome reward."""

from torch import Tensor

from hybridrl.algorithms.masked import at_least_float32


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """Compute DAPO's soft overlong punishment, linear over the last `buffer` tokens.

    0                      if         L <= M - C
    ((M - C) - L) / C      if M - C < L <= M
    -1                     if     M < L

    Here L = lengths, M = max_tokens, C = buffer. A response truncated at M gets -1.

    Args:
        lengths: [B] tokens of each response, integer or floating.
        max_tokens: length from which the penalty is -1; rollout.max_response_tokens or less.
        buffer: tokens before max_tokens over which the penalty grows, 1 to max_tokens.

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
