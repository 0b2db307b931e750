"""Memory of forward and backward of a sharded model on one rank, besides weights and AdamW.

Memory rises until backward begins, and may rise again as gradients replace activations. So the peak
is as the loss's backward begins, in the last layer's, or at the end, when gradients are reduced.
Tests compare with autograd on fake tensors, to 15 %.

Symbols:  h = hidden   I = intermediate   D = head size   H, K = query, key heads
          N = tokens of a packed forward   s, r = bytes of an element in param_dtype, reduce_dtype
Units:    bytes of one rank
"""

from typing import NamedTuple

from hybridrl.config.choices import Accumulation, DType
from hybridrl.config.planner.shape import ModelShape
from hybridrl.config.schema import FSDPConfig, LoRAConfig

BYTES = {DType.float32: 4, DType.bfloat16: 2}
# Master weights, the gradients that AdamW sees, and norms are float32.
MASTER_BYTES = 4


class Workload(NamedTuple):
    """The largest packed forward of one rank.

    Attributes:
        tokens: N, all of responses.
        micro_batches: forwards and backwards of an optimizer step.
        chunk_tokens: tokens whose logits are computed at once.
        image_tokens: at most, if prompts were images alone.
    """

    tokens: int
    micro_batches: int
    chunk_tokens: int
    image_tokens: int = 0


def mlp_widths(shape: ModelShape) -> tuple[int, int]:
    """Return intermediate values, and copies of hidden states, per token in the largest MLP."""
    experts = shape.experts
    dense = 0 if all(kind.experts for kind in shape.kinds) else shape.intermediate
    if experts is None:
        return dense, 0
    return max(dense, experts.active * experts.inner + experts.shared), experts.active


def kept_by_layer(shape: ModelShape, size: int, *, compiled: bool) -> int:
    """Return the bytes per token that autograd keeps of one decoder layer.

    Eager:     as derived; of Llama's each norm (4 + 2s)h, attention 2s(H + K)D, MLP 4sI
    Compiled:  layer input, norms' outputs, o_proj's output 4sh, attention as above, MLP 3sI
    Experts:   I of all experts of the token; inputs and outputs of each 2sh; router 4(h + E)
    """
    if not compiled:
        whole, low = shape.kept
        return MASTER_BYTES * whole + size * low
    inner, copies = mlp_widths(shape)
    routed = 2 * size * copies * shape.hidden
    if shape.experts:
        routed += MASTER_BYTES * (shape.hidden + shape.experts.number)
        routed += size * shape.hidden * (shape.experts.shared > 0)
    heads, kv_heads, head_dim, _ = shape.largest_attention
    attention = (heads + kv_heads) * head_dim
    return size * (4 * shape.hidden + 2 * attention + 3 * inner) + routed


def key_share(shape: ModelShape, fsdp: FSDPConfig) -> float:
    """Return the bytes of a token's keys and values in a layer over all that a layer keeps."""
    _, kv_heads, head_dim, _ = shape.largest_attention
    size = BYTES[fsdp.param_dtype]
    return 2 * size * kv_heads * head_dim / kept_by_layer(shape, size, compiled=fsdp.compile)


class TrainingMemory:
    """Forward and backward of one role.

    Args:
        fsdp: the sharding spec.
        shape: the model's.
        work: the largest forward.
        has_head: true for log-probs (actor, ref), false for values (critic).
        lora: adapters, if only these are trained. Activations are an upper bound: those for
            gradients of frozen weights are counted, too.
        train_vision: what makes states of images is trained, too.
    """

    def __init__(
        self,
        fsdp: FSDPConfig,
        shape: ModelShape,
        work: Workload,
        *,
        has_head: bool,
        lora: LoRAConfig | None = None,
        train_vision: bool = False,
    ) -> None:
        self.fsdp, self.shape, self.work, self.has_head = fsdp, shape, work, has_head
        self.shards = fsdp.shards
        self.size, self.reduced = BYTES[fsdp.param_dtype], BYTES[fsdp.reduce_dtype]
        base = shape.parameters if has_head else shape.backbone_parameters
        adapters = shape.adapter_parameters(lora.rank, lora.target_modules) if lora else 0
        adapters //= shape.layers
        self.root = base - shape.layers * shape.layer_parameters
        self.layer = shape.layer_parameters + adapters
        self.head = shape.embedding_parameters if has_head else 0
        # Parameters with gradients: all, or only adapters.
        text_root = self.root - (0 if train_vision else shape.vision.parameters)
        self.trained_root, self.trained_head = (0, 0) if lora else (text_root, self.head)
        self.train_vision = train_vision
        self.patches = work.image_tokens * shape.vision.merged
        self.trained_layer = adapters if lora else self.layer
        self.trained = self.trained_root + shape.layers * self.trained_layer
        self.layer_kept = work.tokens * kept_by_layer(shape, self.size, compiled=fsdp.compile)

    def score(self) -> dict[str, int]:
        """Return the peak of a forward without gradients: inside a layer, or at the logits."""
        tokens, h, s = self.work.tokens, self.shape.hidden, self.size
        # At the product of gate and up, at the sum of the experts, or in a norm.
        inner, copies = mlp_widths(self.shape)
        in_mlp = s * (max(3 * inner + copies * h, 4 * copies * h) + 4 * h)
        inside = tokens * max(in_mlp, (8 + 6 * s) * h)
        points = [{"activations": inside + self._images()}, self.tower()]
        if self.has_head:
            states = 2 * tokens * s * h + self._images()
            points.append({"activations": states, "logits": self._logits_chunk()})
        # With full accumulation scoring gathers the weights once for all micro-batches.
        full = self.fsdp.accumulation is Accumulation.full
        gathered = s * self._elements() if full else self._gathered()
        return {"gathered weights": gathered} | _largest(points)

    def update(self) -> dict[str, int]:
        """Return the peak of an optimizer step's last forward and backward, gradients included."""
        points = [self.last_layer(), self.end()]
        return _largest([self.loss(), *points] if self.has_head else points)

    def loss(self) -> dict[str, int]:
        """Return memory at the log-probs' backward: all activations, and the head's gradient."""
        logits = self._logits_chunk()
        if not self.fsdp.activation_checkpointing and self.fsdp.param_dtype is DType.bfloat16:
            logits = self.work.tokens * self.size * self.shape.vocab
        states = 2 * self.work.tokens * self.size * self.shape.hidden
        return {
            "activations": self._kept() + states,
            "logits": logits,
            "gradient of the head": MASTER_BYTES * self.trained_head,
            "gradients": self._earlier_gradients(),
            "gathered weights": self._gathered(),
        }

    def last_layer(self) -> dict[str, int]:
        """Return memory at the backward of the last layer, or of the norm behind it."""
        h, s = self.shape.hidden, self.size
        # Gradients of gate and up, or of a norm, and of the residual stream.
        inner, copies = mlp_widths(self.shape)
        inside = self.work.tokens * s * max(2 * inner + (1 + copies) * h, 5 * h)
        if self.fsdp.activation_checkpointing:
            inside += self.layer_kept
        norm = self.work.tokens * (4 * MASTER_BYTES + 2) * h
        return {
            "activations": self._kept() + max(inside, norm),
            "gradient of the head": s * self.trained_head,
            "reduce-scatter buffers": self._reduce_buffers(self.trained_layer),
            "gradients": self._earlier_gradients(),
            "gathered weights": self._gathered(),
        }

    def end(self) -> dict[str, int]:
        """Return memory as embedding and head are reduced, after all layers."""
        several = self.work.micro_batches > 1
        return {
            "activations": self.layer_kept + self._images(),
            # A single backward drops weights as it gets their gradients.
            "gathered weights": self._gathered() if several else self._gathered_at_work(),
            "reduce-scatter buffers": self._reduce_buffers(self.trained_root),
            "gradients": MASTER_BYTES * self.trained // self.shards,
        }

    def tower(self) -> dict[str, int]:
        """Return memory inside a layer of the tower: queries and keys are float32 as they rotate.

        Of an MLP, with a gate perhaps, or of attention.
        """
        width, inner = self.shape.vision.width, self.shape.vision.intermediate
        inside = self.size * 3 * inner, (4 * self.size + 4 * MASTER_BYTES) * width
        one = max(inside) + 2 * self.size * width
        return {"activations": self._images() + self.patches * one}

    def _images(self) -> int:
        """Return the pixels of images, and what a trained tower keeps."""
        vision = self.shape.vision
        each = MASTER_BYTES * vision.values
        if self.train_vision:
            width, inner = vision.width, vision.intermediate
            layer = self.size * (8 * width + 3 * inner) + 4 * MASTER_BYTES * width
            streams = self.fsdp.activation_checkpointing
            each += vision.layers * (self.size * width if streams else layer)
        return self.patches * each

    def _kept(self) -> int:
        """Return the activations that all layers and the last norm keep for backward."""
        one, stream = self.layer_kept, self.work.tokens * self.size * self.shape.hidden
        if self.fsdp.activation_checkpointing:
            one = stream
        return self.shape.layers * one + 3 * stream + self._images()

    def _logits_chunk(self) -> int:
        return min(self.work.chunk_tokens, self.work.tokens) * self.size * self.shape.vocab

    def _elements(self) -> int:
        return self.root + self.shape.layers * self.layer

    def _gathered(self) -> int:
        """Return the gathered weights: all, if they stay gathered after forward."""
        if not self.fsdp.reshard_after_forward:
            return self.size * self._elements()
        return self._gathered_at_work()

    def _gathered_at_work(self) -> int:
        """Return the gathered weights of the root, the current layer, the next and the previous."""
        away = self.shape.vision.layers * self.shape.vision.layer_parameters
        return self.size * (self.root - away + min(3, self.shape.layers) * self.layer)

    def _earlier_gradients(self) -> int:
        """Return the gradients of earlier micro-batches, unsharded or sharded."""
        if self.work.micro_batches == 1:
            return 0
        if self.fsdp.accumulation is Accumulation.full:
            return self.reduced * self.trained
        return MASTER_BYTES * self.trained // self.shards

    def _reduce_buffers(self, elements: int) -> int:
        """Return a reduce-scatter's gradient, input, and output in float32."""
        return (self.size + self.reduced) * elements + MASTER_BYTES * elements // self.shards


def _largest(points: list[dict[str, int]]) -> dict[str, int]:
    return max(points, key=lambda parts: sum(parts.values()))
