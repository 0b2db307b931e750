"""Peak speeds of GPUs: what MFU is a share of."""

import re
from collections.abc import Iterable

from hybridrl.config.choices import DType
from hybridrl.config.planner.flops import HOPPER_BF16_PEAK
from hybridrl.config.planner.machine import GPU

# Dense bfloat16 operations per second, by what nvidia-smi calls the GPU; the first match counts.
# Data sheets give them with sparsity, which doubles them: nvidia.com/en-us/data-center/<name>.
BF16_PEAKS = (
    (r"\bH[12]00 NVL\b", 835.5e12),
    (r"\bH100 PCIe\b", 756.5e12),
    (r"\b(H100|H200|H800|GH200)\b", HOPPER_BF16_PEAK),
    (r"\b(A100|A800)\b", 312e12),
    (r"\bB200\b", 2250e12),
    (r"\bL40S\b", 362e12),
)


def bf16_peak(name: str) -> float | None:
    """Dense bfloat16 operations per second of a GPU; None where they are not known here."""
    return next((peak for pattern, peak in BF16_PEAKS if re.search(pattern, name)), None)


def peak_per_rank(gpus: Iterable[GPU], dtype: DType) -> float | None:
    """Operations per second that one rank's device could do at best.

    Args:
        gpus: of the run, one kind.
        dtype: of compute.

    Returns:
        None without GPUs, for several kinds of them or unknown ones, and for other types than
        bfloat16.
    """
    names = {gpu.name for gpu in gpus}
    if len(names) != 1 or dtype is not DType.bfloat16:
        return None
    return bf16_peak(*names)
