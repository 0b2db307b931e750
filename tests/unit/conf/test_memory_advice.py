"""A run that does not fit is told what makes it fit, and that is true."""

import re

import pytest

from hybridrl.config.planner.machine import GIB, GPU, Machine, Node
from hybridrl.config.planner.memory import rank_phases
from hybridrl.models.known_shapes import QWEN2_5
from tests.support.composing import FASTEST_SET, GPU_NODE, examined, named, only
from tests.support.model_shapes import QWEN, QWEN_7B

H100 = GPU("NVIDIA H100", 80 * GIB)
SHAPES = {
    "7B": QWEN_7B,
    "32B": QWEN2_5["32B"],
    "70B": QWEN
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
SHAPES["20B"] = SHAPES["32B"] | {"num_hidden_layers": 38}


def nodes(number, gib=2048):
    return Machine(tuple(Node(f"n{k}", 64, gib * GIB, gpus=(H100,) * 8) for k in range(number)))


def refused(size, *overrides, machine):
    """The problems of memory, and the phases, of a run with a model of this size."""
    found = examined(
        ["hardware=gpu", *FASTEST_SET, *overrides], machine=machine, model=SHAPES[size]
    )
    phases = rank_phases(found.config, found.shape, 80 * GIB)
    told = [text for text in map(str, found.report.problems) if "GiB" in text]
    return told, {phase.name: phase.total for phase in phases}


def advised(problem):
    """The settings that a problem ends with, and the peak that they promise in GiB."""
    settings, peak = re.search(r"[sS]et ([^:\n]+): ([0-9.]+) GiB at most\.$", problem).groups()
    return settings.split(), float(peak)


@pytest.mark.parametrize(
    ("size", "algorithm", "num_nodes"),
    [("7B", "ppo", 1), ("32B", "ppo", 1), ("70B", "grpo", 4)],
)
def test_what_is_advised_fits_and_is_not_too_much(size, algorithm, num_nodes):
    given = f"algorithm={algorithm}"
    (problem,), _ = refused(size, given, machine=nodes(1))
    assert problem.startswith("model.path = ") and "the GPU has 80.0 GiB" in problem
    settings, peak = advised(problem)
    assert (f"cluster.nodes={num_nodes}" in settings) == (num_nodes > 1)
    told, after = refused(size, given, *settings, machine=nodes(num_nodes))
    assert told == []
    assert max(after.values()) / GIB == pytest.approx(peak, abs=0.06) and peak <= 80
    assert refused(size, given, *settings[:-1], machine=nodes(num_nodes))[0]


def test_a_32b_is_told_of_each_of_the_three_with_the_gib_that_it_saves():
    (problem,), before = refused("32B", "algorithm=grpo", machine=nodes(1))
    listed = dict(re.findall(r"(fsdp\.\S+=\w+) ([0-9.]+) GiB", problem))
    assert list(listed) == [
        "fsdp.accumulation=sharded",
        "fsdp.activation_checkpointing=true",
        "fsdp.offload=idle_all",
    ]
    for setting, saved in listed.items():
        _, alone = refused("32B", "algorithm=grpo", setting, machine=nodes(1))
        assert (before["update actor"] - alone["update actor"]) / GIB == pytest.approx(
            float(saved), abs=0.06
        )


def test_unequal_nodes_are_advised_to_take_equal_ones():
    given = ("algorithm=grpo", "cluster.nodes=2", "placement.slots_on_nodes=[8,8]")
    (problem,), _ = refused("70B", *given, machine=nodes(2))
    settings, _ = advised(problem)
    assert {"cluster.nodes=4", "placement.slots_on_nodes=null"} <= set(settings)
    assert refused("70B", *given, *settings, machine=nodes(4))[0] == []


def test_offload_is_not_advised_where_the_node_has_no_room_for_it():
    """Moments of 20 B parameters, twice, are 320 GB; the processes alone take 33 GiB."""
    given = ("algorithm=ppo", "checkpoint.every_steps=0")
    roomy, tight = (refused("20B", *given, machine=nodes(1, gib))[0] for gib in (2048, 64))
    assert any("offload" in setting for setting in advised(*roomy)[0])
    assert not any("offload" in setting for setting in advised(*tight)[0])


def test_a_cache_larger_than_the_gpu_is_named_and_made_smaller():
    given = ("algorithm=grpo", "rollout.kv_cache_mb=200000")
    (problem,), _ = refused("7B", *given, machine=nodes(1))
    assert problem.startswith("rollout.kv_cache_mb = 200000: ")
    settings, _ = advised(problem)
    assert refused("7B", *given, *settings, machine=nodes(1))[0] == []
    small = ["algorithm=grpo", "rollout.gpu_memory_utilization=0.05"]
    found = named("hardware=gpu", *FASTEST_SET, *small, machine=GPU_NODE, model=QWEN_7B)
    assert found == [("cache_memory", "rollout.gpu_memory_utilization")]


@pytest.mark.parametrize(
    ("given", "gib", "id_"),
    [
        ("rollout.tensor_parallel_size=8", 2048, "slices"),
        ("rollout.tensor_parallel_size=2", 32, "host_memory"),
    ],
)
def test_what_no_setting_helps_is_the_only_problem(given, gib, id_):
    """Without choosing, this run does not fit into a GPU either."""
    overrides = ["hardware=gpu", "algorithm=grpo", given]
    assert only(*overrides, machine=nodes(1, gib), model=SHAPES["7B"]).id == id_
