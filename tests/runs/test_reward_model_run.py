"""A run whose rewards come from a reward model alone: a random checkpoint, two steps."""

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hybridrl.models.resolve import EMBEDDED_FOLDER
from tests.support.metric_names import unexplained
from tests.support.runs import SMALL, started
from tests.support.tiny_hf import tiny_reward_model

WEIGHT = 2.0


@pytest.mark.slow
def test_the_reward_model_alone_decides(tmp_path):
    """And what it says of each response is what transformers' own model says of it."""
    folder = tiny_reward_model(
        "llama", tmp_path / "rm", vocab_size=640, max_position_embeddings=256
    )
    shutil.copy(EMBEDDED_FOLDER / "tokenizer.json", folder)
    overrides = [
        *("+recipe=gsm8k_grpo", *SMALL[1:], "reward=none", "reward_model=default"),
        *(f"reward_model.model.path={folder}", f"reward_model.weight={WEIGHT}"),
        *("eval.greedy=false", "trainer.samples_every_steps=1"),
        *("trainer.save_final_model=false", "data.num_eval_problems=4"),
    ]
    with started(tmp_path / "run", *overrides) as run:
        output = run.ended()
        rows = run.metrics()
        rollouts = (run.run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()
        manifest = json.loads((run.run_dir / "manifest.json").read_text())
    assert f"{folder}, " in output.replace("\n", " ") and "weight 2" in output
    assert manifest["config"]["reward_model"]["model"] == {"path": str(folder)}
    assert unexplained(rows[1]) == []
    for row in rows[1:]:
        assert row["reward/mean"] == pytest.approx(WEIGHT * row["reward/model_mean"], rel=1e-5)
        assert row["reward/std"] > 0.1 and row["time/model_scores_s"] > 0.0
        assert row["actor/first_log_ratio_max"] == 0.0
        assert all(value is None or math.isfinite(value) for value in row.values())
    assert rows[1]["actor/grad_norm"] > 0.0
    _assert_as_transformers_says([json.loads(line) for line in rollouts], folder, rows[1])


def _assert_as_transformers_says(records, folder, row):
    """Responses that ended by themselves, whose tokens are known from their text."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_FOLDER)
    mean = sum(record["score"] for record in records) / len(records)
    assert mean == pytest.approx(row["reward/mean"], rel=1e-5)
    compared = 0
    for record in records:
        ids = tokenizer(record["prompt"] + record["response"], add_special_tokens=False)
        prompt = tokenizer(record["prompt"], add_special_tokens=False)["input_ids"]
        whole = [*ids["input_ids"], tokenizer.eos_token_id]
        if len(whole) - len(prompt) != record["length"]:
            continue  # cut off, or written in other tokens than the tokenizer would choose
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([whole])).logits[0, 0]
        assert record["score"] == pytest.approx(WEIGHT * float(expected), abs=2e-4)
        compared += 1
    assert compared >= len(records) // 2
