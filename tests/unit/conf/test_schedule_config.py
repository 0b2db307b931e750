"""Responses over several steps: what they need and exclude."""

import pytest

from hybridrl.config.planner.memory import rank_phases
from hybridrl.config.planner.world import num_engines, sampling_slots_on_nodes, training_ranks
from tests.support.composing import examined, problems

GRPO = ("+recipe=gsm8k_grpo", "hardware=cpu")
PARTIAL = "rollout.schedule=partial"
SPLIT = ["rollout.schedule=split", "placement.rollout_gpus=1", "cluster.gpus_per_node=2"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.max_versions=2"], ["rollout.max_versions", "no effect", "rollout.schedule"]),
        (
            [PARTIAL, "algorithm.rollout_correction.method=none"],
            ["rollout_correction.method = none", "earlier weights", "method=truncate"],
        ),
        (
            [PARTIAL, "rollout.max_in_flight=200", "rollout.max_versions=2"],
            ["rollout.max_in_flight = 200", "64", "192"],
        ),
        ([PARTIAL, "rollout.max_in_flight=63"], ["rollout.max_in_flight = 63", "64"]),
        (["rollout.keep_kv=true"], ["rollout.keep_kv", "no effect", "rollout.schedule"]),
        (
            [PARTIAL, "rollout.keep_kv=true", "rollout.max_versions=0"],
            ["rollout.keep_kv", "no effect", "rollout.max_versions = 0"],
        ),
        (
            [PARTIAL, "rollout.keep_kv=true", "environment=calculator_agent"],
            ["rollout.keep_kv = true", "environment=agent", "rollout.keep_kv=false"],
        ),
        (
            [*SPLIT, "rollout.keep_kv=true", "algorithm=remax"],
            ["rollout.keep_kv = true", "greedy", "algorithm.advantage = remax"],
        ),
        (SPLIT[:1], ["rollout.schedule = split", "placement.rollout_gpus = null"]),
        (SPLIT[1:], ["placement.rollout_gpus = 1", "rollout.schedule = sync", "idle"]),
        (
            [PARTIAL, "rollout.max_versions=3", *SPLIT[1:]],
            ["placement.rollout_gpus = 1", "rollout.schedule = partial"],
        ),
        (
            [*SPLIT, "algorithm.rollout_correction.method=none"],
            ["rollout_correction.method = none", "earlier weights"],
        ),
        # What is sampled beside an update is trained after it, one step later than with partial.
        (
            [*SPLIT, "rollout.max_in_flight=129", "rollout.max_versions=2"],
            ["rollout.max_in_flight = 129", "64", "128"],
        ),
        (
            [*SPLIT, "rollout.max_in_flight=65", "rollout.max_versions=0"],
            ["rollout.max_in_flight = 65", "64"],
        ),
        (
            [*SPLIT, "environment=calculator_agent"],
            ["rollout.schedule = split", "environment=agent", "rollout.schedule=partial"],
        ),
        ([*SPLIT[:2], "cluster.gpus_per_node=1"], ["placement.rollout_gpus = 1", "left to train"]),
        (
            [
                *SPLIT[:1],
                "placement.rollout_gpus=3",
                "cluster.gpus_per_node=5",
                "rollout.tensor_parallel_size=2",
            ],
            ["rollout.tensor_parallel_size = 2", "placement.rollout_gpus = 3", "one of 1, 3"],
        ),
        (
            [*SPLIT[:2], "cluster.gpus_per_node=3", "fsdp.dp_shard=3"],
            ["fsdp.dp_shard = 3", "2 of 3 ranks, which train"],
        ),
        (
            [*SPLIT[:2], "cluster.gpus_per_node=4"],
            ["actor.mini_batch_size", "3 of 4 ranks, which train"],
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_one_mistake_gets_one_problem(overrides, words):
    found = problems(*GRPO, *overrides)
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found


@pytest.mark.parametrize(
    ("overrides", "in_flight"),
    [
        ([], 64),
        ([PARTIAL], 128),
        ([PARTIAL, "environment=calculator", "algorithm.max_sampling_rounds=2"], 128),
        ([PARTIAL, "rollout.max_in_flight=70"], 70),
        ([PARTIAL, "rollout.max_versions=0"], 64),
        (SPLIT, 128),
        ([*SPLIT, "rollout.max_versions=1"], 64),
        ([*SPLIT, "rollout.max_versions=0"], 64),
    ],
)
def test_twice_a_steps_prompts_are_in_flight_by_default(overrides, in_flight):
    """An engine decodes a step's responses at once; the others wait for a place, oldest first."""
    found = examined([*GRPO, "rollout.max_num_seqs=null", *overrides])
    assert not found.report.texts
    rollout = found.config.rollout
    assert (rollout.max_in_flight, rollout.max_num_seqs) == (in_flight, 512)


def test_ranks_that_train_and_ranks_that_sample_are_counted_apart():
    """Two engines of two ranks are on the last 4 of 8, and the first 4 train."""
    own = ["cluster.gpus_per_node=8", "placement.rollout_gpus=4"]
    found = examined([*GRPO, SPLIT[0], *own, "rollout.tensor_parallel_size=2"])
    assert not found.report.texts
    config = found.config
    assert (config.fsdp.dp_shard, training_ranks(config), num_engines(config)) == (4, 4, 2)
    config.placement.slots_on_nodes = [4, 4]
    assert sampling_slots_on_nodes(config) == [4]
    config.placement.rollout_gpus = 5
    assert sampling_slots_on_nodes(config) == [1, 4]
    config.placement.rollout_gpus = None
    assert sampling_slots_on_nodes(config) == [4, 4]


def test_neither_kind_of_rank_holds_what_the_other_does():
    found = examined([*GRPO, *SPLIT])
    phases = rank_phases(found.config, found.shape, 80 * 2**30)
    rollout = next(phase for phase in phases if phase.name == "rollout")
    assert rollout.parts["shadow copy"] == rollout.parts["rollout weights"] > 0
    assert not any(part.startswith("actor") for part in rollout.parts)
    others = [part for phase in phases if phase is not rollout for part in phase.parts]
    assert "actor weights" in others and not {"rollout weights", "KV cache"} & {*others}
