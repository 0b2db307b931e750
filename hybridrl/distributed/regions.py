"""Regions of tensors and what a rollout engine's loader was seen to do with them: plain data.

Shared by rollout/ (which traces) and reshard/ (which plans).
"""

from typing import NamedTuple


class Region(NamedTuple):
    """A hyper-rectangle of a tensor: [offset_d, offset_d + shape_d) in each dim d."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class TracedCopy(NamedTuple):
    """The loader copies a region of a checkpoint tensor into a parameter, at `offset`.

    The parameter's region has the shape of the checkpoint tensor's.
    """

    source: str
    region: Region
    parameter: str
    offset: tuple[int, ...]

    @property
    def destination(self) -> Region:
        """The region of the parameter that is written."""
        return Region(self.offset, self.region.shape)


class TracedFill(NamedTuple):
    """The loader sets a region of a parameter to a constant."""

    parameter: str
    region: Region
    value: float


class Refusal(NamedTuple):
    """The loader writes a parameter in a way that is no plain copy or fill.

    Attributes:
        reason: what was seen, for the log.
        sources: checkpoint tensors that the loader had in hand or copied into this parameter.
    """

    reason: str
    sources: tuple[str, ...]


class Trace(NamedTuple):
    """Everything the loader does on one rank, and what could not be understood.

    Attributes:
        copies, fills: in the loader's order; none touches a refused parameter.
        refused: by parameter; these take the gathered path.
        parameters: shape of each parameter of the engine's model, and of each buffer that the
            loader writes.
    """

    copies: list[TracedCopy]
    fills: list[TracedFill]
    refused: dict[str, Refusal]
    parameters: dict[str, tuple[int, ...]]
