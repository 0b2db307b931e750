"""rollout.schedule=split: one rank trains, the other samples; on policy it equals sync."""

import json

import pytest

from hybridrl.checkpoint.files import STATE
from hybridrl.checkpoint.verification import newest_good
from tests.support.kill_and_resume import assert_same_bits, untimed
from tests.support.runs import SMALL, started
from tests.support.whole_weights import read_whole

SPLIT = [
    "rollout.schedule=split",
    "placement.rollout_gpus=1",
    "cluster.gpus_per_node=2",
]
# Metrics that only responses over several steps have, ranks of two kinds, or sync after an
# evaluation, where split empties the prefix cache alone.
OWN = ("partial/", "split/", "reshard/received_bytes", "reshard/written_bytes")
# Ranks compute with as many threads, whether there is one of them or two.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def run(folder, *overrides):
    """The rows of metrics of a run, and its last checkpoint's weights and moments."""
    common = [*SMALL, "trainer.total_steps=3", "eval.every_steps=2", "checkpoint.every_steps=3"]
    with started(folder, *common, *overrides, env=ONE_THREAD) as one:
        one.ended()
        found = newest_good(folder)
        assert found is not None
        state = read_whole(found.folder / STATE, "")
        return one.metrics(), {k: v for k, v in state.items() if not k.startswith("rng.")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        ["trainer.critic_warmup_steps=1"],
        ["algorithm=remax"],
        ["lora=default"],
        ["algorithm=dapo", "environment=calculator", "rollout.max_response_tokens=64"],
    ],
    ids=" ".join,
)
def test_split_on_policy_equals_sync(tmp_path, algorithm):
    """With rollout.max_versions=0 all metrics but times are the same, and so are the weights."""
    rows, state = run(tmp_path / "sync", *algorithm)
    split = ["rollout.max_versions=0", *SPLIT, *algorithm]
    others, other_state = run(tmp_path / "split", *split)
    for row, other in zip(rows, others, strict=True):
        one, both = (
            {name: value for name, value in untimed(values).items() if not name.startswith(OWN)}
            for values in (row, other)
        )
        assert both == one
        assert other.get("partial/version_lag_max", 0.0) == 0.0
    assert_same_bits(other_state, state)


def test_one_rank_samples_while_the_other_trains(tmp_path):
    more = ["trainer.critic_warmup_steps=1", "trainer.samples_every_steps=1"]
    rows, _ = run(tmp_path / "split", *more, *SPLIT)
    lines = (tmp_path / "split" / "timeline.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if step["step"]]
    for row, step in zip(rows[1:], steps, strict=True):
        lanes = [[span for s in step["sections"] for span in s["ranks"][k]] for k in (0, 1)]
        (ahead,) = (span for span in lanes[1] if span["method"] == "rollout.generate_ahead")
        # In the first step the comparison of the start comes first.
        scoring, *more = (x for x in lanes[0] if x["method"] == "actor.compute_log_probs")
        assert len(more) == (row["step"] == 1)
        assert scoring["start"] < ahead["start"] + ahead["seconds"]
        assert ahead["start"] < scoring["start"] + scoring["seconds"]
        assert not any(span["method"].startswith("rollout.") for span in lanes[0])
        assert row["split/sampled_tokens"] > 0 and row["idle/engines_s"] > 0
        assert row["partial/version_lag_max"] <= 2
        assert row["actor/first_log_ratio_max"] in (0.0, None)  # None: the critic alone is trained
        # Weights that were not trained are not sent.
        assert ("split/swap_s" in row and row["split/swap_s"] is not None) is (row["step"] > 1)
    assert rows[1]["partial/version_lag_max"] == 0 < rows[3]["partial/version_lag_mean"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["cluster.gpus_per_node=3", "placement.rollout_gpus=2", "rollout.tensor_parallel_size=2"],
        ["cluster.gpus_per_node=4", "placement.rollout_gpus=2", "fsdp.dp_replicate=2"],
        [
            "cluster.gpus_per_node=4",
            "placement.rollout_gpus=2",
            "rollout.tensor_parallel_size=2",
            "algorithm=grpo",
            "lora=default",
        ],
    ],
    ids=["1 and tp 2", "2 copies and 2 engines", "2 shards and tp 2, adapters"],
)
def test_ranks_of_both_kinds_may_be_several(tmp_path, layout):
    """With tp 2 on two shards the layout is aligned. Without an update ahead nothing mismatches."""
    rows, _ = run(tmp_path / "split", *SPLIT[:1], *layout, "trainer.profile_steps=[2]")
    for row in rows[1:]:
        assert row["actor/first_log_ratio_max"] == 0.0
        assert row["rollout/mismatch_kl_k3"] < 0.01
        assert row["reshard/received_bytes"] > 0
    assert rows[1]["rollout/log_prob_diff_mean"] < 1e-4


@pytest.mark.slow
def test_weights_that_arrive_with_a_flipped_bit_sample_nothing(tmp_path):
    worker = "rollout.worker=tests.support.ill_parts.FlippedInShadow"
    with started(tmp_path / "run", *SMALL, *SPLIT, worker, "trainer.total_steps=4") as one:
        output = one.ended(1)
        assert "after reshard 2 the rollout engine's weights are not the actor's" in output
        assert "on ranks [1]: does not hold what was sent to it" in output
