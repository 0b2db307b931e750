"""A run with two teachers, sampled responses and given answers; and that distillation learns."""

import json

import pytest

from tests.support.runs import ROOT, SMALL, started

TINY = ROOT / "hybridrl" / "models" / "tiny"


def test_two_teachers_that_are_the_policy_teach_it_nothing(tmp_path):
    """But rounding, by which AdamW would step. Step 1 samples, step 2 trains on given answers."""
    rows = [
        {"question": f"What is {k} plus 1?", "answer": f"#### {k + 1}", "teacher": "ab"[k % 2]}
        for k in range(60)
    ]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        *("+recipe=gsm8k_distill", *SMALL[1:], "cluster.gpus_per_node=2"),
        *(f"teacher.models={{a: {TINY}, b: {TINY}}}", "teacher.given_fraction=0.5", "seed=7"),
        *(f"data.train_files={data}", "actor.optim.lr=1e-10"),
    ]
    with started(tmp_path / "run", *overrides) as run:
        run.ended()
    _, sampled, given = run.metrics()
    assert sampled["teacher/log_ratio_max"] < 1e-5 and sampled["actor/first_log_ratio_max"] == 0
    assert sampled["time/teacher_log_probs_s"] > 0 < given["time/teacher_log_probs_s"]
    assert sampled["reward/mean"] is not None is given["reward/mean"]
    for row in (sampled, given):
        assert abs(row["actor/teacher_divergence"]) < 1e-6
        assert 0 < row["actor/grad_norm"] < 0.1  # the policy's micro-batches have more rows


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trained_teacher_makes_a_weak_policy_better_than_its_rewards_do(tmp_path):
    """At the same number of sampled tokens, 5 steps of 64 responses."""
    grpo = ["+recipe=gsm8k_grpo", "hardware=cpu", "tracking.report=false"]
    with started(tmp_path / "teacher", *grpo, "trainer.total_steps=20") as run:
        run.ended(timeout=400)
    short = ["hardware=cpu", "trainer.total_steps=5", "eval.before_training=false"]
    distill = [*short, "+recipe=gsm8k_distill", f"teacher.models={tmp_path / 'teacher'}"]
    distill.append("actor.optim.schedule=constant")  # as the recipe's first steps
    with started(tmp_path / "distill", *distill) as run:
        run.ended()
    taught = run.metrics()[-1]["eval/accuracy"]
    same = [
        "data.prompts_per_step=16",
        "rollout.responses_per_prompt=4",
        "actor.mini_batch_size=32",
    ]
    with started(tmp_path / "grpo", *grpo, *short[1:], *same, "actor.optim.lr=3e-4") as run:
        run.ended()
    rewarded = run.metrics()[-1]["eval/accuracy"]
    assert taught > 0.75 and taught > rewarded + 0.05, (taught, rewarded)
