"""Which weights are cut by columns, from traces of a loader; and the order of ranks, by hand."""

import pytest
import torch

from hybridrl.config.choices import Layout
from hybridrl.config.planner.world import is_nested, ranks_by_shard
from hybridrl.distributed.columns import choose_columns
from hybridrl.distributed.regions import Region, Trace, TracedCopy
from hybridrl.rollout.trace import trace_loader
from tests.support.role_configs import fsdp_config
from tests.support.toy_engine import (
    HEAD,
    HIDDEN,
    INTERMEDIATE,
    NUM_HEADS,
    SOURCES,
    ToyEngine,
    sources,
)


def traces(tp):
    engines = [ToyEngine(rank, tp) for rank in range(tp)]
    return [trace_loader(e, e.load_weights, sources(), torch.int64) for e in engines]


def chosen(dp_shard, tp, layout=Layout.aligned):
    fsdp = fsdp_config(dp_shard, tensor_parallel_size=tp, layout=layout)
    return choose_columns(fsdp, SOURCES, traces(tp), itemsize=2)


@pytest.mark.parametrize(("dp_shard", "tp"), [(2, 2), (4, 2), (4, 4), (8, 2), (8, 8)])
def test_row_parallel_weights_are_cut_by_columns(dp_shard, tp):
    """The toy's o and down are; its KV heads, replicated at tp 4 and 8, are not."""
    assert chosen(dp_shard, tp) == (["o", "down"], [])


def test_columns_that_do_not_divide_are_cut_by_rows_and_counted():
    """o has 16 columns, down 24: 12 divides the second only.

    Of o a rank takes half, 6 x 8. By rows it holds 1/12 of that, by columns it would hold 2/12.
    """
    columns, (note,) = chosen(12, 2)
    assert columns == ["down"]
    assert (NUM_HEADS * HEAD, INTERMEDIATE, HIDDEN) == (16, 24, 6)
    assert "does not divide the columns of 1 weights (o, ...)" in note
    assert "receives 0.0 MiB more" in note


def test_the_cost_of_rows_is_in_bytes_of_what_moves():
    """[1024, 1026] over 4 shards, tp 2: half of it a rank; 1/4 of that held instead of 2/4."""
    copies = [[TracedCopy("w", Region((0, start), (1024, 513)), "w", (0, 0))] for start in (0, 513)]
    engine = [Trace(part, [], {"w": (1024, 513)}) for part in copies]
    fsdp = fsdp_config(4, tensor_parallel_size=2)
    columns, (note,) = choose_columns(fsdp, {"w": (1024, 1026)}, engine, itemsize=2)
    assert columns == []
    assert f"{1024 * 513 / 4 * 2 / 2**20:.1f} MiB more" in note  # 0.3


def test_slices_that_do_not_nest_leave_rows_in_rank_order_and_say_what_that_costs():
    """Engines of 4 ranks on copies of 2: of its rollout weights a rank holds half."""
    columns, (note,) = chosen(2, 4)
    assert columns == []
    assert "rollout.tensor_parallel_size = 4 does not divide fsdp.dp_shard = 2" in note
    assert "at every weight sync" in note


def test_nothing_is_chosen_where_nothing_is_to_be_aligned():
    assert chosen(4, 2, Layout.plain) == ([], [])
    assert chosen(4, 1) == ([], [])


def test_a_weight_that_some_rank_does_not_take_is_cut_by_rows():
    copy = TracedCopy("w", Region((0, 0), (4, 2)), "w", (0, 0))
    engine = [Trace([copy], [], {"w": (4, 2)}), Trace([], [], {})]
    fsdp = fsdp_config(2, tensor_parallel_size=2)
    assert choose_columns(fsdp, {"w": (4, 4)}, engine, itemsize=2) == ([], [])


@pytest.mark.parametrize(
    ("dp_shard", "tp", "order"),
    [
        (4, 1, [0, 1, 2, 3]),
        (4, 4, [0, 1, 2, 3]),
        (4, 2, [0, 2, 1, 3]),
        (8, 2, [0, 2, 4, 6, 1, 3, 5, 7]),
        (8, 4, [0, 4, 1, 5, 2, 6, 3, 7]),
        (2, 4, [0, 1]),
        (3, 2, [0, 1, 2]),
    ],
)
def test_ranks_stand_in_the_order_of_their_slices(dp_shard, tp, order):
    """Rank r is number r mod tp of its engine and needs that slice of every split weight."""
    fsdp = fsdp_config(dp_shard, tensor_parallel_size=tp)
    assert ranks_by_shard(fsdp) == order
    assert is_nested(fsdp) == (tp > 1 and dp_shard % tp == 0)
    if is_nested(fsdp):
        assert [rank % tp for rank in order] == sorted(rank % tp for rank in order)
    plain = fsdp_config(dp_shard, tensor_parallel_size=tp, layout=Layout.plain)
    assert ranks_by_shard(plain) == list(range(dp_shard))
