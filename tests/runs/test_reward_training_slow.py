"""A reward model is trained on pairs, saved as a classifier, and rewards a run of GRPO."""

import json

import pytest

from hybridrl.commands.export import export
from hybridrl.config.choices import DType
from hybridrl.config.errors import ConfigError
from tests.support.metric_names import unexplained
from tests.support.runs import SMALL, started

TRAINING = [
    *("+recipe=gsm8k_dpo", "algorithm=bradley_terry", "hardware=cpu", "trainer.total_steps=12"),
    *("data.prompts_per_step=32", "critic.optim.lr=1e-3", "cluster.gpus_per_node=2"),
    *("data.num_eval_problems=64", "eval.every_steps=4", "checkpoint.every_steps=8"),
    "tracking.report=false",
]
REWARDED = [
    *("+recipe=gsm8k_grpo", *SMALL[1:], "reward=none", "reward_model=default"),
    *("eval.greedy=false", "data.num_eval_problems=4", "trainer.save_final_model=false"),
]


@pytest.mark.slow
def test_what_is_trained_rewards_a_run(tmp_path):
    with started(tmp_path / "rm", *TRAINING) as run:
        output = run.ended()
        rows = run.metrics()
    first, *steps = rows
    assert "preference pairs, bradley_terry" in output
    assert steps[-1]["actor/loss"] < steps[0]["actor/loss"]
    assert steps[-1]["eval/preference_accuracy"] > max(0.6, first["eval/preference_accuracy"])
    known = {name for row in rows for name, value in row.items() if value is not None}
    assert not {name for name in known if name.startswith("eval/acc")}
    assert unexplained(known) == []
    final = tmp_path / "rm" / "final"
    assert json.loads((final / "config.json").read_text())["architectures"][0].endswith(
        "ForSequenceClassification"
    )
    with pytest.raises(ConfigError, match="trains a reward model"):
        export(tmp_path / "rm", tmp_path / "policy", DType.float32, None)
    with started(tmp_path / "grpo", *REWARDED, f"reward_model.model.path={final}") as run:
        run.ended()
        rows = run.metrics()
    for row in rows[1:]:
        assert row["reward/model_mean"] == pytest.approx(row["reward/mean"], rel=1e-5)
    assert rows[1]["reward/std"] > 0.0
