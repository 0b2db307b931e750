"""Recipes for two steps on a few problems, in one sweep, and in another that is slow.

But gsm8k_ppo, gsm8k_grpo, calculator_tool, calculator_agent, gsm8k_sft, gsm8k_distill and
gsm8k_dpo, which test_run.py, test_python.py, test_calculator_run.py, test_agent_run.py,
test_sft_slow.py, test_distill.py and test_preferences_run.py run; reverse_text, which needs another
package (test_verifiers_slow.py); and those of a size that needs GPUs, whose plans
tests/unit/conf/test_plan.py holds. A check of wiring; that they learn is shown by
test_recipe_learns_slow.py.
"""

import json

import pytest

from tests.support.metric_names import check_row
from tests.support.runs import ROOT, SMALL, started

ELSEWHERE = (
    *("gsm8k_ppo", "gsm8k_grpo", "calculator_tool", "calculator_agent", "gsm8k_sft"),
    *("qwen2_5_7b_grpo_8gpu", "qwen2_5_1_5b_grpo_1gpu", "gsm8k_distill", "gsm8k_dpo"),
    "reverse_text",
)
# What is their own, advantages, loss or adapters, other tests hold.
SLOW = ["gsm8k_gspo", "gsm8k_lora", "gsm8k_reinforce_pp", "gsm8k_rloo"]
RECIPES = sorted(
    {path.stem for path in (ROOT / "conf" / "recipe").glob("*.yaml")} - {*ELSEWHERE, *SLOW}
)


def swept(folder, recipes):
    """The output of a sweep over recipes, and each one's rows of metrics."""
    # No more places than a step has responses, as by default on GPUs.
    more = ["rollout.max_num_seqs=32", "eval.greedy=false"]
    overrides = [*SMALL[1:], *more, f"hydra.sweep.dir={folder / 'sweep'}"]
    with started(folder / "run", f"+recipe={','.join(recipes)}", *overrides, "-m") as run:
        output = run.ended(timeout=280)
    files = [folder / "sweep" / str(job) / "metrics.jsonl" for job in range(len(recipes))]
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return output, dict(zip(recipes, rows, strict=True))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return swept(tmp_path_factory.mktemp("recipes"), RECIPES)


def test_the_table_ranks_every_job(sweep):
    output, _ = sweep
    table = output[output.rindex("rank") :]
    assert all(f"recipe={recipe}" in table for recipe in RECIPES), table


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_steps_are_on_policy_and_finite(sweep, recipe):
    check_steps(sweep[1][recipe])


@pytest.mark.slow
def test_two_steps_of_the_others_are_on_policy_and_finite(tmp_path):
    for rows in swept(tmp_path, SLOW)[1].values():
        check_steps(rows)
        assert not any("critic" in name for row in rows for name in row)


def check_steps(rows):
    first, *steps = rows
    assert first["eval/accuracy"] is not None
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        check_row(row)


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_a_critic_nothing_is_known_of_one(sweep, recipe):
    """All of these compare responses with each other or with a batch."""
    rows = sweep[1][recipe]
    assert not any("critic" in name or name == "time/values_s" for row in rows for name in row)


def test_a_partial_step_trains_whole_groups_and_leaves_others_in_flight(sweep):
    first, second = sweep[1]["gsm8k_partial"][1:]
    for row in (first, second):
        assert row["partial/in_flight"] + row["partial/waiting"] == 8 * 4
    assert first["partial/version_lag_max"] == first["partial/continued_responses"] == 0
    assert second["partial/continued_responses"] == first["partial/in_flight"] > 0
    assert second["partial/version_lag_max"] == 1
    # Tokens of the first step's weights do not count as a mismatch.
    assert second["rollout/log_prob_diff_mean"] < 1e-5 < second["rollout/mismatch_kl_k3"]


def test_dapo_samples_until_groups_are_mixed_and_has_no_reference(sweep):
    for row in sweep[1]["gsm8k_dapo"][1:]:
        assert 1 <= row["sampling/rounds"] <= 4
        missing, prompts = row["sampling/unmixed_prompts"], row["sampling/prompts"]
        assert row["sampling/mixed_fraction"] == pytest.approx((8 - missing) / prompts)
        assert missing == 0 or row["sampling/rounds"] == 4
        assert row["actor/kl"] is None and "time/ref_log_probs_s" not in row
        assert row["reward/overlong_penalty"] >= 0.0
