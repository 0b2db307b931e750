"""What the losses of a mini-batch are divided by."""

from typing import NamedTuple


class Totals(NamedTuple):
    """Counts over a mini-batch, all ranks together.

    Attributes:
        tokens: response tokens that count.
        responses: responses with at least one of them.
    """

    tokens: int
    responses: int
