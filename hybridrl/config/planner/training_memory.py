"""Memory of forward and backward of a sharded model on one rank, besides weights and AdamW.

Memory rises until backward begins, and may rise again as gradients replace activations. So the peak
is at one of a few points, which are computed here.

Symbols:  N = tokens of a packed forward   R = response tokens among them   L = layers
          S = shards of the weights   s, r = bytes of an element in param_dtype, reduce_dtype
Units:    bytes of one rank
"""

from dataclasses import dataclass

from hybridrl.config.choices import Accumulation, DType
from hybridrl.config.planner import activations
from hybridrl.config.planner.model_shape import ModelShape
from hybridrl.config.schema import FSDPConfig, LoRAConfig

BYTES = {DType.float32: 4, DType.bfloat16: 2}
# Master weights and the gradients that AdamW sees are float32.
MASTER_BYTES = 4


@dataclass(frozen=True)
class Workload:
    """The largest packed forward of one rank.

    Attributes:
        tokens: N.
        response_tokens: R; logits are computed only for these.
        micro_batches: forwards and backwards of an optimizer step.
        chunk_tokens: tokens whose logits are computed at once.
        fused_logits: true if a kernel reads the logits without float32 copies, as on a GPU.
    """

    tokens: int
    response_tokens: int
    micro_batches: int
    chunk_tokens: int
    fused_logits: bool


class TrainingMemory:
    """Forward and backward of one role.

    Args:
        fsdp: the sharding spec, dp_shard resolved.
        shape: the model's.
        work: the largest forward.
        has_head: true for log-probs (actor, ref), false for values (critic).
        lora: adapters, if only these are trained. Activations are an upper bound: those for
            gradients of frozen weights are counted, too.
    """

    def __init__(
        self,
        fsdp: FSDPConfig,
        shape: ModelShape,
        work: Workload,
        *,
        has_head: bool,
        lora: LoRAConfig | None = None,
    ) -> None:
        assert fsdp.dp_shard is not None
        self.fsdp, self.shape, self.work, self.has_head = fsdp, shape, work, has_head
        self.shards = fsdp.dp_shard
        self.size, self.reduced = BYTES[fsdp.param_dtype], BYTES[fsdp.reduce_dtype]
        self.head = shape.embedding_parameters if has_head else 0
        base = shape.parameters if has_head else shape.backbone_parameters
        self.root = base - shape.layers * shape.layer_parameters
        rank, targets = (lora.rank, lora.target_modules) if lora is not None else (0, [])
        adapters = shape.adapter_parameters(rank, targets)
        self.layer = shape.layer_parameters + adapters
        self.elements = self.root + shape.layers * self.layer
        # Parameters with gradients: all, or only adapters.
        self.trained_layer = adapters if rank else self.layer
        self.trained_root = 0 if rank else self.root
        self.trained_head = 0 if rank else self.head
        self.trained = self.trained_root + shape.layers * self.trained_layer
        self.layer_kept = work.tokens * (
            activations.kept_by_layer(shape, self.size, compiled=fsdp.compile)
            + self.size * rank * len(targets)
        )
        self.last_norm = work.tokens * activations.kept_by_last_norm(shape, self.size)
        self.shared_kept = work.tokens * activations.kept_by_all_layers(shape, self.size)
        self.layer_moment = work.tokens * activations.backward_moment(shape, self.size)

    def score(self) -> dict[str, int]:
        """Return the peak of a forward without gradients: inside a layer, or at the logits."""
        moment = activations.forward_moment(self.shape, self.size)
        inside = self.work.tokens * moment
        if self.fsdp.compile:
            # Compiled layers run as for backward.
            inside = max(inside, self.layer_kept)
        states = (self.work.tokens + self.work.response_tokens) * self.size * self.shape.hidden
        points = [{"activations": inside}]
        if self.has_head:
            points.append({"activations": states, "logits": self._logits_chunk()})
        # With full accumulation scoring gathers the weights once for all micro-batches.
        full = self.fsdp.accumulation is Accumulation.full
        gathered = self.size * self.elements if full else self._gathered()
        return {"gathered weights": gathered} | _largest(points)

    def update(self) -> dict[str, int]:
        """Return the peak of an optimizer step's last forward and backward, gradients included."""
        last_layer, first_layer = self._layer_points()
        points = [last_layer, first_layer, self._root_point()]
        if self.has_head:
            points.append(self._loss_point())
        return _largest(points)

    def _loss_point(self) -> dict[str, int]:
        """Return memory at the log-probs' backward: all activations, and the head's gradient."""
        logits, head = self._logits(), self.size * self.trained_head
        if self.work.response_tokens > self.work.chunk_tokens:
            # With several chunks it is accumulated in float32, and cast after the logits are freed.
            head = MASTER_BYTES * self.trained_head + max(0, head - logits)
        gradient = self.size * self.shape.hidden
        states = activations.kept_by_head(self.shape, self.size) + gradient
        kept = self._kept() + self.last_norm + self.work.response_tokens * states
        return {
            "activations": kept,
            "logits": logits,
            "gradient of the head": head,
            "gradients": self._gradients_before(),
            "gathered weights": self._gathered(),
        }

    def _layer_points(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return memory at the backward of the last layer, and of the first, after all others."""
        last_norm = self.last_norm + self.work.tokens * activations.last_norm_moment(self.shape)
        if self.fsdp.activation_checkpointing:
            one = self.layer_kept + self.work.tokens * activations.kept_by_checkpoint(
                self.shape, self.size
            )
            last = self._kept() + max(self.layer_kept + self.layer_moment, last_norm)
        else:
            one = self.layer_kept
            last = self._kept() + max(self.layer_moment, last_norm)
        shared = {
            "gathered weights": self._gathered(),
            "gradient of the head": self.size * self.trained_head,
            "reduce-scatter buffers": self._reduce_buffers(self.trained_layer),
        }
        return (
            shared | {"activations": last, "gradients": self._gradients_before()},
            shared
            | {
                "gathered weights": self._gathered_after_layers(),
                "activations": one + self.shared_kept + self.layer_moment,
                "gradients": self._gradients_after_layers(),
            },
        )

    def _root_point(self) -> dict[str, int]:
        """Return memory at the end of backward, at the reduction of embedding and head."""
        embedding = self.size * self.shape.embedding_parameters if self.trained_root else 0
        as_computed = embedding + self.size * self.trained_head
        reduce_buffers = max(self._reduce_buffers(self.trained_root), as_computed)
        return {
            "gathered weights": self._gathered_after_layers(),
            "reduce-scatter buffers": reduce_buffers,
            "gradients": self._gradients_after_layers(),
        }

    def _kept(self) -> int:
        """Return the activations that all layers keep for backward."""
        one = self.layer_kept
        if self.fsdp.activation_checkpointing:
            one = self.work.tokens * activations.kept_by_checkpoint(self.shape, self.size)
        return self.shape.layers * one + self.shared_kept

    def _logits(self) -> int:
        """Return the logits at the start of backward: all of them; gradients overwrite them."""
        keeps = not self.fsdp.activation_checkpointing and self.fsdp.param_dtype is DType.bfloat16
        if not keeps:
            return self._logits_chunk()
        chunk = 0 if self.work.fused_logits else self._logits_chunk()
        return self.work.response_tokens * self.size * self.shape.vocab + chunk

    def _logits_chunk(self) -> int:
        """Return the logits of a chunk; without the kernel, also their float32 copies."""
        chunk = min(self.work.chunk_tokens, self.work.response_tokens)
        each = self.size if self.work.fused_logits else self.size + 3 * MASTER_BYTES
        return chunk * each * self.shape.vocab

    def _gathered(self) -> int:
        """Return the gathered weights: all, if they stay gathered after forward."""
        if not self.fsdp.reshard_after_forward:
            return self.size * self.elements
        return self._gathered_at_work()

    def _gathered_after_layers(self) -> int:
        """Return the gathered weights at the first layer's backward of the last micro-batch."""
        return self._gathered_at_work() if self.work.micro_batches == 1 else self._gathered()

    def _gathered_at_work(self) -> int:
        """Return the gathered weights of the root and of active layers.

        On several ranks: the current layer, the all-gather of the next one, and the previous one,
        whose buffer is freed late.
        """
        layers = min(1 if self.shards == 1 else 3, self.shape.layers)
        return self.size * (self.root + layers * self.layer)

    def _gradients_before(self) -> int:
        """Return the gradients of earlier micro-batches, unsharded or sharded."""
        if self.work.micro_batches == 1:
            return 0
        if self.fsdp.accumulation is Accumulation.full:
            return self.reduced * self.trained
        return MASTER_BYTES * self.trained // self.shards

    def _gradients_after_layers(self) -> int:
        """Return the gradients before the reduction of the root's gradient."""
        done = MASTER_BYTES * (self.trained - self.trained_root) // self.shards
        if self.work.micro_batches == 1:
            return done
        if self.fsdp.accumulation is Accumulation.full:
            return done + self.reduced * self.trained_root
        return MASTER_BYTES * self.trained // self.shards

    def _reduce_buffers(self, elements: int) -> int:
        """Return the buffers of a reduce-scatter: gradient, input, and output in float32.

        On one rank FSDP divides the input by 1 into a third buffer instead.
        """
        if self.shards == 1:
            return max(self.size + self.reduced, 2 * self.reduced + MASTER_BYTES) * elements
        return (self.size + self.reduced) * elements + MASTER_BYTES * elements // self.shards


def _largest(points: list[dict[str, int]]) -> dict[str, int]:
    return max(points, key=lambda parts: sum(parts.values()))
