"""Health rules and rewards of reference answers: what is said, when, and how often."""

from dataclasses import replace

import pytest
import torch

from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.reference_answers import references, show_reference_rewards
from hybridrl.trainer.rewarding import FunctionRewards, mixed_fraction
from hybridrl.trainer.tracking.health import RULES, Health
from tests.run_configs import run_config
from tests.unit.scorers import reward_scorer

GOOD = {
    "reward/mean": 0.4,
    "reward/std": 0.5,
    "reward/mixed_fraction": 0.3,
    "response/truncated_fraction": 0.1,
    "eval/failed": 0.0,
}
CONSTANT = GOOD | {"reward/std": 1e-9, "reward/mixed_fraction": 0.0}
UNMIXED = GOOD | {"reward/mixed_fraction": 0.0}


def warnings(*rows, algorithm="grpo"):
    """The warnings of steps with these metrics, one list per step."""
    health = Health(run_config(f"algorithm={algorithm}"))
    return [[*health.warnings(step, row)] for step, row in enumerate(rows, start=1)]


@pytest.mark.parametrize(
    ("row", "names"),
    [
        (CONSTANT, ["step 1: every response got the same reward", "reward.function"]),
        (UNMIXED, ["step 1: in no group", "rollout.responses_per_prompt"]),
        (
            GOOD | {"response/truncated_fraction": 0.95},
            ["step 1: 95% of the responses were cut off", "rollout.max_response_tokens"],
        ),
        (GOOD | {"eval/failed": 3.0}, ["step 1: 3 rewards of held-out responses failed"]),
        (GOOD | {"actor/skipped_steps": 2.0}, ["step 1: 2 updates of the actor skipped"]),
    ],
)
def test_what_is_wrong_is_said_once_with_its_remedy(row, names):
    ((warning,),) = warnings(row)
    assert [name for name in names if name not in warning] == [], warning


def test_a_healthy_step_and_an_evaluation_alone_have_no_warning():
    at_limits = GOOD | {"response/truncated_fraction": 0.9, "reward/mixed_fraction": 0.01}
    assert warnings(GOOD, at_limits, {"eval/accuracy": 0.0, "eval/failed": 0.0}) == [[], [], []]


def test_groups_matter_only_where_they_are_compared():
    assert warnings(UNMIXED, algorithm="ppo") == [[]]
    ((warning,),) = warnings(CONSTANT, algorithm="ppo")
    assert "the same reward" in warning


def test_a_large_constant_reward_is_constant_up_to_rounding():
    ((warning,),) = warnings(CONSTANT | {"reward/mean": 1e6, "reward/std": 0.1})
    assert "the same reward" in warning


def test_a_warning_returns_only_when_it_persists():
    found = warnings(*[CONSTANT] * 12, GOOD, *[CONSTANT] * 10)
    assert [step for step, texts in enumerate(found, start=1) if texts] == [1, 10, 23]
    assert found[9][0].startswith("step 10, for 10 steps now:")


def test_failures_are_counted_at_each_step():
    assert [len(texts) for texts in warnings(*[GOOD | {"eval/failed": 1.0}] * 3)] == [1, 1, 1]


def test_every_rule_has_a_metric_of_its_own():
    assert len({rule.metric for rule in RULES}) == len(RULES)


def test_mixed_fraction_counts_groups_with_different_rewards():
    outcome = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.5, 0.0])
    assert mixed_fraction(outcome, 2) == {"reward/mixed_fraction": 0.5}
    assert mixed_fraction(outcome, 4) == {"reward/mixed_fraction": 1.0}
    assert mixed_fraction(outcome, 1) == {}


def prompt(answer, **columns):
    example = {"question": "How many?", "answer": answer, **columns}
    return Prompt(0, [1], "How many?\n", "How many?", example, {}, where="a.jsonl:1")


class Lines:
    """A console that keeps what it is given."""

    def __init__(self):
        self.notes, self.warnings = [], []
        self.note, self.warn = self.notes.append, self.warnings.append


def said(function, *prompts, **args):
    """What is said of reference answers by a reward."""
    config = run_config(f"reward.function={function}")
    settings = {"timeout_s": 5.0, "num_processes": 1, "failed_score": 0.0}
    with reward_scorer(function, args, **settings) as scorer:
        rewards = FunctionRewards(lambda rows: [], scorer)
        show_reference_rewards(config, list(prompts), rewards, console := Lines())
    return console


SOLVED = "She has 40 + 2 = 42.\n#### 42"


@pytest.mark.parametrize(
    ("answer", "mode", "ends"),
    [
        (SOLVED, "strict", "(a.jsonl:1): reward 1"),
        ("42", "flexible", "(a.jsonl:1): reward 1"),
        ("42", "strict", "reward 1, written as '#### 42'"),
    ],
)
def test_a_fitting_reference_answer_is_one_line(answer, mode, ends):
    found = said("hybridrl.rewards.gsm8k.score", prompt(answer), mode=mode)
    (text,) = found.notes
    assert found.warnings == [] and text.endswith(ends) and "\n" not in text


def test_the_final_answer_of_a_solution_is_tried_in_other_forms():
    pattern = r"\\boxed\{42\}"
    (text,) = said("hybridrl.rewards.format.matches", prompt(SOLVED), pattern=pattern).notes
    assert text.endswith(r"reward 1, written as '\\boxed{42}'")


def test_a_reward_that_does_not_fit_is_a_warning():
    (text,) = said("hybridrl.rewards.none.score", prompt(SOLVED)).warnings
    assert "reward 0" in text and "data.answer_key = answer" in text
    (failed,) = said("hybridrl.rewards.gsm8k.score", prompt("blue", color="sky")).warnings
    assert "the reward fails" in failed and "question, answer, color" in failed


def test_each_data_set_of_a_mixture_has_a_line():
    sets = [replace(prompt(SOLVED), dataset=name) for name in ("a", "b", "a")]
    found = said("hybridrl.rewards.gsm8k.score", *sets).notes
    assert [text[:19] for text in found] == ["a: reference answer", "b: reference answer"]


def test_a_worked_solution_comes_before_the_bare_answer():
    verl = prompt("42", extra_info={"answer": SOLVED})
    config = run_config("data.solution_key=extra_info.answer", "data.few_shot=1")
    assert references(config, verl)[:2] == [SOLVED, "42"]
    assert references(run_config(), verl)[0] == "42"
    forms = ["42", "#### 42", "\\boxed{42}", "<answer>42</answer>"]
    assert references(run_config(), prompt(SOLVED)) == [SOLVED, *forms]
