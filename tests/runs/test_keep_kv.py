"""rollout.keep_kv=true: responses go on under new weights with the KV cache that they have."""

import pytest

from tests.support.kill_and_resume import untimed
from tests.support.runs import SMALL, started

OWN = [
    "+recipe=gsm8k_partial",
    "rollout.keep_kv=true",
    "rollout.max_num_seqs=32",
    "trainer.total_steps=3",
    "eval.before_training=false",
]


def run(folder, *overrides):
    """The rows of metrics of a run's steps, the only ones."""
    with started(folder, *SMALL[1:], *OWN, *overrides) as one:
        one.ended()
        assert [row["step"] for row in one.metrics()] == [1, 2, 3]
        return one.metrics()


def check(rows):
    """Steps after the first continue responses whose cache is of earlier weights."""
    first, *later = rows
    assert first["partial/old_kv_fraction"] == 0
    for row in later:
        assert 0 < row["partial/old_kv_fraction"] < 1
        assert row["partial/continued_responses"] > 0
    for row in rows:
        assert row["actor/first_log_ratio_max"] == 0.0


def test_steps_train_tokens_sampled_over_the_cache_of_earlier_weights(tmp_path):
    """Those are no mismatch of vLLM and actor; the other tokens have the actor's log-probs."""
    rows = run(tmp_path, "seed=2")  # with 1, one trains none of its own cache
    check(rows)
    for row in rows:
        assert row["rollout/log_prob_diff_mean"] < 1e-5
    assert rows[1]["rollout/mismatch_kl_k3"] > 1e-5


@pytest.mark.slow
def test_a_run_repeats_itself(tmp_path):
    """An evaluation ends the requests that are held."""
    rows, others = (run(tmp_path / name, "eval.every_steps=2") for name in ("one", "other"))
    assert [*map(untimed, rows)] == [*map(untimed, others)]
    assert [bool(row["partial/old_kv_fraction"]) for row in rows] == [False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["environment=calculator", "rollout.max_response_tokens=64"],
        ["cluster.gpus_per_node=2", "rollout.tensor_parallel_size=2", "lora=default"],
    ],
    ids=["conversations", "tp 2, adapters"],
)
def test_conversations_engines_of_several_ranks_and_adapters(tmp_path, more):
    check(run(tmp_path, *more))


@pytest.mark.slow
def test_split_keeps_the_cache_over_swaps(tmp_path):
    split = ["rollout.schedule=split", "placement.rollout_gpus=1", "cluster.gpus_per_node=2"]
    rows = run(tmp_path, *split)
    # The first step's call ahead has the weights of the first samples.
    assert all(0 < row["partial/old_kv_fraction"] < 1 for row in rows[1:])
