"""The recipes as shipped: they learn to solve the problems, within four minutes each.

Each leaves its curve and metrics in tests/.slow/, from which the recipes' READMEs are made.
"""

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.support.runs import started

KEPT = Path(__file__).resolve().parents[1] / ".slow"
# Paid about as often as the warm start's answers are right, whatever they say.
BLIND_REWARD = """
import hashlib

def score(prompt, response, example, mode=""):
    digest = hashlib.blake2b(f"{prompt} {response}".encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") % 100 < 37)
"""
STRICT_RULE = "+eval.rules.strict={function: hybridrl.rewards.gsm8k.score, args: {mode: strict}}"


# Promised by recipes/<recipe>/README.md, on two free cores; of the others 4 minutes.
SECONDS = {"calculator_agent": 300}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("recipe", "seed"),
    [
        ("gsm8k_ppo", 1),
        ("gsm8k_ppo", 2),
        ("gsm8k_ppo", 3),
        ("gsm8k_grpo", 1),
        ("gsm8k_partial", 1),
        ("gsm8k_rloo", 1),
        ("gsm8k_reinforce_pp", 1),
        ("gsm8k_dapo", 1),
        ("gsm8k_gspo", 1),
        ("calculator_tool", 1),
        ("calculator_agent", 1),
        ("gsm8k_lora", 1),
        ("gsm8k_dpo", 1),
    ],
)
def test_held_out_accuracy_rises(tmp_path, recipe, seed):
    KEPT.mkdir(exist_ok=True)
    start = time.monotonic()
    with started(tmp_path / "run", f"+recipe={recipe}", "hardware=cpu", f"seed={seed}") as run:
        output = run.output(timeout=380)
        seconds = time.monotonic() - start
        assert run.process.returncode == 0, output
        assert ", health." not in output  # as warnings begin; health.jsonl is a file of the run
        rows = [row for row in run.metrics() if row["eval/accuracy"] is not None]
        run.assert_nothing_left()
        for name in ("report.html", "metrics.jsonl"):
            shutil.copy(run.run_dir / name, KEPT / f"{recipe}_{seed}_{name}")
    first, last = rows[0], rows[-1]
    assert last["eval/accuracy"] - first["eval/accuracy"] >= 0.35
    assert last["eval/accuracy_flexible"] - first["eval/accuracy_flexible"] >= 0.15
    assert last["eval/accuracy_unseen"] - first["eval/accuracy_unseen"] >= 0.3
    # The warm start's most likely answers, which no temperature makes right.
    assert first["eval/accuracy_greedy"] <= 0.3
    assert last["eval/accuracy_greedy"] >= 0.75
    assert seconds <= SECONDS.get(recipe, 240)


SPLIT = ["rollout.schedule=split", "cluster.gpus_per_node=2", "placement.rollout_gpus=1"]


@pytest.mark.slow
@pytest.mark.timeout(3500)
@pytest.mark.parametrize(
    ("recipe", "others"),
    [
        ("gsm8k_grpo", [["+recipe=gsm8k_partial"], ["+recipe=gsm8k_partial", *SPLIT]]),
        ("calculator_tool", [["+recipe=calculator_agent"]]),
    ],
)
def test_three_seeds_end_alike_on_average(tmp_path, recipe, others):
    """partial, split and agents end within 0.03 of the recipe that they vary."""
    found = {}
    for command in ([f"+recipe={recipe}"], *others):
        accuracies = []
        for seed in (1, 2, 3):
            folder = tmp_path / str(len(found)) / str(seed)
            with started(folder, *command, "hardware=cpu", f"seed={seed}") as run:
                run.ended(timeout=380)
                accuracies.append(run.metrics()[-1]["eval/accuracy"])
        found[" ".join(command)] = accuracies
    print(json.dumps(found))
    first, *rest = [sum(accuracies) / 3 for accuracies in found.values()]
    assert all(abs(mean - first) <= 0.03 for mean in rest), found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_embedded_mixture_of_experts_learns(tmp_path):
    """Its warm start knows less arithmetic than that of the dense model."""
    changes = ["model=embedded_moe", "hardware=cpu", "seed=1"]
    with started(tmp_path / "run", "+recipe=gsm8k_ppo", *changes) as run:
        run.ended(timeout=380)
        rows = run.metrics()
    step = rows[-1]["step"] // 10 * 10
    file = tmp_path / "run" / "experts" / f"step_{step}.jsonl"
    shares = [json.loads(line)["shares"] for line in file.open()]
    assert [sum(layer) for layer in shares] == pytest.approx([1.0] * 3, abs=1e-5)
    assert max(map(max, shares)) == pytest.approx(rows[step]["router/load_max"], abs=1e-6)
    scores = [row for row in rows if row["eval/accuracy"] is not None]
    assert scores[-1]["eval/accuracy"] - scores[0]["eval/accuracy"] >= 0.3
    assert scores[0]["eval/accuracy_greedy"] <= 0.3
    assert scores[-1]["eval/accuracy_greedy"] >= 0.65
    for row in rows[1:]:
        assert row["actor/first_log_ratio_max"] == 0.0
        assert row["rollout/log_prob_diff_mean"] < 1e-5
        assert 0 <= row["router/load_min"] < 1 / 8 < row["router/load_max"] < 0.6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_embedded_hybrid_learns(tmp_path):
    """Two of its three layers are recurrent."""
    changes = ["model=embedded_hybrid", "hardware=cpu", "seed=1", "trainer.total_steps=20"]
    with started(tmp_path / "run", "+recipe=gsm8k_ppo", *changes) as run:
        run.ended(timeout=580)
        rows = run.metrics()
    scores = [row for row in rows if row["eval/accuracy"] is not None]
    assert scores[-1]["eval/accuracy"] - scores[0]["eval/accuracy"] >= 0.08
    assert scores[-1]["eval/accuracy_greedy"] - scores[0]["eval/accuracy_greedy"] >= 0.1
    for row in rows[1:]:
        assert row["actor/first_log_ratio_max"] == 0.0
        assert row["rollout/log_prob_diff_mean"] < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rewards_that_do_not_depend_on_the_answer_teach_nothing(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "blind.py").write_text(BLIND_REWARD)
    own = ["reward.function=blind.score", STRICT_RULE, "eval.samples=1"]
    with started(run_dir, "+recipe=gsm8k_ppo", "hardware=cpu", *own) as run:
        output = run.output(timeout=380)
        assert run.process.returncode == 0, output
        rows = run.metrics()
    assert rows[-1]["actor/kl"] > 0.0
    for decoding in ("", "_greedy"):
        name = f"eval/accuracy{decoding}_strict"
        assert abs(rows[-1][name] - rows[0][name]) <= 0.1
