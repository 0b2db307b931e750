"""Responses over several steps: what they need and exclude; places of an engine by default."""

import pytest

from hybridrl.config.planner.memory import rank_phases
from hybridrl.config.planner.world import num_engines, sampling_slots_on_nodes, training_ranks
from tests.support.composing import examined, made, mistakes

GRPO = ("+recipe=gsm8k_grpo", "hardware=cpu")
PARTIAL = "rollout.schedule=partial"
RANKS = "placement.rollout_gpus=1 cluster.gpus_per_node=2"
SPLIT = f"rollout.schedule=split {RANKS}"
# With split, what is sampled meanwhile is trained one step later than with partial.
MISTAKES = f"""
no_effect rollout.max_versions rollout.max_versions=2 | rollout.schedule
stale_tokens algorithm.rollout_correction.method {PARTIAL} \
    algorithm.rollout_correction.method=none | method=truncate
max_in_flight rollout.max_in_flight {PARTIAL} rollout.max_in_flight=200 rollout.max_versions=2 \
    | 64 | 192
max_in_flight rollout.max_in_flight {PARTIAL} rollout.max_in_flight=63 | 64
no_effect rollout.keep_kv rollout.keep_kv=true | rollout.schedule
no_effect rollout.keep_kv {PARTIAL} rollout.keep_kv=true rollout.max_versions=0 \
    | rollout.max_versions = 0
keep_kv rollout.keep_kv {PARTIAL} rollout.keep_kv=true environment=calculator_agent \
    | environment=agent | rollout.keep_kv=false
keep_kv rollout.keep_kv {SPLIT} rollout.keep_kv=true algorithm=remax | greedy
split_needs_ranks placement.rollout_gpus rollout.schedule=split
ranks_need_split placement.rollout_gpus {RANKS} | rollout.schedule = sync | idle
ranks_need_split placement.rollout_gpus {PARTIAL} rollout.max_versions=3 {RANKS} \
    | rollout.schedule = partial
stale_tokens algorithm.rollout_correction.method {SPLIT} algorithm.rollout_correction.method=none
max_in_flight rollout.max_in_flight {SPLIT} rollout.max_in_flight=129 rollout.max_versions=2 \
    | 64 | 128
max_in_flight rollout.max_in_flight {SPLIT} rollout.max_in_flight=65 rollout.max_versions=0 | 64
agent rollout.schedule {SPLIT} environment=calculator_agent | rollout.schedule=partial
no_training_rank placement.rollout_gpus {SPLIT} cluster.gpus_per_node=1
engine_ranks rollout.tensor_parallel_size {SPLIT} placement.rollout_gpus=3 \
    cluster.gpus_per_node=5 rollout.tensor_parallel_size=2 \
    | placement.rollout_gpus = 3 | one of 1, 3
mesh fsdp.dp_shard {SPLIT} cluster.gpus_per_node=3 fsdp.dp_shard=3 | 2 of 3 ranks, which train
mini_batch_share actor.mini_batch_size {SPLIT} cluster.gpus_per_node=4 | 3 of 4 ranks, which train
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_one_mistake_gets_one_problem(mistake):
    assert made(mistake, *GRPO) == [mistake]


@pytest.mark.parametrize(
    ("overrides", "in_flight"),
    [
        ([], 64),
        ([PARTIAL], 128),
        ([PARTIAL, "environment=calculator", "algorithm.max_sampling_rounds=2"], 128),
        ([PARTIAL, "rollout.max_in_flight=70"], 70),
        ([PARTIAL, "rollout.max_versions=0"], 64),
        (SPLIT.split(), 128),
        ([*SPLIT.split(), "rollout.max_versions=1"], 64),
        ([*SPLIT.split(), "rollout.max_versions=0"], 64),
    ],
)
def test_twice_a_steps_prompts_are_in_flight_by_default(overrides, in_flight):
    """An engine decodes a step's responses at once; the others wait for a place, oldest first."""
    found = examined([*GRPO, "rollout.max_num_seqs=null", *overrides])
    assert not found.report.problems
    rollout = found.config.rollout
    assert (rollout.max_in_flight, rollout.max_num_seqs) == (in_flight, 512)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 256),  # conf/hardware/cpu.yaml
        (["rollout.max_num_seqs=null"], 512),  # 64 prompts x 8, one engine
        (["rollout.max_num_seqs=null", "cluster.gpus_per_node=3"], 22 * 8),  # ceil(64 / 3)
        (
            [
                "rollout.max_num_seqs=null",
                "cluster.gpus_per_node=2",
                "rollout.tensor_parallel_size=2",
            ],
            512,
        ),
        (["rollout.max_num_seqs=null", "data.prompts_per_step=256"], 1024),
    ],
)
def test_one_engine_decodes_what_it_is_dealt(overrides, expected):
    found = examined(["+recipe=gsm8k_ppo", "hardware=cpu", *overrides])
    assert found.config.rollout.max_num_seqs == expected


def test_ranks_that_train_and_ranks_that_sample_are_counted_apart():
    """Two engines of two ranks are on the last 4 of 8, and the first 4 train."""
    own = ["cluster.gpus_per_node=8", "placement.rollout_gpus=4"]
    found = examined([*GRPO, "rollout.schedule=split", *own, "rollout.tensor_parallel_size=2"])
    assert not found.report.problems
    config = found.config
    assert (config.fsdp.dp_shard, training_ranks(config), num_engines(config)) == (4, 4, 2)
    config.placement.slots_on_nodes = [4, 4]
    assert sampling_slots_on_nodes(config) == [4]
    config.placement.rollout_gpus = 5
    assert sampling_slots_on_nodes(config) == [1, 4]
    config.placement.rollout_gpus = None
    assert sampling_slots_on_nodes(config) == [4, 4]


def test_neither_kind_of_rank_holds_what_the_other_does():
    found = examined([*GRPO, *SPLIT.split()])
    phases = rank_phases(found.config, found.shape, 80 * 2**30)
    rollout = next(phase for phase in phases if phase.name == "rollout")
    assert rollout.parts["shadow copy"] == rollout.parts["rollout weights"] > 0
    assert not any(part.startswith("actor") for part in rollout.parts)
    others = [part for phase in phases if phase is not rollout for part in phase.parts]
    assert "actor weights" in others and not {"rollout weights", "KV cache"} & {*others}
