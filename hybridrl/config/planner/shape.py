"""Sizes and parameter counts of a decoder."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridrl.config.planner.families import untested


class ExpertShape(NamedTuple):
    """Sizes of a mixture of experts, the same in every decoder layer that has one.

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


def has_flash_kernel(head_dim: int) -> bool:
    """Return whether FlashAttention has heads of this size, in 16-bit dtypes."""
    return head_dim % 8 == 0 and head_dim <= 256


class AttentionShape(NamedTuple):
    """Heads of queries and of keys, their size, and visible tokens; None: all."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None

    @property
    def width(self) -> int:
        """Elements of a token's queries."""
        return self.heads * self.head_dim


class VisionShape(NamedTuple):
    """Sizes of what makes states of images: a tower of layers over patches, and what follows.

    Attributes:
        parameters: elements of all.
        layers, layer_parameters: layers of the tower, elements of one.
        width, intermediate: sizes of a patch's states, and inside its MLP.
        side: of a patch in pixels.
        values: numbers of a patch that the tower reads.
        merged: patches of a state, which is a token of the language model.
    """

    parameters: int
    layers: int
    layer_parameters: int
    width: int
    intermediate: int
    side: int
    values: int
    merged: int

    def patches(self, size: Sequence[int]) -> int:
        """Return the patches of an image, given its grid of patches, or its sides in pixels."""
        return math.prod(size) if len(size) == 3 else math.prod(n // self.side for n in size)

    def flops(self, patches: int) -> float:
        """Return the operations of a forward of an image: 2 N + 4 L w P of each of P patches."""
        around = (self.parameters - self.layers * self.layer_parameters) / self.merged
        in_weights = self.layers * self.layer_parameters + around
        return patches * (2 * in_weights + 4 * self.layers * self.width * patches)


NO_VISION = VisionShape(0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a kind of decoder layers.

    Attributes:
        attention: None if the layer has none.
        recurrent: it has a convolution over tokens.
        has_state: it has a state that passes from token to token, too.
        experts: mixture of experts in place of the MLP, if any.
        linear_layers: (outputs, inputs) of each linear layer, by name; those that LoRA can adapt.
        parameters: elements.
        kept: values of float32, and of param_dtype, that it keeps of a token for backward.
        matrices: shapes of matrices by their names in a checkpoint's layer.
        latent: elements of a token that vLLM caches for all heads; 0: their keys and values.
    """

    attention: AttentionShape | None
    recurrent: bool
    has_state: bool
    experts: ExpertShape | None
    linear_layers: Mapping[str, tuple[int, int]]
    parameters: int
    kept: tuple[int, int]
    matrices: Mapping[str, tuple[int, ...]]
    latent: int = 0

    def cached(self, ranks: int) -> int:
        """Return the elements of a token in the KV cache of each rank, which splits heads."""
        if self.latent or self.attention is None:
            return self.latent
        return 2 * -(-self.attention.kv_heads // ranks) * self.attention.head_dim


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder, derived from transformers' classes.

    Attributes:
        kind: model_type in config.json.
        hidden, intermediate, vocab: as in config.json.
        tied: true if lm_head is the embedding.
        max_positions: longest sequence in tokens; None if config.json has none.
        parameters, backbone_parameters: elements with lm_head, a tied one counted once; without.
        kinds: of decoder layers.
        order: the kind of each layer, an index of `kinds`.
        vision: what makes states of images.
    """

    kind: str
    hidden: int
    intermediate: int
    vocab: int
    tied: bool
    max_positions: int | None
    parameters: int
    backbone_parameters: int
    kinds: tuple[LayerShape, ...]
    order: tuple[int, ...]
    vision: VisionShape = NO_VISION

    @property
    def takes_images(self) -> bool:
        """True if it makes states of images."""
        return self.vision.parameters > 0

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.order)

    @property
    def counted(self) -> list[tuple[LayerShape, int]]:
        """Kinds of layers with the number of each."""
        counts = Counter(self.order)
        return [(kind, counts[index]) for index, kind in enumerate(self.kinds)]

    @property
    def attentions(self) -> list[AttentionShape]:
        """Attention of each kind of layers that has one."""
        return [kind.attention for kind in self.kinds if kind.attention is not None]

    @property
    def largest_attention(self) -> AttentionShape:
        """Largest numbers and sizes of heads, and the largest window, of all layers."""
        heads, kv_heads, head_dim, windows = zip(*self.attentions, strict=True)
        window = max((size for size in windows if size is not None), default=None)
        return AttentionShape(max(heads), max(kv_heads), max(head_dim), window)

    @property
    def recurrent(self) -> bool:
        """True if a layer is recurrent."""
        return any(kind.recurrent for kind in self.kinds)

    @property
    def has_state(self) -> bool:
        """True if a layer has a state."""
        return any(kind.has_state for kind in self.kinds)

    @property
    def windowed(self) -> int:
        """Number of layers with a sliding window."""
        return sum(n for kind, n in self.counted if kind.attention and kind.attention.window)

    @property
    def experts(self) -> ExpertShape | None:
        """Mixture of experts, if any layer has one."""
        return next((kind.experts for kind in self.kinds if kind.experts), None)

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Linear layers of all kinds, by name; sizes of the first layer that has the name."""
        named: dict[str, tuple[int, int]] = {}
        for kind in self.kinds:
            named |= {n: sides for n, sides in kind.linear_layers.items() if n not in named}
        return named

    @property
    def layer_parameters(self) -> int:
        """Elements of one decoder layer, the mean of all."""
        return sum(n * kind.parameters for kind, n in self.counted) // self.layers

    @property
    def kept(self) -> tuple[int, int]:
        """Values of float32, and of param_dtype, that a layer keeps of a token, mean of all."""
        whole, low = (sum(n * kind.kept[i] for kind, n in self.counted) for i in range(2))
        return whole // self.layers, low // self.layers

    @property
    def untested(self) -> str:
        """Parts that were not run, or are not known, of the family; empty if there are none."""
        return untested(self.kind, has_experts=self.experts is not None)

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embedding; an untied lm_head has as many again."""
        return self.vocab * self.hidden

    def adapter_parameters(self, rank: int, target_modules: Sequence[str]) -> int:
        """Return the elements of all layers' adapters, A and B of each adapted weight."""
        return sum(
            n * rank * sum(sides)
            for kind, n in self.counted
            for name, sides in kind.linear_layers.items()
            if name in target_modules
        )

    def attended(self, length: float) -> float:
        """Return twice the mean number of visible tokens, times queries' width, of all layers."""
        total = 0.0
        for kind, n in self.counted:
            if kind.attention is not None:
                window = min(kind.attention.window or length, length)
                seen = length if window == length else 2 * window - window**2 / length
                total += n * kind.attention.width * seen
        return total

    @property
    def active_parameters(self) -> int:
        """Elements that a token passes: not experts that it is not routed to, nor a tower."""
        mixtures = [(kind.experts, n) for kind, n in self.counted if kind.experts]
        idle = sum(n * (one.number - one.active) * one.inner for one, n in mixtures)
        return self.parameters - self.vision.parameters - 3 * self.hidden * idle

    @property
    def tp_widths(self) -> dict[str, int]:
        """Sizes that tensor parallelism splits in the MLP, by name."""
        widths = {}
        if not all(kind.experts for kind in self.kinds):
            widths["intermediate size"] = self.intermediate
        if self.experts:
            widths["intermediate size of an expert"] = self.experts.inner
            if self.experts.shared:
                widths["intermediate size of the shared expert"] = self.experts.shared
        return widths


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A frozen model beside the policy that scores responses: the reward model, or a teacher.

    Attributes:
        name: of its role, and of which it is, in tables.
        key: config key of its path.
        path: a folder, or a name on the hub.
        has_head: true with a language-modelling head; else it has one for a single score.
        weight: factor of such a score.
        has_weights: true if its weights are read, not drawn.
        own_tokens: true if it reads the text in tokens of its own, not the policy's.
    """

    name: str
    key: str
    path: str
    has_head: bool
    weight: float | None = None
    has_weights: bool = True
    own_tokens: bool = False


@dataclass(frozen=True, kw_only=True)
class FrozenModel(NamedModel):
    """The same, with its sizes."""

    shape: ModelShape

    @property
    def parameters(self) -> int:
        """Elements of its weights."""
        if self.has_head:
            return self.shape.parameters
        return self.shape.backbone_parameters + self.shape.hidden

    def described(self, sizes: str) -> tuple[str, str]:
        """Return name and description, with a text of its sizes, for tables and headers."""
        weight = "" if self.weight is None else f", weight {self.weight:g}"
        return self.name.replace("_", " "), f"{self.path}{sizes}{weight}"


Frozen = Sequence[FrozenModel]
