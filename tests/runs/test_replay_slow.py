"""A loss that is NaN for some responses: the run stops, and a replay names exactly these."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from tests.support.runs import ROOT, SMALL, started

# Two whole programs with their own Ray and vLLM, some 25 s each.
pytestmark = pytest.mark.slow

LOSS = """
from hybridrl.algorithms.policy_losses import ppo_clip
from hybridrl.algorithms.token_loss import TokenLoss

def loss(log_probs, old_log_probs, advantages, response_mask, sequence_id):
    good = ppo_clip(
        log_probs, old_log_probs, advantages, response_mask, clip_low=0.2, clip_high=0.2
    )
    lengths = sequence_id.bincount()[sequence_id]
    wrong = (lengths % 3 == 0) & (lengths > 5)  # the trial before the run has shorter ones
    return TokenLoss(good.values.masked_fill(wrong, float("nan")), good.sums)
"""


def test_a_run_without_finite_steps_stops_and_its_replay_names_the_responses(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "my_loss.py").write_text(LOSS)
    settings = ["trainer.max_skipped_steps=3", "trainer.total_steps=9", "eval.greedy=false"]
    with started(run_dir, *SMALL, "algorithm.loss.function=my_loss.loss", *settings) as run:
        output = run.ended(1)
        rows = run.metrics()
    assert "Traceback" not in output
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["actor/skipped_steps"] == 2.0 for row in rows[1:])
    folder = run_dir / "replay" / "step_2"
    for told in (
        "The last 4 optimizer steps of the actor were skipped, all since training step 1",
        f"hybridrl replay {folder}",
    ):
        assert told in output, output

    batch = load_file(folder / "batch.safetensors")
    lengths = batch["lengths.responses"].tolist()
    guilty = [row for row, length in enumerate(lengths) if length % 3 == 0 and length > 5]
    assert 0 < len(guilty) < len(lengths)
    replayed = subprocess.run(
        [sys.executable, "-m", "hybridrl.cli", "replay", str(folder), "--run-code"],
        cwd=run_dir,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert replayed.returncode == 3, replayed.stdout + replayed.stderr
    found = json.loads((folder / "replay.json").read_text())
    assert (found["role"], found["step"], found["finite"]) == ("actor", 2, False)
    assert [response["response"] for response in found["responses"]] == guilty
    assert all(response["bad"] == ["loss"] for response in found["responses"])
    assert found["weights"] == {}
    texts = json.loads((folder / "batch.json").read_text())["texts"]
    for response in found["responses"]:
        text = texts[response["response"]]
        assert (response["prompt"], response["text"]) == (text["prompt"], text["response"])
    assert "loss nan, gradient norm" in replayed.stdout
