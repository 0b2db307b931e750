"""Health checks and rewards of reference answers: what is said, when, and how often."""

import math
import re
import time
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

from hybridrl.app.reference_answers import references, show_reference_rewards
from hybridrl.commands.check import _reward_lines
from hybridrl.config.keys import leaves
from hybridrl.config.sections import HealthConfig
from hybridrl.data.batch import ConversationOutcome
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.tokenizer import Renderer, load_tokenizer
from hybridrl.health.checks import CHECKS
from hybridrl.health.findings import Health
from hybridrl.health.measures import MarkedTokens, carriers, repeated, response_measures
from hybridrl.trainer.rewarding import FunctionRewards, mixed_fraction
from tests.runs import test_health_slow
from tests.support.batches import batch_of
from tests.support.composing import composed
from tests.support.role_configs import model_config
from tests.support.run_configs import CONF, run_config
from tests.support.scorers import reward_scorer
from tests.support.tokenizer_folders import model_folder

TOKENS = MarkedTokens(torch.tensor([7]), torch.tensor([8, 9]))
SPEED = "rollout/engine_tokens_per_second_"
DIFFERENCE = "rollout/log_prob_diff_engine_max"
GOOD = {
    "reward/mean": 0.4,
    "reward/std": 0.5,
    "reward/mixed_fraction": 0.3,
    "reward/failed": 0.0,
    "response/truncated_fraction": 0.1,
    "response/repeated_fraction": -0.02,
    "actor/entropy": 0.5,
    "actor/kl": 0.001,
    "actor/ppo_kl": 0.001,
    "actor/lr": 1e-4,
    "actor/log_ratio_max": 0.2,
    "actor/grad_norm": 0.3,
    "actor/clip_fraction": 0.0,
    "critic/lr": 1e-4,
    "critic/explained_variance": 0.1,
    DIFFERENCE: 1e-6,
    f"{SPEED}0": 1000.0,
    f"{SPEED}1": 1100.0,
    "time/step_s": 10.0,
    "time/score_s": 0.5,
    "eval/accuracy": 0.5,
    "eval/ci95": 0.05,
    "eval/accuracy_flexible": 0.55,
    "eval/failed": 0.0,
}
CONSTANT = GOOD | {"reward/std": 1e-9, "reward/mixed_fraction": 0.0}
UNMIXED = GOOD | {"reward/mixed_fraction": 0.0}
SLOW = GOOD | {f"{SPEED}1": 2500.0}


config_of = cache(run_config)


def health_of(*overrides, rows=()):
    return Health(config_of("algorithm=grpo", *overrides), rows)


def examined(*rows, overrides=(), details=None):
    """The warnings of steps with these metrics, a list per step; and their rows."""
    logged = []
    health = health_of(*overrides, rows=logged)
    warnings = []
    for step, row in enumerate(rows, start=1):
        row = row | {"step": float(step)}
        warnings.append([one.text for one in health.examine(row, details or {}, step)])
        logged.append(row)
    return warnings, logged


def found(*rows, overrides=()):
    """The checks that find each step ill."""
    _, logged = examined(*rows, overrides=overrides)
    return [[name.removeprefix("health/") for name in row if "health/" in name] for row in logged]


@pytest.mark.parametrize(
    ("change", "check", "evidence"),
    [
        ({"reward/std": 0.0}, "constant_reward", "every response got the reward 0.4"),
        ({"reward/mixed_fraction": 0.0}, "unmixed_groups", "in 100% of the groups"),
        ({"eval/accuracy_flexible": 0.75}, "wrong_form", "finds 75% of the held-out answers"),
        ({"reward/failed": 3.0}, "failed_rewards", "3 rewards failed"),
        ({"eval/failed": 3.0}, "failed_eval_rewards", "3 rewards of held-out responses"),
        ({"eval/failed": 3.0, "eval/accuracy_flexible": 0.9}, "failed_eval_rewards", "3 rewards"),
        ({"time/score_s": 4.0}, "slow_reward", "40% of the step (4.0 s)"),
        ({"response/truncated_fraction": 0.9}, "truncated", "90% of the responses were cut off"),
        ({"response/unended_fraction": 0.1}, "unended_responses", "10% of the responses end"),
        ({"response/empty_fraction": 0.6}, "empty_responses", "60% of the responses"),
        ({"response/special_fraction": 0.5}, "special_tokens", "50% of the responses contain"),
        ({"response/repeated_fraction": 0.9}, "repeated_responses", "90% more of the pairs"),
        ({"actor/kl": 2.0}, "exploded_kl", "2 nats per token from the reference"),
        ({"actor/ppo_kl": 0.5}, "exploded_ratio", "by 0.5 nats per token"),
        ({"actor/clip_fraction": 0.4}, "clipped_ratio", "the ratio of 40% of the tokens"),
        ({"actor/log_ratio_max": 1e-5}, "still_policy", "by more than 1e-05"),
        ({"actor/grad_norm": 11.0}, "clipped_gradient", "has norm 11 and is cut to"),
        ({"actor/lr": 0.0}, "no_learning_rate", "the actor's learning rate is 0"),
        ({"critic/lr": 0.0}, "no_learning_rate", "the critic's learning rate is 0"),
        ({"actor/skipped_steps": 2.0}, "skipped_updates", "2 updates of the actor"),
        (
            {"actor/skipped_steps": 1.0, "critic/skipped_steps": 2.0},
            "skipped_updates",
            "not finite; 2 updates of the critic",
        ),
        ({"critic/explained_variance": -2.0}, "blind_critic", "explained variance -2"),
        ({DIFFERENCE: 0.07}, "mismatch", "engine 0 (engine 0) vLLM's log-probs differ"),
        ({"rollout/adapter_share": 0.1}, "missing_adapters", "show 10% of what the adapters"),
        ({"data/unknown_fraction": 0.1}, "unknown_tokens", "10.0% of the prompts' tokens"),
        ({"data/duplicate_fraction": 0.1}, "duplicate_prompts", "10.0% of the training prompts"),
        ({"data/overlap_fraction": 0.01}, "overlap", "1.0% of the held-out prompts"),
        ({"data/no_generation_marker": 1.0}, "no_generation_marker", "has no generation marker"),
    ],
)
def test_a_step_is_ill_by_one_check_with_evidence_and_remedy(change, check, evidence):
    ((warning,),), (row,) = examined(GOOD | change)
    assert warning.startswith(f"step 1, health.{check}: ") and evidence in warning
    assert warning.endswith(CHECKS[check].remedy.replace("{scorer}", "reward function"))
    assert [name for name in row if name.startswith("health/")] == [f"health/{check}"]
    assert row[f"health/{check}"] == 1.0


def test_fp8_weights_may_differ_more():
    rows = [GOOD | {DIFFERENCE: difference} for difference in (0.29, 0.31)]
    assert found(*rows, overrides=("rollout.weights=fp8",)) == [[], ["mismatch"]]


@pytest.mark.parametrize(
    ("rows", "check", "evidence"),
    [
        (
            [
                GOOD,
                GOOD | {"eval/accuracy": 0.3, "eval/accuracy_flexible": 0.3, "reward/mean": 0.6},
            ],
            "fallen_accuracy",
            "fell from 0.500 (step 1) to 0.300, while the training reward rose from 0.4 to 0.6",
        ),
        # After a warm-up of the critic, which has no entropy.
        (
            [GOOD | {"actor/entropy": None}] * 101 + [GOOD, GOOD | {"actor/entropy": 0.04}],
            "collapsed_entropy",
            "fell from 0.5 to 0.04",
        ),
        ([GOOD, GOOD | {"actor/entropy": 2.0}], "exploded_entropy", "rose from 0.5 to 2"),
        ([GOOD, GOOD | {"actor/kl": 0.0}], "frozen_actor", "still equals the reference"),
        ([GOOD, GOOD | {DIFFERENCE: 0.005}], "stale_policy", "in the first step by 1e-06"),
        ([SLOW, SLOW], "slow_engine", "engine 0 (engine 0) sampled 1,000 tokens/s"),
        (
            [GOOD | {"critic/explained_variance": -0.1}] * 20,
            "blind_critic",
            "in 20 steps the critic explained nothing",
        ),
    ],
)
def test_checks_compare_with_earlier_steps(rows, check, evidence):
    warnings, _ = examined(*rows)
    assert not any(warnings[:-1])
    assert warnings[-1][0].startswith(f"step {len(rows)}, health.{check}: ")
    assert evidence in warnings[-1][0]


def test_healthy_steps_raise_nothing():
    at_limits = GOOD | {"response/truncated_fraction": 0.75, "reward/mixed_fraction": 0.01}
    first = GOOD | {"actor/kl": 0.0}
    # Equal rewards, then skipped updates: the policy is still the reference.
    untrained = [first | {"actor/grad_norm": norm} for norm in (0.0, math.nan)]
    solved = GOOD | {"reward/mean": 0.9, "actor/entropy": 0.01, "eval/accuracy": 0.9}
    again = {"eval/accuracy": 0.8, "eval/ci95": 0.1, "eval/failed": 0.0}
    uncounted = GOOD | {"actor/entropy": math.nan}
    rest = [again, {}, SLOW | {"eval/accuracy": None}, GOOD | again, SLOW | again]
    assert found(*untrained, first, GOOD, uncounted, at_limits, solved, *rest) == [[]] * 12


def test_one_update_a_step_does_not_move_its_own_ratio():
    still = GOOD | {"actor/log_ratio_max": 0.0}
    assert found(still) == [["still_policy"]]
    assert found(still, overrides=["actor.mini_batch_size=512"]) == [[]]


def test_gspo_clips_more_tokens():
    assert found(GOOD | {"actor/clip_fraction": 0.4}, overrides=["algorithm=gspo"]) == [[]]


def test_groups_matter_only_where_they_are_compared():
    assert found(UNMIXED) == [["unmixed_groups"]]
    ((warning,),), _ = examined(UNMIXED, overrides=["algorithm=dapo"])
    assert "algorithm=dapo" not in warning
    assert found(UNMIXED, overrides=["algorithm=ppo"]) == [[]]
    assert found(CONSTANT) == found(CONSTANT, overrides=["algorithm=ppo"]) == [["constant_reward"]]


def test_a_large_constant_reward_is_constant_up_to_rounding():
    assert found(CONSTANT | {"reward/mean": 1e6, "reward/std": 0.1}) == [["constant_reward"]]


def test_a_warning_returns_only_when_it_persists():
    warnings, _ = examined(*[CONSTANT] * 12, GOOD, *[CONSTANT] * 10)
    assert [step for step, texts in enumerate(warnings, start=1) if texts] == [1, 10, 23]
    assert warnings[9][0].startswith("step 10, health.constant_reward for 10 steps now:")


def test_a_resumed_run_does_not_repeat_what_it_said():
    _, rows = examined(CONSTANT)
    health = health_of(rows=rows)
    assert health.examine(CONSTANT | {}, {}, 2) == []


def test_failures_are_counted_at_each_step():
    warnings, _ = examined(*[GOOD | {"eval/failed": 1.0}] * 3)
    assert [len(texts) for texts in warnings] == [1, 1, 1]


def test_thresholds_come_from_the_config_and_null_turns_a_check_off():
    cut = GOOD | {"response/truncated_fraction": 0.5}
    assert found(cut) == [[]]
    assert found(cut, overrides=["health.truncated=0.4"]) == [["truncated"]]
    assert found(CONSTANT, overrides=["health.constant_reward=null"]) == [["unmixed_groups"]]


@pytest.mark.parametrize(
    ("environment", "scorer"),
    [("calculator_agent", "program"), ("calculator", "environment"), ("none", "reward function")],
)
def test_failed_rewards_name_what_gives_them(environment, scorer):
    failed = GOOD | {"reward/failed": 3.0, "eval/failed": 3.0}
    (warnings,), _ = examined(failed, overrides=(f"environment={environment}",))
    assert [f"Correct the {scorer} for" in warning for warning in warnings] == [True, True]


def test_more_evidence_is_asked_for_only_when_a_check_warns():
    asked = []
    details = {name: lambda name=name: asked.append(name) or "there" for name in CHECKS}
    ((warning,), _), _ = examined(GOOD | {"actor/kl": 2.0}, GOOD, details=details)
    assert "from the reference: there.\n" in warning and asked == ["exploded_kl"]


def test_every_check_has_its_threshold_and_its_line_in_the_docs():
    thresholds = yaml.safe_load((CONF / "health" / "default.yaml").read_text())
    assert [*CHECKS] == [*thresholds] == [field.name for field in fields(HealthConfig)]
    page = (Path(CONF).parent / "docs" / "health.md").read_text()
    assert re.findall(r"^\| `(\w+)`", page, re.MULTILINE) == [*CHECKS]


def test_every_check_has_a_fault_in_the_slow_suite():
    source = Path(test_health_slow.__file__).read_text()
    others = re.findall(r'check\(tmp_path / "run", "(\w+)"', source)
    faults = [check for check, _ in test_health_slow.FAULTS.values()] + others
    assert {*faults} == {*CHECKS} and len(faults) >= 30


def test_remedies_name_keys_that_exist():
    known = {*leaves(composed(["+recipe=gsm8k_ppo", "hardware=cpu"]))}
    sections = {key.partition(".")[0] for key in known}
    text = " ".join(check.remedy for check in CHECKS.values())
    named = set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", text))
    keys = {key for key in named if key.partition(".")[0] in sections and ".j" not in key}
    assert len(keys) > 10 and keys <= known | {"reward.args", "data.eval_files"}, keys - known


def responses(rows, probabilities, groups):
    """A batch of responses with these tokens and probabilities."""
    tokens = Ragged.from_rows(rows, torch.int32)
    per_token = [
        torch.full((len(row),), p).log() / len(row)
        for row, p in zip(rows, probabilities, strict=True)
    ]
    return replace(
        batch_of([*map(len, rows)]),
        responses=tokens,
        response_mask=tokens.like(torch.ones(len(tokens.values), dtype=torch.bool)),
        rollout_log_probs=tokens.like(torch.cat(per_token)),
        group_id=torch.tensor(groups),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
    )


def test_repeated_responses_hand_worked():
    """Of six pairs two are equal, and 1.5 expected; two standard errors are twice the excess."""
    rows = [[1, 7], [1, 7], [2, 3, 7], [2, 3, 7]]
    assert repeated(responses(rows, [0.25] * 4, [0] * 4)) == pytest.approx((0.5 - 1) / 6)
    assert repeated(responses(rows, [0.25] * 4, [0, 0, 1, 1])) == pytest.approx(
        (1.5 - 1.5 * 2**0.5) / 2
    )
    assert repeated(responses(rows, [0.25] * 4, [0, 1, 2, 3])) is None


def test_independent_samples_are_not_repeated_ones():
    """Six answers of very different probability, drawn a thousand times for each of 20 prompts."""
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.05])
    drawn = p.multinomial(20_000, replacement=True, generator=generator).tolist()
    groups = [k // 1000 for k in range(20_000)]
    share = repeated(responses([[k] for k in drawn], p[drawn].tolist(), groups))
    assert -0.02 < share < 0


def test_measures_of_responses_hand_worked():
    rows = [[7], [1, 7], [1, 8, 7], [1, 2]]
    batch = responses(rows, [0.5] * 4, [0, 0, 1, 1])
    assert response_measures(batch, TOKENS) == {
        "response/empty_fraction": 0.25,
        "response/unended_fraction": 0.25,
        "response/special_fraction": 0.25,
        "response/repeated_fraction": pytest.approx((-1 - 2 * 0.5**0.5) / 2),
    }
    cut = replace(batch, truncated=torch.tensor([False, False, False, True]))
    assert response_measures(cut, TOKENS)["response/unended_fraction"] == 0.0
    turns = replace(batch, conversation=ConversationOutcome(*[torch.ones(4)] * 3))
    assert response_measures(turns, TOKENS)["response/unended_fraction"] is None


def test_checks_cost_below_one_percent_of_a_step():
    """A step of a million tokens takes 30 s on a fast GPU: benchmarks/RESULTS.md."""
    batch = responses([[*range(10, 1010)]] * 1024, [0.5] * 1024, [k // 8 for k in range(1024)])
    rows = [GOOD | {"step": float(step)} for step in range(1000)]
    start = time.process_time()
    health, row = health_of(rows=rows), dict(GOOD)
    health.examine(row | response_measures(batch, TOKENS), {}, 1001)
    assert time.process_time() - start < 0.3


def test_the_tokens_that_carry_a_distance_are_named():
    batch = responses([[1, 7], [2, 3, 7]], [1.0, 1.0], [0, 1])
    other = batch.responses.like(torch.tensor([0.0, 1.0, 0.0, -8.0, 0.5]))
    text = carriers(batch, batch.rollout_log_probs, other, lambda rows: [f"t{rows[0][0]}"])
    assert text == (
        "most in 't3' (response 1, token 1: 8 nats), 't7' (response 0, token 1: 1 nats), 't7' "
        "(response 1, token 2: 0.5 nats)"
    )


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
MARKER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
MISTRAL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "lacks"),
    [(CHATML, True), (CHATML + MARKER, False), (MISTRAL, False), (None, False)],
    ids=["ChatML without marker", "ChatML", "Mistral", "no template"],
)
def test_a_template_lacks_a_marker_where_prompts_end_before_the_turn(tmp_path, template, lacks):
    folder = model_folder(tmp_path, ["What is 1 ?"], template=template)
    assert Renderer(load_tokenizer(model_config(folder))).lacks_marker == lacks


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


def test_a_row_with_the_same_answer_is_no_wrong_answer_to_compare_with():
    """As where a file is sorted by its labels."""
    asked = [prompt(answer) for answer in ("1", "1", "1", "2")]
    config = run_config("reward.args.mode=flexible", "reward.num_processes=1")
    assert "  answers of other problems: mean 0.000, from 0 to 0" in _reward_lines(asked, config)


def test_a_row_without_an_answer_has_no_line_and_empty_answers_alone():
    bare = replace(prompt(""), example={"question": "How many?"})
    found = said("hybridrl.rewards.none.score", bare)
    assert found.notes == found.warnings == []
    config = run_config("reward=format", "reward.num_processes=1")
    kinds = [line.partition(":")[0] for line in _reward_lines([bare], config)]
    assert kinds == ["reward", "  empty answers"]


def test_calls_of_a_reward_are_counted_before_they_are_made():
    """Other forms of the answer are tried only if it earns nothing: 96 calls, not 224."""
    asked = [prompt(str(number)) for number in range(32)]
    for mode, form in (("flexible", None), ("strict", "'#### 0'")):
        config = run_config(f"reward.args.mode={mode}", "reward.num_processes=1")
        lines = _reward_lines(asked, config)
        told = next(lines)
        assert told == "reward: hybridrl.rewards.gsm8k.score, called for 96 to 192 texts"
        rest = list(lines)
        assert rest[0] == "  reference answers: mean 1.000, from 1 to 1"
        assert len(rest) == 3 + bool(form) and (form or "") in rest[-1]


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
