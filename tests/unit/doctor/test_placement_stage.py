"""Whether ranks find room, over clusters that are written down, and engines whole nodes."""

import pytest

from hybridrl.controller.ray.node_probes import Resources
from hybridrl.doctor.findings import Verdict
from hybridrl.doctor.room import judge_engines, judge_slots
from tests.support.host_cases import assert_finds

pytestmark = pytest.mark.full


def node(gpus: float, free: float) -> Resources:
    return Resources(64.0, gpus, 64.0, free)


def test_the_largest_demand_goes_to_the_largest_node():
    nodes = {"a": node(4, 4), "b": node(8, 8)}
    assert judge_slots(nodes, [8, 4], on_gpu=True).verdict is Verdict.ok
    assert judge_slots(nodes, [8, 8], on_gpu=True).verdict is Verdict.fail


def test_gpus_that_another_run_holds_are_named():
    nodes = {"a": node(8, 8), "b": node(8, 2)}
    found = judge_slots(nodes, [8, 8], on_gpu=True)
    evidence = "b: 2 of 8 GPUs free"
    assert_finds(found, "placement.slots", Verdict.fail, evidence, "ray list actors")


def test_a_missing_node_is_no_room():
    found = judge_slots({"a": node(8, 8)}, [8, 8], on_gpu=True)
    assert found.verdict is Verdict.fail


def test_slots_without_gpus_share_cores():
    """Four ranks on one core are slow, which is no reason not to run; no core at all is."""
    crowded = {"a": Resources(1.0, 0.0, 1.0, 0.0)}
    assert judge_slots(crowded, [4], on_gpu=False).verdict is Verdict.ok
    taken = {"a": Resources(1.0, 0.0, 0.0, 0.0)}
    assert judge_slots(taken, [4], on_gpu=False).verdict is Verdict.fail


@pytest.mark.parametrize(
    ("allow", "verdict"), [(False, Verdict.fail), (True, Verdict.warn)], ids=["refused", "allowed"]
)
def test_an_engine_astride_of_nodes_is_told(allow, verdict):
    found = judge_engines([3, 5], 2, allow_straddle=allow)
    advice = "Set rollout.tensor_parallel_size to a divisor of every node's ranks"
    lie = "engine(s) 1 of 4 lie on several nodes"
    assert_finds(found, "placement.engines", verdict, lie, advice)
    assert judge_engines([4, 2], 2, allow_straddle=False).verdict is Verdict.ok
