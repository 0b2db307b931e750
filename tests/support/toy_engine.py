"""A stand-in for a vLLM model on one tensor-parallel rank, fused and split in the same way.

Its loader slices with chunk and narrow as vLLM's do. Given data-free tensors it can be traced;
given tensors that hold their own coordinates it says what belongs where (the oracle). One buffer
is loaded like a parameter; another is computed when the engine starts.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hybridrl.distributed.experts import CheckpointTensor

HEAD, NUM_HEADS, NUM_KV_HEADS = 2, 8, 2
HIDDEN, INTERMEDIATE, VOCAB, PADDED_VOCAB = 6, 24, 21, 64
PADDING = -1

SOURCES: dict[str, tuple[int, ...]] = {
    "embed": (VOCAB, HIDDEN),
    "norm": (HIDDEN,),
    "q": (NUM_HEADS * HEAD, HIDDEN),
    "k": (NUM_KV_HEADS * HEAD, HIDDEN),
    "v": (NUM_KV_HEADS * HEAD, HIDDEN),
    "q_bias": (NUM_HEADS * HEAD,),
    "k_bias": (NUM_KV_HEADS * HEAD,),
    "v_bias": (NUM_KV_HEADS * HEAD,),
    "o": (HIDDEN, NUM_HEADS * HEAD),
    "gate": (INTERMEDIATE, HIDDEN),
    "up": (INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "scales": (3,),
    "lm_head.weight": (VOCAB, HIDDEN),  # a tied duplicate, which the loader skips
}


def sources() -> list[CheckpointTensor]:
    """Each a parameter of its own."""
    return [CheckpointTensor(name, shape, name) for name, shape in SOURCES.items()]


class ToyEngine(nn.Module):
    """Rank `rank` of `tp`; KV heads are replicated where tp exceeds their number."""

    def __init__(self, rank: int, tp: int) -> None:
        super().__init__()
        self.rank, self.tp = rank, tp
        self.kv_parts = min(tp, NUM_KV_HEADS)
        kv_rows = NUM_KV_HEADS * HEAD // self.kv_parts
        qkv_rows = NUM_HEADS * HEAD // tp + 2 * kv_rows
        shapes = {
            "embed": (PADDED_VOCAB // tp, HIDDEN),
            "norm": (HIDDEN,),
            "qkv": (qkv_rows, HIDDEN),
            "qkv_bias": (qkv_rows,),
            "o": (HIDDEN, NUM_HEADS * HEAD // tp),
            "gate_up": (2 * INTERMEDIATE // tp, HIDDEN),
            "down": (HIDDEN, INTERMEDIATE // tp),
        }
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.full(shape, -7, dtype=torch.int64), requires_grad=False)
            self.register_parameter(name, parameter)
        self.register_buffer("scales", torch.full((3,), -7, dtype=torch.int64))
        self.register_buffer("rotary", torch.arange(4), persistent=False)

    def tensors(self) -> dict[str, Tensor]:
        """What the loader writes, by name."""
        parameters = {name: parameter.data for name, parameter in self.named_parameters()}
        return parameters | {"scales": self.scales}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._load(name, tensor)

    def _load(self, name: str, tensor: Tensor) -> None:
        if name in ("q", "k", "v", "q_bias", "k_bias", "v_bias"):
            self._load_qkv(name, tensor)
        elif name in ("gate", "up"):
            own = self.gate_up.data.chunk(2)[name == "up"]
            own.copy_(tensor.chunk(self.tp)[self.rank])
        elif name in ("o", "down"):
            getattr(self, name).data.copy_(tensor.chunk(self.tp, dim=1)[self.rank])
        elif name in ("norm", "scales"):
            getattr(self, name).data.copy_(tensor)
        elif name == "embed":
            rows = len(self.embed)
            part = tensor[self.rank * rows : (self.rank + 1) * rows]
            self.embed.data[: len(part)].copy_(part)
            self.embed.data[len(part) :].fill_(PADDING)

    def _load_qkv(self, name: str, tensor: Tensor) -> None:
        fused = self.qkv_bias.data if name.endswith("bias") else self.qkv.data
        q_rows = NUM_HEADS * HEAD // self.tp
        kv_rows = (len(fused) - q_rows) // 2
        place = {"q": 0, "k": q_rows, "v": q_rows + kv_rows}[name[0]]
        if name[0] == "q":
            part = tensor.narrow(0, self.rank * q_rows, q_rows)
        else:
            head = self.rank // (self.tp // self.kv_parts)
            part = tensor.narrow(0, head * kv_rows, kv_rows)
        fused.narrow(0, place, len(part)).copy_(part)


def coordinates() -> dict[str, Tensor]:
    """Tensors of SOURCES whose every element is a number of its own, over all of them."""
    whole, start = {}, 0
    for name, shape in SOURCES.items():
        size = torch.Size(shape).numel()
        whole[name] = torch.arange(start, start + size).view(shape)
        start += size
    return whole
