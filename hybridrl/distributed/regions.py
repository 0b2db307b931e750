"""Regions of tensors and what vLLM's loader was seen to do with them: plain data, no behaviour.

Shared by rollout/ (which traces) and reshard/ (which plans). Offsets and strides in elements.
"""

from typing import NamedTuple


class Region(NamedTuple):
    """A hyper-rectangle of a global tensor: [offset_d, offset_d + shape_d) in each dim d."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class TracedCopy(NamedTuple):
    """The loader copies a region of a checkpoint tensor into a strided region of a parameter."""

    source: str
    region: Region
    parameter: str
    offset: int
    stride: tuple[int, ...]


class TracedFill(NamedTuple):
    """The loader sets a strided region of a parameter to a constant."""

    parameter: str
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]
    value: float


class Trace(NamedTuple):
    """Everything the loader does on one rank, and what could not be understood.

    `refused` maps a parameter's name to the reason; it takes the gathered path.
    """

    copies: list[TracedCopy]
    fills: list[TracedFill]
    refused: dict[str, str]
    parameter_sizes: dict[str, int]
