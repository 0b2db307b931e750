"""A rank's plan for a model of 405 B parameters on 1,024 GPUs, in seconds of CPU time."""

import math
import time

import pytest

from hybridrl.distributed.regions import Region, Trace, TracedCopy
from hybridrl.reshard.layout import SourceLayout
from tests.unit.whole_plan import build_plan

# Llama 3.1 405B (Dubey et al. 2024, table 3), engines of 8.
HIDDEN, MLP, LAYERS, VOCAB = 16384, 53248, 126, 128256
Q_ROWS, KV_ROWS = 128 * 128, 8 * 128
WORLD, TP = 1024, 8
BUCKET_ELEMENTS = (256 << 20) // 2
BFLOAT16 = 2


def layer(number: int) -> list[tuple[str, tuple[int, ...], str, int]]:
    """(checkpoint name, shape, parameter of the engine, dim that the engine cuts; -1: none)."""
    at = f"layers.{number}."
    return [
        (f"{at}q", (Q_ROWS, HIDDEN), f"{at}qkv", 0),
        (f"{at}k", (KV_ROWS, HIDDEN), f"{at}qkv", 0),
        (f"{at}v", (KV_ROWS, HIDDEN), f"{at}qkv", 0),
        (f"{at}o", (HIDDEN, Q_ROWS), f"{at}o", 1),
        (f"{at}gate", (MLP, HIDDEN), f"{at}gate_up", 0),
        (f"{at}up", (MLP, HIDDEN), f"{at}gate_up", 0),
        (f"{at}down", (HIDDEN, MLP), f"{at}down", 1),
        (f"{at}norm_1", (HIDDEN,), f"{at}norm_1", -1),
        (f"{at}norm_2", (HIDDEN,), f"{at}norm_2", -1),
    ]


TENSORS = [
    ("embed", (VOCAB, HIDDEN), "embed", 0),
    *(tensor for number in range(LAYERS) for tensor in layer(number)),
    ("norm", (HIDDEN,), "norm", -1),
    ("head", (VOCAB, HIDDEN), "head", 0),
]


def trace(tp_rank: int) -> Trace:
    """What a loader that fuses q, k, v and gate, up as vLLM's does, copies on one rank."""
    copies, parameters = [], {}
    for name, shape, parameter, dim in TENSORS:
        offset, part = [0] * len(shape), list(shape)
        if dim >= 0:
            part[dim] //= TP
            offset[dim] = tp_rank * part[dim]
        filled = parameters.get(parameter, (0,) * len(shape))
        place = (filled[0], *[0] * (len(shape) - 1))
        copies.append(TracedCopy(name, Region(tuple(offset), tuple(part)), parameter, place))
        parameters[parameter] = (filled[0] + part[0], *part[1:])
    return Trace(copies, [], {}, parameters)


@pytest.mark.parametrize(
    "shards", [pytest.param(WORLD, id="one copy"), pytest.param(64, id="16 copies of 64 shards")]
)
def test_a_plan_for_405b_parameters_takes_seconds_and_says_its_bytes(shards, capsys):
    """Layout aligned: the ranks of one slice are consecutive shards, dim 1 is cut where tp cuts.

    A plan is of one copy's ranks; the one of 1,024 takes most of this test's seconds.
    """
    assert sum(math.prod(shape) for _, shape, _, _ in TENSORS) == 405_853_388_800
    sources = [SourceLayout(name, shape, shards, max(0, dim)) for name, shape, _, dim in TENSORS]
    slices = [trace(tp_rank) for tp_rank in range(TP)]
    traces = [slices[shard // (shards // TP)] for shard in range(shards)]
    start = time.process_time()
    plan = build_plan(sources, traces, rank=3, bucket_elements=BUCKET_ELEMENTS)
    seconds = time.process_time() - start
    received, written = BFLOAT16 * plan.received / 1e9, BFLOAT16 * plan.written / 1e9
    with capsys.disabled():
        print(
            f"\n{WORLD} ranks, {WORLD // shards} x {shards} shards of 405 B: rank 3's plan in "
            f"{seconds:.1f} s; it receives {received:.1f} of the {written:.1f} GB that it writes"
        )
    assert seconds < 10
    # All of a rank's own shard is of use to it.
    own = BFLOAT16 * 405_853_388_800 / shards / 1e9
    assert received == pytest.approx(written - own, rel=1e-3)
    assert max(bucket.send_size + bucket.receive_size for bucket in plan.buckets) <= BUCKET_ELEMENTS
