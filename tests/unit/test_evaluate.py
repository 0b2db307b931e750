"""Evaluator: every rule, greedy decoding and tagged groups on hand-made responses."""

from dataclasses import replace

import pytest
import torch

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import Prompt
from hybridrl.rewards.scorer import ScoreResult
from hybridrl.trainer.episodes.base import Wanted
from hybridrl.trainer.evaluate import MAX_TAG_VALUES, Evaluator, tag_groups
from hybridrl.trainer.rewarding import FunctionRewards
from tests.support.batches import batch_of


class Contains:
    """Scores 1 where a word stands in the response; notes what it was asked."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.items: list = []

    def score(self, items):
        self.items = list(items)
        scores = [float(self.word in response) for _, response, *_ in items]
        return ScoreResult(scores, ["no word"] if not self.word else [])


def prompt(index: int, **tags: str) -> Prompt:
    return Prompt(100 + index, [index, index], f"text {index}", "", {"answer": str(index)}, tags)


PROMPTS = [
    prompt(0, range="seen", steps="1"),
    prompt(1, range="unseen", steps="1"),
    prompt(2, range="seen", steps="2"),
    prompt(3, range="unseen", steps="2"),
]
# Responses as token ids; the decoder below reads 1 as "#### " and 2 as "right".
SAMPLED = [[1, 2], [2, 0, 0], [1], [1, 2, 0]]
GREEDY = [[1, 2], [1, 2], [1, 2], [0]]
# Two more samples of each prompt.
FURTHER = [[0], [0], [2], [0], [0], [1, 2], [0], [0]]


def decode(rows: list[list[int]]) -> list[str]:
    return ["".join({0: "well ", 1: "#### ", 2: "right"}[token] for token in row) for row in rows]


class Engine:
    """Answers with the prepared responses and notes the requests."""

    def __init__(self) -> None:
        self.requests: list[Wanted] = []

    def __call__(self, wanted: Wanted) -> RolloutBatch:
        self.requests.append(wanted)
        rows = GREEDY if wanted.params.temperature == 0 else SAMPLED
        if wanted.each > 1:
            rows = FURTHER
        batch = batch_of([len(row) for row in rows])
        responses = Ragged.from_rows(rows, torch.int64)
        truncated = torch.tensor([False] * (len(rows) - 1) + [True])
        return replace(batch, responses=responses, truncated=truncated)


def evaluator(
    greedy: bool = True, flexible: str = "right", samples: int = 1, top_k: int | None = None
) -> Evaluator:
    return Evaluator(
        PROMPTS,
        FunctionRewards(decode, Contains("#### right")),
        {"flexible": Contains(flexible)},
        temperature=0.7,
        top_p=0.9,
        greedy=greedy,
        top_k=top_k,
        samples=samples,
    )


def test_accuracies_by_rule_group_and_decoding():
    metrics = evaluator().evaluate(10, Engine()).metrics
    # Sampled: strict right on prompts 0 and 3; flexible also on 1. Greedy: all but prompt 3.
    assert metrics == {
        "eval/accuracy": 0.5,
        "eval/accuracy_flexible": 0.75,
        "eval/accuracy_seen": 0.5,
        "eval/accuracy_seen_flexible": 0.5,
        "eval/accuracy_unseen": 0.5,
        "eval/accuracy_unseen_flexible": 1.0,
        "eval/accuracy_steps_1": 0.5,
        "eval/accuracy_steps_1_flexible": 1.0,
        "eval/accuracy_steps_2": 0.5,
        "eval/accuracy_steps_2_flexible": 0.5,
        "eval/accuracy_greedy": 0.75,
        "eval/accuracy_greedy_flexible": 0.75,
        # Wilson's intervals: 2 of 4 are in 0.15 to 0.85, 3 of 4 in 0.3006 to 0.9544.
        "eval/ci95": pytest.approx(0.35, abs=1e-4),
        "eval/ci95_flexible": pytest.approx(0.75 - 0.3006, abs=1e-4),
        "eval/ci95_greedy": pytest.approx(0.75 - 0.3006, abs=1e-4),
        "eval/ci95_greedy_flexible": pytest.approx(0.75 - 0.3006, abs=1e-4),
        "eval/length_mean": pytest.approx(9 / 4),
        "eval/truncated_fraction": 0.25,
        "eval/failed": 0.0,
    }


def test_failed_judgements_are_counted():
    failing = evaluator(flexible="")  # this rule fails once each time it is asked
    assert failing.evaluate(10, Engine()).metrics["eval/failed"] == 2.0  # sampled and greedy


def test_requests_are_sampled_as_in_training_then_greedy():
    engine = Engine()
    evaluator(top_k=5).evaluate(10, engine)
    sampled, greedy = engine.requests
    assert (sampled.params.top_k, greedy.params.top_k) == (5, None)
    assert (sampled.params.temperature, sampled.params.top_p) == (0.7, 0.9)
    assert (greedy.params.temperature, greedy.params.top_p) == (0.0, 1.0)
    for request in engine.requests:
        assert request.step == 10
        assert (request.each, request.first) == (1, 0)
        assert request.prompts == PROMPTS


def test_the_best_of_several_samples_counts_before_and_after_training():
    engine = Engine()
    metrics = evaluator(greedy=False, samples=3).evaluate(0, engine, is_end=True).metrics
    # Right are prompts 0 and 3 at first, and 2 by its second further sample.
    assert metrics["eval/accuracy_best_of_3"] == 0.75
    assert metrics["eval/ci95_best_of_3"] == pytest.approx(0.75 - 0.3006, abs=1e-4)
    one, further = engine.requests
    assert (one.each, further.each) == (1, 2)
    assert further.first == 1
    assert (further.params.temperature, further.params.top_p) == (0.7, 0.9)
    between = evaluator(greedy=False, samples=3).evaluate(5, engine).metrics
    assert {**between, "eval/accuracy_best_of_3": 0.75}.keys() < metrics.keys()
    assert len(engine.requests) == 3


def test_greedy_decoding_can_be_left_out():
    engine = Engine()
    metrics = evaluator(greedy=False).evaluate(0, engine).metrics
    assert len(engine.requests) == 1
    assert not [name for name in metrics if "greedy" in name]


def test_scorers_get_prompt_response_and_example():
    scorer = Contains("right")
    judge = Evaluator(
        PROMPTS, FunctionRewards(decode, scorer), {}, temperature=1.0, top_p=1.0, greedy=False
    )
    evaluation = judge.evaluate(0, Engine())
    assert scorer.items[0][:3] == ("text 0", "#### right", {"answer": "0"})
    assert evaluation.accuracy == 0.75


def test_tags_with_one_or_many_values_make_no_groups():
    prompts = [prompt(i, name=str(i), source="same") for i in range(MAX_TAG_VALUES + 1)]
    assert tag_groups(prompts, taken=set()) == {}


def test_group_whose_name_is_taken_gets_its_tag():
    prompts = [prompt(0, kind="greedy"), prompt(1, kind="plain"), prompt(2)]
    groups = tag_groups(prompts, taken={"greedy"})
    assert groups == {"kind_greedy": [0], "plain": [1]}
