"""FP8 layers of an engine: which traces of its loader can be quantised row by row."""

import pytest
import torch

from hybridrl.config.errors import ConfigError
from hybridrl.distributed.regions import FP8, Region, Trace, TracedCopy
from hybridrl.rollout.vllm.fp8 import Quantised, with_scales

HELD = {"w": Quantised(torch.zeros(4, 6, dtype=FP8), torch.zeros(4, 1))}


def trace(*copies):
    """Copies of (rows, columns) of two sources to a place of `w`, and a bias."""
    return Trace(
        [TracedCopy(f"s{n}", Region((0, 0), shape), "w", at) for n, (shape, at) in copies],
        [],
        {"w": (4, 6), "bias": (4,)},
        {"bias": torch.float32},
    )


def test_rows_of_several_weights_have_scales():
    found, tensors = with_scales(trace((0, ((3, 6), (0, 0))), (1, ((1, 6), (3, 0)))), HELD)
    assert found.dtypes == {"w": FP8, "bias": torch.float32}
    assert found.tensors == ["w", "bias", "w_scale"]
    assert tensors["w"] is HELD["w"].weight and tensors[found.scales["w"]] is HELD["w"].scale


@pytest.mark.parametrize(
    "copies",
    [
        [(0, ((4, 3), (0, 0))), (1, ((4, 3), (0, 3)))],  # a row of two rows
        [(0, ((3, 6), (0, 0)))],  # a row of none
        [],
    ],
)
def test_other_rows_are_refused_by_name(copies):
    with pytest.raises(ConfigError, match=r"FP8 weight w of other numbers[^\n]*\n.*weights=dtype"):
        with_scales(trace(*copies), HELD)
