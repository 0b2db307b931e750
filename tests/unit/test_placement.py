"""Placement: ranks are stable, engines stay on their node, straddling is warned of by name."""

import ipaddress
import random
import time

import pytest

from hybridrl.controller.placement import (
    Slot,
    number_cpu_slots,
    rank_order,
    straddling_engines,
    visible_index,
    warn_of_straddling,
)

# Two nodes behind one address, one whose address sorts differently as text and as a number.
NODES = [("ffff", "10.0.0.9"), ("aaaa", "10.0.0.10"), ("cccc", "10.0.0.9"), ("bbbb", "10.0.0.11")]
SLOTS = [Slot(node, ip, gpu) for node, ip in NODES for gpu in range(8)]


@pytest.mark.parametrize("seed", range(51))
def test_no_engine_straddles_however_processes_come_up(seed):
    shuffled = random.Random(seed).sample(SLOTS, len(SLOTS))
    ranks = [shuffled[position] for position in rank_order(shuffled)]
    assert not any(straddling_engines(ranks, engine) for engine in (1, 2, 4, 8))
    assert [(slot.node_id, slot.local_rank) for slot in ranks] == [
        (node, gpu) for node in ("cccc", "ffff", "aaaa", "bbbb") for gpu in range(8)
    ]


def test_cpu_slots_are_numbered_on_each_node():
    slots = [Slot(node, "10.0.0.1", 0) for node in ("a", "b", "a", "b", "b")]
    assert [slot.local_rank for slot in number_cpu_slots(slots)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("gpu", "visible", "expected"), [("3", None, 3), ("3", "", 3), ("5", "2,5,7", 1)]
)
def test_local_rank_is_the_index_among_visible_gpus(gpu, visible, expected):
    assert visible_index(gpu, visible) == expected


def test_where_engines_may_straddle_they_are_warned_of(caplog):
    slots = [Slot(node, "10.0.0.1", gpu) for node in ("aaaa", "bbbb") for gpu in range(3)]
    warn_of_straddling(slots, 2)
    (record,) = caplog.records
    assert "rollout engine 1 straddles nodes" in record.getMessage()
    assert "rank 2 on node aaaa" in record.getMessage()
    assert straddling_engines(slots, 2) == [1]


def test_ranks_of_1024_gpus_are_ordered_in_a_moment_and_no_engine_of_8_straddles():
    slots = [
        Slot(f"{n:032x}", f"10.0.{n // 200}.{n % 200}", g) for n in range(128) for g in range(8)
    ]
    shuffled = random.Random(0).sample(slots, len(slots))
    start = time.perf_counter()
    ranks = [shuffled[position] for position in rank_order(shuffled)]
    assert not straddling_engines(ranks, 8)
    assert time.perf_counter() - start < 1
    assert ranks == sorted(slots, key=lambda s: (ipaddress.ip_address(s.node_ip), s.local_rank))


@pytest.mark.parametrize("seed", range(51))
def test_unequal_nodes_keep_their_engines_too(seed):
    """Nodes with 8, 2, 6 and 4 slots and engines of 2, as placement.slots_on_nodes grants them."""
    counts = dict(zip((node for node, _ in NODES), (8, 2, 6, 4), strict=True))
    slots = [slot for slot in SLOTS if slot.local_rank < counts[slot.node_id]]
    shuffled = random.Random(seed).sample(slots, len(slots))
    assert not straddling_engines([shuffled[k] for k in rank_order(shuffled)], 2)
