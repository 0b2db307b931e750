"""The plan of a reshard, carried out by hand for every mesh, against coordinates.

The source tensors hold their own coordinates; what must arrive is what the loader writes when it
is given them. Shards are cut by torch.chunk. Neither knows of the planner.
"""

import itertools
from functools import cache

import pytest
import torch

from hybridrl.distributed.regions import Region, Trace, TracedCopy, TracedFill
from hybridrl.reshard.plan import build_plans
from hybridrl.reshard.transfers import SourceLayout, intersect
from hybridrl.rollout.trace import trace_loader
from tests.support.toy_engine import NUM_KV_HEADS, SOURCES, ToyEngine, coordinates, sources
from tests.support.whole_plan import build_plan

SIZES = (1, 2, 4, 8)
MESHES = [
    (replicas, shards, tp)
    for replicas, shards, tp in itertools.product(SIZES, repeat=3)
    if (replicas * shards) % tp == 0
]
BUCKETS = (1, 50, 10**6)
# Parts of fused parameters, too: k of qkv, gate of gate_up.
FROZEN = ["embed", "norm", "k", "q_bias", "k_bias", "v_bias", "gate", "lm_head.weight"]


def trace_of(rank, tp):
    engine = ToyEngine(rank, tp)
    return trace_loader(engine, engine.load_weights, sources(), torch.int64)


def layouts(num_shards, row_parallel_dim=0):
    """Row-parallel weights cut along either dim, where that divides; the others along dim 0."""
    return [
        SourceLayout(
            name,
            shape,
            num_shards,
            row_parallel_dim * (name in ("o", "down") and shape[1] % num_shards == 0),
        )
        for name, shape in SOURCES.items()
    ]


def chunk(whole, num_shards, dim=0):
    """The shards as torch.chunk cuts them, with the empty ones that it leaves out."""
    parts = list(whole.chunk(num_shards, dim))
    return parts + [whole.narrow(dim, 0, 0)] * (num_shards - len(parts))


def aligned(members, tp):
    """Ranks in shard order: rank (d, t), the t-th of engine d, holds shard t * engines + d."""
    engines = len(members) // tp
    return [members[d * tp + t] for t in range(tp) for d in range(engines)]


def take(tensor, region):
    return tensor[tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))]


def held_piece(source, region, sender, shards, layout):
    """A region of a whole tensor out of the shard that holds it."""
    held = layout.region(sender)
    offset = tuple(at - first for at, first in zip(region.offset, held.offset, strict=True))
    assert min(offset) >= 0
    piece = take(shards[source][sender], Region(offset, region.shape))
    assert tuple(piece.shape) == region.shape, "the shard ends before the region does"
    return piece


def carry_out(plans, engines, shards, cuts):
    """Do what the plans of one shard group say; return how often each element was written."""
    parameters = [engine.tensors() for engine in engines]
    written = [{n: torch.zeros_like(t) for n, t in own.items()} for own in parameters]
    by_name = {layout.name: layout for layout in cuts}

    def write(rank, name, region, values):
        target = take(parameters[rank][name], region)
        assert target.shape == region.shape == tuple(values.shape)
        target.copy_(values)
        take(written[rank][name], region).add_(1)

    for rank, plan in enumerate(plans):
        for copy in plan.local:
            values = held_piece(copy.source, copy.region, rank, shards, by_name[copy.source])
            write(rank, copy.parameter, copy.destination, values)
        for fill in plan.fills:
            values = torch.full(fill.region.shape, int(fill.value))
            write(rank, fill.parameter, fill.region, values)
    for buckets in zip(*(plan.buckets for plan in plans), strict=True):
        memory = [torch.full((bucket.size,), -9) for bucket in buckets]
        for rank, bucket in enumerate(buckets):
            for start, transfer in bucket.packed:
                assert transfer.sender == rank
                copy = transfer.copy
                values = held_piece(copy.source, copy.region, rank, shards, by_name[copy.source])
                memory[rank][start : start + values.numel()] = values.flatten()
        exchange(buckets, memory)
        for rank, bucket in enumerate(buckets):
            for start, transfer in bucket.unpacked:
                assert rank in transfer.receivers
                copy = transfer.copy
                values = memory[rank][start : start + copy.region.numel].view(copy.region.shape)
                write(rank, copy.parameter, copy.destination, values)
    return written


def exchange(buckets, memory):
    """One bucket's all-gather, sends and receives; a receive lies apart from what is sent."""
    (slot,) = {bucket.slot for bucket in buckets}
    own = [part[rank * slot : (rank + 1) * slot].clone() for rank, part in enumerate(memory)]
    for part in memory:
        part[: slot * len(memory)] = torch.cat(own)
    for sender, receiver in itertools.permutations(range(len(buckets)), 2):
        sent = [part for to, part in buckets[sender].sends if to == receiver]
        places = [part for by, part in buckets[receiver].receives if by == sender]
        for part, place in zip(sent, places, strict=True):
            assert place.start >= max(
                [slot * len(memory)] + [s.stop for _, s in buckets[receiver].sends]
            )
            memory[receiver][place] = memory[sender][part]


@pytest.mark.parametrize("row_parallel_dim", [0, 1])
@pytest.mark.parametrize(("replicas", "num_shards", "tp"), MESHES)
def test_every_element_is_written_once_and_from_its_source(
    replicas, num_shards, tp, row_parallel_dim
):
    """Ranks of a group stand in shard order; with dim 1 as the aligned layout orders them."""
    for first in range(0, replicas * num_shards, num_shards):
        members = list(range(first, first + num_shards))
        if row_parallel_dim and num_shards % tp == 0:
            members = aligned(members, tp)
        check_group(tuple(rank % tp for rank in members), tp, row_parallel_dim)


@cache
def check_group(tp_ranks, tp, row_parallel_dim):
    """Replicas in which the same tensor-parallel ranks hold the same shards are checked once."""
    whole, num_shards = coordinates(), len(tp_ranks)
    cuts = layouts(num_shards, row_parallel_dim)
    shards = {c.name: chunk(whole[c.name], num_shards, c.dim) for c in cuts}
    traces = [trace_of(rank, tp) for rank in tp_ranks]
    for bucket_elements in BUCKETS:
        engines = [ToyEngine(rank, tp) for rank in tp_ranks]
        plans = [build_plan(cuts, traces, rank, bucket_elements) for rank in range(num_shards)]
        written = carry_out(plans, engines, shards, cuts)
        for place, (tp_rank, engine) in enumerate(zip(tp_ranks, engines, strict=True)):
            oracle = ToyEngine(tp_rank, tp)
            oracle.load_weights(whole.items())
            for name, tensor in engine.tensors().items():
                assert (written[place][name] == 1).all(), name
                assert torch.equal(tensor, oracle.tensors()[name]), name


@pytest.mark.parametrize("row_parallel_dim", [0, 1])
@pytest.mark.parametrize(
    ("num_shards", "tp", "engines"), itertools.product((1, 3, 8), (1, 4), (1, 3))
)
def test_ranks_without_engines_send_to_ranks_without_weights(
    num_shards, tp, engines, row_parallel_dim
):
    """Every element is written once, and nothing is gathered or stays on its rank."""
    whole, tp_ranks = coordinates(), [rank % tp for rank in range(tp * engines)]
    size = num_shards + len(tp_ranks)
    cuts = layouts(num_shards, row_parallel_dim)
    shards = {c.name: chunk(whole[c.name], num_shards, c.dim) for c in cuts}
    for name, parts in shards.items():
        parts += [parts[0].new_empty(0)] * (size - num_shards)
        assert len(parts) == size, name
    names = dict.fromkeys(trace_of(0, tp).parameters, (0,))
    traces = [Trace([], [], names)] * num_shards + [trace_of(rank, tp) for rank in tp_ranks]
    engines_of = [ToyEngine(rank, tp) for rank in [0] * num_shards + tp_ranks]
    plans = [build_plan(cuts, traces, rank, 200) for rank in range(size)]
    written = carry_out(plans, engines_of, shards, cuts)
    for rank, plan in enumerate(plans):
        assert plan.local == [] and not any(bucket.slot for bucket in plan.buckets)
        assert (plan.received == plan.written) and (plan.written == 0) is (rank < num_shards)
    for rank, tp_rank in enumerate(tp_ranks, num_shards):
        oracle = ToyEngine(tp_rank, tp)
        oracle.load_weights(whole.items())
        for name, tensor in engines_of[rank].tensors().items():
            assert (written[rank][name] == 1).all(), name
            assert torch.equal(tensor, oracle.tensors()[name]), name


@pytest.mark.parametrize(("num_shards", "tp"), [(1, 1), (2, 2), (4, 2), (4, 4), (4, 1)])
def test_the_two_plans_together_write_what_one_would(num_shards, tp):
    """That of frozen weights writes those alone, and constants; that of the rest all others."""
    whole, cuts = coordinates(), layouts(num_shards)
    shards = {c.name: chunk(whole[c.name], num_shards, c.dim) for c in cuts}
    traces = [trace_of(rank % tp, tp) for rank in range(num_shards)]
    engines = [ToyEngine(rank % tp, tp) for rank in range(num_shards)]
    both = [build_plans(cuts, FROZEN, traces, rank, 50) for rank in range(num_shards)]
    assert all({source.name for source in first.sources} == set(FROZEN) for first, _ in both)
    first = carry_out([plans[0] for plans in both], engines, shards, cuts)
    second = carry_out([plans[1] for plans in both], engines, shards, cuts)
    for rank, engine in enumerate(engines):
        oracle = ToyEngine(rank % tp, tp)
        oracle.load_weights(whole.items())
        for name, tensor in oracle.tensors().items():
            assert (first[rank][name] + second[rank][name] == 1).all(), name
            assert torch.equal(engine.tensors()[name], tensor), name
        assert second[rank]["embed"].sum() == second[rank]["norm"].sum() == 0
        assert 0 < first[rank]["gate_up"].sum() == second[rank]["gate_up"].sum()
        written = sum(int(counts.sum()) for counts in second[rank].values())
        assert both[rank][1].written == written
    alone = [build_plan(cuts, traces, rank, 50) for rank in range(num_shards)]
    assert [p.received for p in alone] == [a.received + b.received for a, b in both]


@pytest.mark.parametrize(("num_shards", "tp"), [(1, 1), (2, 2), (4, 2), (4, 1)])
def test_targets_of_float32_have_plans_of_their_own(num_shards, tp):
    """A frozen norm and a trained o, of which every element is written once; the rest as before."""
    whole, cuts = coordinates(), layouts(num_shards)
    shards = {c.name: chunk(whole[c.name], num_shards, c.dim) for c in cuts}
    traces = [trace_of(rank % tp, tp) for rank in range(num_shards)]
    wide = [trace._replace(dtypes=dict.fromkeys(("norm", "o"), torch.float32)) for trace in traces]
    engines = [ToyEngine(rank % tp, tp) for rank in range(num_shards)]
    by_rank = [build_plans(cuts, ["norm"], wide, rank, 50) for rank in range(num_shards)]
    kinds = [(True, torch.float32), (False, None), (False, torch.float32)]
    assert all([(p.frozen, p.dtype) for p in plans] == kinds for plans in by_rank)
    parts = [carry_out(plans, engines, shards, cuts) for plans in zip(*by_rank, strict=True)]
    for rank, engine in enumerate(engines):
        oracle = ToyEngine(rank % tp, tp)
        oracle.load_weights(whole.items())
        for name, tensor in oracle.tensors().items():
            assert (sum(part[rank][name] for part in parts) == 1).all(), name
            assert torch.equal(engine.tensors()[name], tensor), name
        assert parts[0][rank]["norm"].all() and parts[2][rank]["o"].all()
        alone = build_plan(cuts, traces, rank, 50)
        assert alone.received == sum(plan.received for plan in by_rank[rank])


def test_the_oracle_splits_as_vllm_documents():
    """Rank 5 of 8 with 2 KV heads: query head 5, KV head 1, its rows of the padded vocabulary."""
    whole, engine = coordinates(), ToyEngine(5, 8)
    engine.load_weights(whole.items())
    assert NUM_KV_HEADS == 2
    expected = torch.cat([whole["q"][10:12], whole["k"][2:4], whole["v"][2:4]])
    assert torch.equal(engine.qkv, expected)
    assert torch.equal(engine.gate_up, torch.cat([whole["gate"][15:18], whole["up"][15:18]]))
    assert torch.equal(engine.down, whole["down"][:, 15:18])
    assert (engine.embed == -1).all()  # rows 40 to 47 of a vocabulary of 21


@pytest.mark.parametrize("bucket_elements", [96, 200, 1000])
def test_no_rank_stages_more_than_a_bucket(bucket_elements):
    """A row of 24 elements, padded to 32, from 3 other ranks, and one's own: 128."""
    traces = [trace_of(rank % 2, 2) for rank in range(4)]
    plans = [build_plan(layouts(4), traces, rank, bucket_elements) for rank in range(4)]
    limit = max(bucket_elements, 4 * 32)
    sizes = [bucket.size for plan in plans for bucket in plan.buckets]
    assert max(sizes) <= limit
    assert len(plans[0].buckets) > 1


def test_nothing_moves_between_ranks_if_each_holds_everything():
    plan = build_plan(layouts(1), [trace_of(0, 2)], 0, 10)
    assert plan.buckets == []
    assert plan.received == 0


@pytest.mark.parametrize("tp", [2, 4])
def test_aligned_shards_stay_at_home_except_what_is_replicated(tp):
    """tp = dp_shard, vocabulary left out: norms, and KV heads where 4 ranks share 2 of them.

    A rank receives the norm's 6 elements but its own shard's, and the buffer's 3; at tp 4 also the
    half of its KV head (2 rows of 6, and a bias of 2, for k and v) that its neighbour holds.
    """
    cuts = [c for c in layouts(tp, 1) if c.name not in ("embed", "lm_head.weight")]
    (scales,) = (c for c in cuts if c.name == "scales")
    traces = []
    for rank in range(tp):
        trace = trace_of(rank, tp)
        copies = [c for c in trace.copies if c.parameter != "embed"]
        shapes = {n: s for n, s in trace.parameters.items() if n != "embed"}
        traces.append(Trace(copies, [], shapes))
    for rank in range(tp):
        norm = 6 - layouts(tp)[1].region(rank).shape[0]
        heads = 2 * (6 + 1) if tp == 4 else 0
        buffer = 3 - scales.region(rank).shape[0]
        assert build_plan(cuts, traces, rank, 10**6).received == norm + heads + buffer


WHOLE = TracedCopy("down", Region((0, 0), (6, 24)), "down", (0, 0))
FILLED = TracedFill("down", WHOLE.region, 0.0)


@pytest.mark.parametrize("takers", [3, 4])
def test_what_several_ranks_take_is_packed_once(takers):
    """Each stages its shard of 6 x 24 / 4, padded to 48, once, and three others.

    It is sent to each taker; if all 4 ranks take it, it is gathered in one operation.
    """
    parameters = {"down": (6, 24)}
    traces = [Trace([WHOLE], [], parameters)] * takers
    traces += [Trace([], [FILLED], parameters)] * (4 - takers)
    plan = build_plan([SourceLayout("down", (6, 24), 4, 1)], traces, 1, 10**6)
    (bucket,) = plan.buckets
    assert bucket.size == 48 + 3 * 48
    assert plan.received == 3 * 36
    if takers == 4:
        assert (bucket.slot, bucket.sends, bucket.receives) == (48, [], [])
        assert bucket.operations == 1
    else:
        assert bucket.sends == [(0, slice(0, 48)), (2, slice(0, 48))]
        assert [sender for sender, _ in bucket.receives] == [0, 2, 3]
        assert bucket.operations == 5


def test_what_few_ranks_hold_is_sent():
    """One of 4 ranks holds a row that all take: slots of an all-gather would be empty but one."""
    row = TracedCopy("gate", Region((0, 0), (1, 24)), "gate", (0, 0))
    trace = Trace([row], [], {"gate": (1, 24)})
    source = SourceLayout("gate", (1, 24), 4)
    plans = [build_plan([source], [trace] * 4, rank, 10**6) for rank in range(4)]
    assert [plan.buckets[0].operations for plan in plans] == [3, 1, 1, 1]
    assert {plan.buckets[0].size for plan in plans} == {32}


def test_shards_are_cut_as_torch_chunk_does():
    for rows, num_shards in itertools.product((1, 3, 6, 21, 64), SIZES):
        layout = SourceLayout("x", (rows, 2), num_shards)
        expected = [len(part) for part in chunk(torch.zeros(rows, 2), num_shards)]
        assert [layout.region(shard).shape[0] for shard in range(num_shards)] == expected
        starts = [layout.region(shard).offset[0] for shard in range(num_shards)]
        assert starts == [min(sum(expected[:s]), rows) for s in range(num_shards)]


def test_dim_1_is_cut_into_equal_columns():
    layout = SourceLayout("x", (3, 8), 4, dim=1)
    assert [layout.region(shard) for shard in range(4)] == [
        Region((0, start), (3, 2)) for start in (0, 2, 4, 6)
    ]


def test_intersections():
    a = Region((2, 0), (4, 3))
    assert intersect(a, Region((0, 1), (4, 9))) == Region((2, 1), (2, 2))
    assert intersect(a, Region((6, 0), (1, 3))) is None


def simple_trace(copies, fills=()):
    return Trace(copies, list(fills), {"w": (4, 2), "b": (2,)})


WEIGHT = TracedCopy("w", Region((0, 0), (3, 2)), "w", (0, 0))
BIAS = TracedCopy("b", Region((0,), (2,)), "b", (0,))
SIMPLE = [SourceLayout("w", (4, 2), 1), SourceLayout("b", (2,), 1)]


def test_a_tensor_that_no_engine_reads_is_named():
    whole = WEIGHT._replace(region=Region((0, 0), (4, 2)))
    more = [SourceLayout(name, (2,), 1) for name in ("o_proj.bias", "lm_head.weight")]
    with pytest.raises(ValueError, match=r"no place for o_proj\.bias$"):
        build_plan([*SIMPLE, *more], [simple_trace([whole, BIAS])], 0, 10)


def test_an_uncovered_parameter_is_named():
    with pytest.raises(ValueError, match=r"w: 6 of 8 elements$"):
        build_plan(SIMPLE, [simple_trace([WEIGHT, BIAS])], 0, 10)


def test_a_parameter_without_any_source_is_named():
    with pytest.raises(ValueError, match="b: 0 of 2 elements"):
        build_plan(SIMPLE, [simple_trace([WEIGHT])], 0, 10)


def test_a_parameter_written_twice_is_named():
    """Six elements copied, two filled, which would be all eight, but the fill lies on the copy."""
    twice = TracedFill("w", Region((0, 0), (1, 2)), 0.0)
    with pytest.raises(ValueError, match="w: 8 of 8 elements, some twice"):
        build_plan(SIMPLE, [simple_trace([WEIGHT, BIAS], [twice])], 0, 10)
