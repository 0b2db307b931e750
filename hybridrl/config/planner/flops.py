"""Model FLOPs of a decoder and peak FLOPs of GPUs, whose ratio is the MFU.

A token costs 6 N operations in the weights and 6 L h S in causal attention, forward and backward;
forward alone is a third. Recomputation does not count. In a layer with a window W < S, S is
2 W - W^2 / S: what its tokens see.

Symbols: N = parameters that a token passes   L = layers   h = width of all query heads
         S = mean sequence length

Source: Chowdhery et al. 2022, appendix B, https://arxiv.org/abs/2204.02311, with attention halved,
because half of a causal score matrix is never computed
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from hybridrl.config.choices import DType
from hybridrl.config.planner.machine import GPU
from hybridrl.config.planner.shape import ModelShape


class DataSheet(NamedTuple):
    """Dense bfloat16 operations, and bytes of its own memory, that a GPU handles per second."""

    peak: float
    bandwidth: float


H100 = DataSheet(989e12, 3.35e12)
# By nvidia-smi's name; the first match counts. Data sheets (nvidia.com/en-us/data-center/<name>)
# give twice as many operations, with sparsity.
DATA_SHEETS = (
    (r"\bH200 NVL\b", DataSheet(835.5e12, 4.8e12)),
    (r"\bH100 NVL\b", DataSheet(835.5e12, 3.9e12)),
    (r"\bH100 PCIe\b", DataSheet(756.5e12, 2.0e12)),
    (r"\b(H200|GH200)\b", DataSheet(H100.peak, 4.8e12)),
    (r"\b(H100|H800)\b", H100),
    (r"\b(A100|A800)\b", DataSheet(312e12, 2.0e12)),
    (r"\bB200\b", DataSheet(2250e12, 8e12)),
    (r"\bL40S\b", DataSheet(362e12, 0.864e12)),
)
# Time of an operation in attention over that of one in the weights: FlashAttention-2, all that
# torch 2.11 has for packed sequences, against matrix products with the elementwise work around
# them, 198 and 589 TFLOP/s by the kernels' times in an update (350 and 1,030 ms of four
# micro-batches of 4,096-token sequences, Qwen2.5-1.5B's shape, H200; benchmarks/RESULTS.md).
ATTENTION_TIME = 3.0
# First tokens are shared if they are at least this share of a row. Fewer save less time than
# reading their keys again takes.
LEAST_SHARED = 1 / 16
# Units that each rank has at least in a mini-batch, for its balance.
UNITS_PER_RANK = 2


def training_flops(
    shape: ModelShape, num_tokens: float, attention: float, *, trains_all: bool = True
) -> float:
    """Return the operations of forward and backward of packed sequences: 6 N + 6 L h S per token.

    Args:
        shape: the model's.
        num_tokens: tokens that are computed, prompts included.
        attention: operations of a forward in attention.
        trains_all: false with adapters: frozen weights have no gradients, so 4 N; the adapters'
            own operations, a few percent, are not counted.
    """
    in_weights = 2 * shape.active_parameters * num_tokens
    return (3 if trains_all else 2) * in_weights + 3 * attention


def forward_flops(shape: ModelShape, num_tokens: float, attention: float) -> float:
    """Return the operations of forward alone: 2 N per token, and those of its attention."""
    return 2 * shape.active_parameters * num_tokens + attention


def attention_flops(shape: ModelShape, length: float) -> float:
    """Return the operations in attention of a forward of one sequence: 2 L h S per token."""
    return 2 * length * shape.attended(length) if length else 0.0


def sequence_cost(shape: ModelShape, num_tokens: int) -> float:
    """Return the relative time of forward and backward of one sequence.

    In operations in the weights: 6 N + 6 L h S ATTENTION_TIME per token; S = `num_tokens`.
    """
    attention = ATTENTION_TIME * attention_flops(shape, num_tokens)
    return training_flops(shape, num_tokens, attention)


def data_sheet(name: str) -> DataSheet | None:
    """Return the rates of a GPU by nvidia-smi's name; None if it is unknown."""
    return next((sheet for pattern, sheet in DATA_SHEETS if re.search(pattern, name)), None)


def peak_per_rank(gpus: Iterable[GPU], dtype: DType) -> float | None:
    """Return the peak operations per second of one rank's GPU.

    None without GPUs, for unknown or several kinds, and for other types than bfloat16.
    """
    names = {gpu.name for gpu in gpus}
    if len(names) != 1 or dtype is not DType.bfloat16:
        return None
    sheet = data_sheet(*names)
    return sheet and sheet.peak
