"""Plans for models of 70 B and 405 B parameters on many GPUs: a rank's seconds and operations."""

import math
import time
from typing import NamedTuple

import pytest

from hybridrl.distributed.regions import Region, Trace, TracedCopy
from hybridrl.reshard.transfers import SourceLayout
from tests.support.whole_plan import build_plan

pytestmark = pytest.mark.full

HEAD, KV_ROWS, VOCAB = 128, 8 * 128, 128256
BUCKET_ELEMENTS = (256 << 20) // 2
BFLOAT16 = 2


class Model(NamedTuple):
    """Sizes of a Llama 3.1 (Dubey et al. 2024, table 3)."""

    hidden: int
    mlp: int
    layers: int

    def layer(self, number: int) -> list[tuple[str, tuple[int, ...], str, int]]:
        """(checkpoint name, shape, parameter of the engine, dim that the engine cuts; -1: none)."""
        at, hidden = f"layers.{number}.", self.hidden
        return [
            (f"{at}q", (hidden, hidden), f"{at}qkv", 0),
            (f"{at}k", (KV_ROWS, hidden), f"{at}qkv", 0),
            (f"{at}v", (KV_ROWS, hidden), f"{at}qkv", 0),
            (f"{at}o", (hidden, hidden), f"{at}o", 1),
            (f"{at}gate", (self.mlp, hidden), f"{at}gate_up", 0),
            (f"{at}up", (self.mlp, hidden), f"{at}gate_up", 0),
            (f"{at}down", (hidden, self.mlp), f"{at}down", 1),
            (f"{at}norm_1", (hidden,), f"{at}norm_1", -1),
            (f"{at}norm_2", (hidden,), f"{at}norm_2", -1),
        ]

    def tensors(self) -> list[tuple[str, tuple[int, ...], str, int]]:
        """All of them."""
        return [
            ("embed", (VOCAB, self.hidden), "embed", 0),
            *(tensor for number in range(self.layers) for tensor in self.layer(number)),
            ("norm", (self.hidden,), "norm", -1),
            ("head", (VOCAB, self.hidden), "head", 0),
        ]

    def trace(self, rank: int, tp: int) -> Trace:
        """What a loader that fuses q, k, v and gate, up as vLLM's does, copies on one rank.

        KV heads are replicated where tp exceeds their number.
        """
        copies, parameters = [], {}
        for name, shape, parameter, dim in self.tensors():
            offset, part = [0] * len(shape), list(shape)
            if dim >= 0:
                slices = min(tp, KV_ROWS // HEAD) if name[-2:] in (".k", ".v") else tp
                part[dim] //= slices
                offset[dim] = rank // (tp // slices) * part[dim]
            filled = parameters.get(parameter, (0,) * len(shape))
            place = (filled[0], *[0] * (len(shape) - 1))
            copies.append(TracedCopy(name, Region(tuple(offset), tuple(part)), parameter, place))
            parameters[parameter] = (filled[0] + part[0], *part[1:])
        return Trace(copies, [], parameters)

    def inputs(self, shards: int, tp: int) -> tuple[list[SourceLayout], list[Trace]]:
        """Sources and traces, layout aligned: the ranks of one slice are consecutive shards.

        Dim 1 is cut where tp cuts it.
        """
        cuts = [
            SourceLayout(name, shape, shards, max(0, d)) for name, shape, _, d in self.tensors()
        ]
        slices = [self.trace(rank, tp) for rank in range(tp)]
        return cuts, [slices[shard // (shards // tp)] for shard in range(shards)]


B70 = Model(hidden=8192, mlp=28672, layers=80)
B405 = Model(hidden=16384, mlp=53248, layers=126)
WORLD = 1024


@pytest.mark.parametrize(
    "shards", [pytest.param(WORLD, id="one copy"), pytest.param(64, id="16 copies of 64 shards")]
)
def test_a_plan_for_405b_parameters_takes_seconds_and_says_its_bytes(shards, capsys):
    """A plan is of one copy's ranks; the one of 1,024 takes most of this test's seconds."""
    assert sum(math.prod(shape) for _, shape, _, _ in B405.tensors()) == 405_853_388_800
    sources, traces = B405.inputs(shards, tp=8)
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
    assert max(bucket.size for bucket in plan.buckets) <= BUCKET_ELEMENTS


@pytest.mark.parametrize(
    ("shards", "tp", "rank", "at_most"),
    [
        (128, 8, 3, 2500),  # 15 others hold parts of a rank's slice
        (128, 8, 127, 2500),
        (128, 16, 3, 600),  # 7 others, and 8 more of its KV heads
        (16, 1, 3, 600),  # everything is gathered: one operation a bucket
    ],
)
def test_operations_are_bounded_by_buckets_and_the_ranks_of_a_slice(shards, tp, rank, at_most):
    """Of 70 B parameters, counted as sends, receives and all-gathers of one rank in one sync.

    A slice's other ranks take a send and a receive per bucket. What everybody takes whole (norms,
    and with tp 1 all weights) is gathered, and what more ranks than a slice's take comes together.
    """
    sources, traces = B70.inputs(shards, tp)
    plan = build_plan(sources, traces, rank, BUCKET_ELEMENTS)
    assert sum(bucket.operations for bucket in plan.buckets) <= at_most
    assert max(bucket.size for bucket in plan.buckets) <= BUCKET_ELEMENTS
    staged = sum(bucket.size for bucket in plan.buckets)
    assert staged < 1.002 * sum(  # padding of transfers and slots
        transfer.copy.region.numel
        for bucket in plan.buckets
        for _, transfer in bucket.packed + bucket.unpacked
    )
