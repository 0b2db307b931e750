"""Sizes and parameter counts of a decoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridrl.config.planner.families import untested


class ExpertShape(NamedTuple):
    """Sizes of a mixture of experts, the same in every decoder layer.

    Attributes:
        number: experts of a layer.
        active: experts that a token passes.
        inner: intermediate size of an expert.
        shared: intermediate size of the expert that all tokens pass; 0: there is none.
    """

    number: int
    active: int
    inner: int
    shared: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder, derived from transformers' classes.

    Attributes:
        kind: model_type in config.json.
        hidden, intermediate, layers, vocab: as in config.json.
        heads, kv_heads, head_dim: of attention; the largest of all layers.
        tied: true if lm_head is the embedding.
        window, windowed: visible tokens in layers with a sliding window; the number of these.
        max_positions: longest sequence in tokens; None if config.json has none.
        experts: mixture of experts in place of the MLP, if any.
        linear_layers: (outputs, inputs) of each linear layer of a decoder layer, by name; those
            that LoRA can adapt.
        layer_parameters: elements of one decoder layer, the mean of all.
        parameters, backbone_parameters: elements with lm_head, a tied one counted once; without.
        kept: values of float32, and of param_dtype, that a layer keeps of a token for backward.
        matrices: shapes of a decoder layer's matrices by their names in a checkpoint.
    """

    kind: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    window: int | None
    windowed: int
    max_positions: int | None
    experts: ExpertShape | None
    linear_layers: Mapping[str, tuple[int, int]]
    layer_parameters: int
    parameters: int
    backbone_parameters: int
    kept: tuple[int, int]
    matrices: Mapping[str, tuple[int, ...]]

    @property
    def untested(self) -> str:
        """Parts that were not run, or are not known, of the family; empty if there are none."""
        return untested(self.kind, has_experts=self.experts is not None)

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embedding; an untied lm_head has as many again."""
        return self.vocab * self.hidden

    def adapter_parameters(self, rank: int, target_modules: Sequence[str]) -> int:
        """Return the elements of one decoder layer's adapters, A and B of each adapted weight."""
        layers = self.linear_layers.items()
        return sum(rank * sum(sides) for name, sides in layers if name in target_modules)

    def attended(self, length: float) -> float:
        """Return twice the mean number of visible tokens of a sequence, over all layers."""
        seen = length
        if self.window is not None and length > self.window:
            seen = 2 * self.window - self.window**2 / length
        return (self.layers - self.windowed) * length + self.windowed * seen

    @property
    def active_parameters(self) -> int:
        """Elements that a token passes: all but those of experts that it is not routed to."""
        idle = self.experts.number - self.experts.active if self.experts else 0
        inner = self.experts.inner if self.experts else 0
        return self.parameters - self.layers * idle * 3 * self.hidden * inner

    @property
    def tp_widths(self) -> dict[str, int]:
        """Sizes that tensor parallelism splits in the MLP, by name."""
        if not self.experts:
            return {"intermediate size": self.intermediate}
        widths = {"intermediate size of an expert": self.experts.inner}
        if self.experts.shared:
            widths["intermediate size of the shared expert"] = self.experts.shared
        return widths
