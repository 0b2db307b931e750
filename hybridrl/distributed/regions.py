"""Regions of tensors and traces of a rollout engine's loader: plain data.

Shared by rollout/, which records traces, and reshard/, which plans with them.
"""

from typing import NamedTuple


class Region(NamedTuple):
    """Hyper-rectangle of a tensor: [offset_d, offset_d + shape_d) in each dim d."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class TracedCopy(NamedTuple):
    """Copy of a region of a checkpoint tensor into a parameter, at `offset`.

    Both regions have the same shape.
    """

    source: str
    region: Region
    parameter: str
    offset: tuple[int, ...]

    @property
    def destination(self) -> Region:
        """Written region of the parameter."""
        return Region(self.offset, self.region.shape)


class TracedFill(NamedTuple):
    """Constant that the loader writes into a region of a parameter."""

    parameter: str
    region: Region
    value: float


class Refusal(NamedTuple):
    """Parameter that the loader writes other than by plain copies or fills.

    `reason` is for the log; `sources` are the checkpoint tensors that the write may combine.
    """

    reason: str
    sources: tuple[str, ...]


class Trace(NamedTuple):
    """All writes of the loader on one rank.

    Attributes:
        copies, fills: in the loader's order; none writes a refused parameter.
        refused: by parameter; their sources are gathered whole and loaded.
        parameters: shape of each parameter of the engine's model, and of each buffer that the
            loader writes.
    """

    copies: list[TracedCopy]
    fills: list[TracedFill]
    refused: dict[str, Refusal]
    parameters: dict[str, tuple[int, ...]]
