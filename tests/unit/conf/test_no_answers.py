"""data.answer_key=null, rows without an answer: each part that reads one is refused by name."""

import pytest

from tests.support.composing import examined, named

BASE = ["hardware=cpu", "algorithm=grpo", "data.answer_key=null"]
NO_RULE = "~eval.rules.flexible"
JUDGE = ["reward=judge", "reward.args.model=m"]
READERS = [
    (["reward=gsm8k", NO_RULE], "reward"),
    (["reward=math", NO_RULE], "reward"),
    (["reward=gsm8k_form", NO_RULE], "reward"),
    (["reward.function=[hybridrl.rewards.gsm8k.score,hybridrl.rewards.none.score]"], "reward"),
    ([*JUDGE, NO_RULE], "reward"),
    (["reward=format"], "eval.rules.flexible"),
    (["environment=calculator", NO_RULE], "environment"),
    (["+recipe=calculator_agent", NO_RULE], "agent"),
]


@pytest.mark.parametrize(("overrides", "key"), READERS, ids=lambda value: str(value)[:30])
def test_what_reads_an_answer_is_refused_with_what_to_type(overrides, key):
    found = examined([*BASE, *overrides]).report.problems
    (problem,) = [problem for problem in found if problem.id == "no_answers"]
    assert problem.key == f"{key}.function" and "data.answer_key=<" in problem.remedy
    assert f"'~{key}'" in problem.remedy or key in ("reward", "environment", "agent")


@pytest.mark.parametrize(
    "overrides",
    [
        ["reward=format", NO_RULE],
        [*JUDGE, "reward.args.template='Grade {question} {response}'", NO_RULE],
        ["reward=none", "reward_model=default", "reward_model.model.path=rm", NO_RULE],
        ["reward=gsm8k_form", "~reward.args.parts.correct", NO_RULE],
        ["reward=gsm8k_form", "reward.args.parts.correct=null", NO_RULE],
    ],
)
def test_other_parts_need_none(overrides):
    assert "no_answers" not in dict(named(*BASE, *overrides))


def test_a_function_for_verl_needs_one_if_it_takes_one(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def reads(data_source, solution_str, ground_truth): return 0\n"
        "def looks(data_source, solution_str, ground_truth=None): return 0\n"
    )
    for name, count in (("reads", 1), ("looks", 0)):
        found = named(*BASE, f"reward.function={file}:{name}")
        assert found.count(("no_answers", "reward.function")) == count, found


def test_examples_and_fine_tuning_need_solutions():
    more = ["reward=format", NO_RULE]
    for overrides in (["data.few_shot=2"], ["algorithm=sft"]):
        found = examined([*BASE, *overrides, *more]).report.problems
        (problem,) = [problem for problem in found if problem.id == "no_solutions"]
        assert "data.solution_key=<" in problem.remedy
        given = named(*BASE, *overrides, *more, "data.solution_key=worked")
        assert not {"no_solutions", "no_answers"} & {*dict(given)}


def test_one_data_set_without_answers_counts():
    parts = [
        "+data.mixture.sums={weight: 1, name: embedded/steps_1, answer_key: answer}",
        "+data.mixture.chats={weight: 1, name: embedded/steps_2}",
    ]
    assert named(*BASE, NO_RULE, *parts) == [("no_answers", "reward.function")]
    own = ["data.mixture.chats.answer_key=answer"]
    assert not examined([*BASE, *parts, "+" + own[0]]).report.problems
