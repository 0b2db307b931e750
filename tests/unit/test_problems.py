"""Embedded problems: solutions that add up, a split that holds, ranges, determinism, balance."""

import json
import re
import subprocess
import sys
from collections import Counter

from hybridrl.data.sources import problems

TRAIN = problems.train_problems()
HELD_OUT = problems.held_out_problems()
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def numbers_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_every_step_is_true_and_the_last_result_is_the_answer():
    for problem in TRAIN + HELD_OUT:
        *steps, last = problem["answer"].split("\n")
        result = None
        for step in steps:
            match = STEP.fullmatch(step)
            assert match, step
            left, sign, right, result = match.groups()
            # Multiplied out, so that whole-number division is checked as well.
            assert {
                "+": int(left) + int(right) == int(result),
                "-": int(left) - int(right) == int(result),
                "*": int(left) * int(right) == int(result),
                "/": int(left) == int(result) * int(right),
            }[sign], step
        assert last == f"#### {result}"
        assert len(steps) == int(problem["tags"]["steps"])


def test_every_number_of_the_question_is_used_in_the_solution():
    for problem in TRAIN + HELD_OUT:
        missing = Counter(numbers_of(problem["question"])) - Counter(numbers_of(problem["answer"]))
        assert not missing, problem


def test_held_out_questions_are_never_trained_on():
    held_out = {problem["question"] for problem in HELD_OUT}
    others = {p["question"] for seed in (1, 2) for p in problems.train_problems(4096, seed)}
    assert not held_out & ({problem["question"] for problem in TRAIN} | others)
    assert all(problems.is_held_out(question) for question in held_out)


def test_questions_are_distinct():
    assert len({problem["question"] for problem in TRAIN}) == len(TRAIN) == problems.NUM_TRAIN
    assert len({problem["question"] for problem in HELD_OUT}) == len(HELD_OUT) == 320


def test_unseen_problems_hold_a_number_no_training_question_has():
    trained = {number for problem in TRAIN for number in numbers_of(problem["question"])}
    unseen = [problem for problem in HELD_OUT if problem["tags"]["range"] == "unseen"]
    assert len(unseen) == 64
    assert all(set(numbers_of(problem["question"])) - trained for problem in unseen)
    seen = [problem for problem in HELD_OUT if problem["tags"]["range"] == "seen"]
    assert all(set(numbers_of(problem["question"])) <= trained for problem in seen)


def test_templates_and_steps_are_all_there():
    counts = Counter(problem["tags"]["template"] for problem in TRAIN)
    assert len(counts) >= 12
    assert counts.keys() == {problem["tags"]["template"] for problem in HELD_OUT}
    assert min(counts.values()) > 0.02 * len(TRAIN)
    assert {problem["tags"]["steps"] for problem in TRAIN} == {"1", "2", "3"}


def test_a_seed_gives_the_same_problems_in_another_process():
    code = (
        "import json, sys; from hybridrl.data.sources import problems;"
        "drawn = problems.train_problems(20, seed=7) + problems.held_out_problems()[:20];"
        "assert 'torch' not in sys.modules;"
        "print(json.dumps([[p['question'], p['answer']] for p in drawn]))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    here = problems.train_problems(20, seed=7) + problems.held_out_problems()[:20]
    assert json.loads(out.stdout) == [[p["question"], p["answer"]] for p in here]


def test_another_seed_gives_other_problems():
    first, second = problems.train_problems(50, seed=1), problems.train_problems(50, seed=2)
    assert {p["question"] for p in first} != {p["question"] for p in second}
