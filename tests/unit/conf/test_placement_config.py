"""placement: nodes of unequal size and engines that may straddle, where they can be had."""

import io

import pytest
from rich.console import Console

from hybridrl.config.planner.machine import GIB, Machine, Node
from hybridrl.config.planner.world import slots_on_nodes, world_size
from hybridrl.plan.tables import plan
from tests.support.composing import GPU_NODE, H200, QWEN, examined, made, mistakes, named

SMALL_NODE = Node("small", cores=32, memory_bytes=512 * GIB, gpus=(H200,) * 3)
UNEQUAL = Machine((*GPU_NODE.nodes, SMALL_NODE))
# A batch that any of these worlds divides.
GPU = (
    "hardware=gpu",
    "cluster.nodes=2",
    "data.prompts_per_step=2310",
    "rollout.responses_per_prompt=8",
    "actor.mini_batch_size=18480",
)


def test_all_gpus_of_unequal_nodes_are_used_in_whole_engines():
    config = examined([*GPU, "rollout.tensor_parallel_size=2"], machine=UNEQUAL).config
    assert slots_on_nodes(config) == [8, 2]
    assert world_size(config) == config.fsdp.dp_shard == 10


def test_nodes_alike_need_no_list():
    twins = Machine(GPU_NODE.nodes * 2)
    config = examined(GPU, machine=twins).config
    assert config.placement.slots_on_nodes is None
    assert slots_on_nodes(config) == [8, 8]


def test_what_is_given_beats_what_is_there():
    result = examined([*GPU, "placement.slots_on_nodes=[4,2]"], machine=UNEQUAL)
    assert slots_on_nodes(result.config) == [4, 2]
    assert not [p for p in result.report.problems if "placement" in str(p)]


MISTAKES = """
slots placement.slots_on_nodes placement.slots_on_nodes=[4,2,2] | [4, 2, 2] | cluster.nodes = 2
slots placement.slots_on_nodes placement.slots_on_nodes=[8,4] | the GPUs of the nodes, [8, 3]
engine_ranks rollout.tensor_parallel_size placement.slots_on_nodes=[8,3] \
    rollout.tensor_parallel_size=2 | a divisor of 3 of placement.slots_on_nodes = [8, 3] \
    | placement.allow_straddle=true
range placement.slots_on_nodes placement.slots_on_nodes=[8,0] | each at least 1
no_effect cluster.gpus_per_node placement.slots_on_nodes=[8,2] cluster.gpus_per_node=8
engine_ranks rollout.tensor_parallel_size placement.slots_on_nodes=[7,3] \
    rollout.tensor_parallel_size=2 | a divisor of 7
engine_ranks rollout.tensor_parallel_size placement.slots_on_nodes=[8,3] \
    rollout.tensor_parallel_size=2 placement.allow_straddle=true \
    | a divisor of 11 ranks (placement.slots_on_nodes = [8, 3])
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_lists_that_do_not_fit_are_refused(mistake):
    assert made(mistake, *GPU, machine=UNEQUAL) == [mistake]


def test_engines_may_straddle_where_that_is_asked_for():
    overrides = [*GPU, "placement.slots_on_nodes=[7,3]", "rollout.tensor_parallel_size=2"]
    allowed = named(*overrides, "placement.allow_straddle=true", machine=UNEQUAL)
    assert not [key for _, key in allowed if "tensor_parallel" in key]


def test_the_plan_lists_ranks_of_unequal_nodes():
    result = examined([*GPU, "placement.slots_on_nodes=[3,1]"], machine=UNEQUAL, model=QWEN)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan(result.config, result.shape, UNEQUAL))
    lines = console.export_text().splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:4]] for line in lines if "│" in line]
    first = cells.index(["0", "big", "0"])
    ranks = [*[[str(k), "big", str(k)] for k in range(3)], ["3", "small", "0"]]
    assert cells[first : first + 4] == ranks
