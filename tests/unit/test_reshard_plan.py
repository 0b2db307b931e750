"""The plan of a reshard, carried out by hand for every mesh, against coordinates.

The source tensors hold their own coordinates; what must arrive is what the loader writes when it
is given them. Shards are cut by torch.chunk. Neither knows of the planner.
"""

import itertools

import pytest
import torch

from hybridrl.distributed.regions import Region, Trace, TracedCopy, TracedFill
from hybridrl.distributed.shards import NamedShard
from hybridrl.reshard.layout import SourceLayout, intersect, layouts_of, shard_group
from hybridrl.reshard.plan import build_plan, digest
from hybridrl.rollout.trace import trace_loader
from tests.toy_engine import NUM_KV_HEADS, SOURCES, ToyEngine, coordinates

SIZES = (1, 2, 4, 8)
MESHES = [
    (replicas, shards, tp)
    for replicas, shards, tp in itertools.product(SIZES, repeat=3)
    if (replicas * shards) % tp == 0
]
BUCKETS = (1, 50, 10**6)


def trace_of(rank, tp):
    engine = ToyEngine(rank, tp)
    return trace_loader(engine, engine.load_weights, list(SOURCES.items()), torch.int64)


def layouts(num_shards):
    return [SourceLayout(name, shape, num_shards) for name, shape in SOURCES.items()]


def chunk(whole, num_shards):
    """Rows of each shard as torch.chunk cuts them, with the empty ones that it leaves out."""
    parts = list(whole.chunk(num_shards))
    return parts + [whole[:0]] * (num_shards - len(parts))


def take(tensor, region):
    return tensor[tuple(slice(o, o + n) for o, n in zip(region.offset, region.shape, strict=True))]


def local_piece(transfer, shards):
    """The transfer's elements out of its sender's shard."""
    first = sum(len(shard) for shard in shards[transfer.source][: transfer.sender])
    offset = (transfer.region.offset[0] - first, *transfer.region.offset[1:])
    assert offset[0] >= 0
    return take(shards[transfer.source][transfer.sender], Region(offset, transfer.region.shape))


def carry_out(plans, engines, shards):
    """Do what the plans of one shard group say; return how often each element was written."""
    written = [{n: torch.zeros_like(p) for n, p in e.named_parameters()} for e in engines]

    def write(rank, name, region, values):
        target = take(dict(engines[rank].named_parameters())[name].data, region)
        assert target.shape == region.shape == tuple(values.shape)
        target.copy_(values)
        take(written[rank][name], region).add_(1)

    for buckets in zip(*(plan.buckets for plan in plans), strict=True):
        assert len({bucket.moves_data for bucket in buckets}) == 1
        for sender, receiver in itertools.product(range(len(plans)), repeat=2):
            sent = buckets[sender].sends[receiver]
            assert sent == buckets[receiver].receives[sender]
            local = buckets[sender].local if sender == receiver else []
            for transfer in (*sent, *local):
                assert (transfer.sender, transfer.receiver) == (sender, receiver)
                region = Region(transfer.offset, transfer.region.shape)
                write(receiver, transfer.parameter, region, local_piece(transfer, shards))
    for rank, plan in enumerate(plans):
        for fill in plan.fills:
            values = torch.full(fill.region.shape, int(fill.value))
            write(rank, fill.parameter, fill.region, values)
    return written


@pytest.mark.parametrize(("replicas", "num_shards", "tp"), MESHES)
def test_every_element_is_written_once_and_from_its_source(replicas, num_shards, tp):
    whole = coordinates()
    shards = {name: chunk(tensor, num_shards) for name, tensor in whole.items()}
    traces = [trace_of(rank, tp) for rank in range(tp)]
    for first in range(0, replicas * num_shards, num_shards):
        members = shard_group(first, num_shards)
        assert members == list(range(first, first + num_shards))
        for bucket_elements in BUCKETS:
            engines = [ToyEngine(rank % tp, tp) for rank in members]
            group_traces = [traces[rank % tp] for rank in members]
            plans = [
                build_plan(layouts(num_shards), group_traces, rank, bucket_elements)
                for rank in range(num_shards)
            ]
            written = carry_out(plans, engines, shards)
            for rank, engine in zip(members, engines, strict=True):
                oracle = ToyEngine(rank % tp, tp)
                oracle.load_weights(whole.items())
                for name, parameter in engine.named_parameters():
                    assert (written[rank - first][name] == 1).all(), name
                    assert torch.equal(parameter, dict(oracle.named_parameters())[name]), name


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


@pytest.mark.parametrize("bucket_elements", [48, 96, 200])
def test_no_rank_moves_more_than_a_bucket(bucket_elements):
    """The longest row has 24 elements, so 4 ranks' windows of a row fit into 96."""
    traces = [trace_of(rank % 2, 2) for rank in range(4)]
    plans = [build_plan(layouts(4), traces, rank, bucket_elements) for rank in range(4)]
    limit = max(bucket_elements, 4 * 24)
    sizes = [sum(s) for p in plans for b in p.buckets for s in (b.send_sizes, b.receive_sizes)]
    assert max(sizes) <= limit
    assert len(plans[0].buckets) > 1


def test_nothing_moves_between_ranks_if_each_holds_everything():
    plan = build_plan(layouts(1), [trace_of(0, 2)], 0, 10)
    assert not any(bucket.moves_data for bucket in plan.buckets)


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


def test_uneven_columns_are_refused():
    shard = NamedShard("x", (3, 6), lambda: torch.zeros(3, 1), dim=1)
    with pytest.raises(ValueError, match=r"dim 1 of \['x'\] does not divide into 4"):
        layouts_of([shard], 4)
    assert layouts_of([shard], 3) == [SourceLayout("x", (3, 6), 3, 1)]


def test_intersections():
    a = Region((2, 0), (4, 3))
    assert intersect(a, Region((0, 1), (4, 9))) == Region((2, 1), (2, 2))
    assert intersect(a, Region((6, 0), (1, 3))) is None


def simple_trace(copies, fills=()):
    return Trace(copies, list(fills), {}, {"w": (4, 2), "b": (2,)})


WEIGHT = TracedCopy("w", Region((0, 0), (3, 2)), "w", (0, 0))
BIAS = TracedCopy("b", Region((0,), (2,)), "b", (0,))
SIMPLE = [SourceLayout("w", (4, 2), 1), SourceLayout("b", (2,), 1)]


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


def test_the_digest_sees_every_input():
    traces = [simple_trace([WEIGHT, BIAS])]
    original = digest(SIMPLE, traces, 10)
    assert original == digest(list(SIMPLE), [simple_trace([WEIGHT, BIAS])], 10)
    assert original != digest(SIMPLE[::-1], traces, 10)
    assert original != digest(SIMPLE, [simple_trace([BIAS, WEIGHT])], 10)
    assert original != digest(SIMPLE, traces, 11)
