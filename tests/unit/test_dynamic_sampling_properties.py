"""Dynamic sampling of random outcomes: which groups are in the batch, which count, how many rounds.

A group is the responses to one prompt in one round; a mixed one has two different rewards.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.data.batch import RolloutBatch
from hybridrl.rewards.scorer import ScoreResult
from hybridrl.trainer.episodes.base import Wanted
from hybridrl.trainer.factory import open_source
from hybridrl.trainer.rewarding import FunctionRewards
from hybridrl.trainer.sampling.source import StepSource
from tests.support.run_configs import run_config
from tests.support.sampling_fakes import decode, generate, prompt, source_parts

Group = tuple[int, int]  # prompt, first sample


@cache
def plain_config():
    return run_config("algorithm.max_sampling_rounds=2")


def config(wanted: int, each: int, rounds: int):
    plain = plain_config()
    return replace(
        plain,
        data=replace(plain.data, prompts_per_step=wanted),
        rollout=replace(plain.rollout, responses_per_prompt=each),
        algorithm=replace(plain.algorithm, max_sampling_rounds=rounds),
    )


class Chance:
    """Outcomes by seed, prompt and sample alone, and a record of what was asked for.

    Prompts come in turn and, once all were taken, again.
    """

    def __init__(self, seed: int, solved: float, pool: int, each: int) -> None:
        self.seed, self.solved, self.pool, self.each = seed, solved, pool, each
        self.taken = self.scored = 0
        self.rounds: list[list[Group]] = []

    def reward(self, number: int, sample: int) -> float:
        return float(random.Random(f"{self.seed}/{number}/{sample}").random() < self.solved)

    def rewards(self, group: Group) -> list[float]:
        number, first = group
        return [self.reward(number, first + i) for i in range(self.each)]

    def is_mixed(self, group: Group) -> bool:
        return len(set(self.rewards(group))) > 1

    def take(self, count: int):
        self.taken += count
        return [prompt(number % self.pool) for number in range(self.taken - count, self.taken)]

    def generate(self, wanted: Wanted) -> RolloutBatch:
        self.rounds.append([(prompt.prompt_id, wanted.first) for prompt in wanted.prompts])
        return generate(wanted)

    def score(self, items):
        pairs = [tuple(map(int, text.split()[:2])) for _, text, *_ in items]
        self.scored += len(pairs)
        scores = [self.reward(number, sample) for number, sample in pairs]
        return ScoreResult(scores, [])


def source(wanted: int, each: int, bound: int, chance: Chance) -> StepSource:
    rewards = FunctionRewards(decode, chance)
    asked = config(wanted, each, bound)
    return open_source(source_parts(asked, chance.take, chance.generate, rewards))


def groups_of(batch, each: int) -> list[Group]:
    """By the responses' own tokens, which say prompt and sample."""
    rows = [tuple(row.tolist()[:2]) for row in batch.responses.rows()]
    groups = [rows[start : start + each] for start in range(0, len(rows), each)]
    for group in groups:
        assert group == [(group[0][0], group[0][1] + i) for i in range(each)]
    return [group[0] for group in groups]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    solved=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    wanted=st.integers(1, 6),
    each=st.integers(2, 4),
    bound=st.integers(2, 5),
    spare=st.integers(0, 10),
)
def test_every_mixed_group_is_in_the_batch_once_and_counts(
    seed, solved, wanted, each, bound, spare
):
    chance = Chance(seed, solved, wanted + spare, each)
    result = source(wanted, each, bound, chance).take(step=1)
    batch = result.batch
    found = groups_of(batch, each)
    asked = [group for of_round in chance.rounds for group in of_round]
    mixed = [group for group in asked if chance.is_mixed(group)]

    assert len(found) == len(set(found)) == wanted
    rest = [group for group in found if not chance.is_mixed(group)]
    assert found == mixed + rest
    assert set(rest) <= set(chance.rounds[-1])
    of_groups = batch.group_id.view(-1, each)
    assert (of_groups == of_groups[:, :1]).all() and len(of_groups.unique()) == wanted

    counts = [chance.is_mixed(group) for group in found for _ in range(each)]
    if "loss_mask" not in batch.added:
        assert not rest
    else:
        assert [bool(row.any()) for row in batch.loss_mask.rows()] == counts
        assert [bool(row.all()) for row in batch.loss_mask.rows()] == counts

    assert result.rewarded.scores == [r for group in found for r in chance.rewards(group)]
    pairs = [(number, first + i) for number, first in found for i in range(each)]
    assert [p.prompt_id for p in result.prompts] == [number for number, _ in pairs]
    assert [row.tolist() for row in batch.prompts.rows()] == [[number, 0] for number, _ in pairs]
    texts = [text.split()[:2] for text in result.rewarded.texts]
    assert texts == [[str(number), str(sample)] for number, sample in pairs]
    assert chance.scored == len(asked) * each
    assert result.metrics == pytest.approx(
        {
            "sampling/rounds": len(chance.rounds),
            "sampling/prompts": len(asked),
            "sampling/mixed_fraction": len(mixed) / len(asked),
            "sampling/unmixed_prompts": len(rest),
            "sampling/reward_mean": sum(r for g in asked for r in chance.rewards(g))
            / (len(asked) * each),
        }
    )


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    solved=st.sampled_from([0.0, 0.2, 0.5]),
    wanted=st.integers(1, 6),
    bound=st.integers(2, 5),
)
def test_each_round_asks_for_what_is_missing_and_the_bound_is_kept(seed, solved, wanted, bound):
    chance = Chance(seed, solved, 100, each=2)
    source(wanted, 2, bound, chance).take(step=1)
    missing = wanted
    for index, of_round in enumerate(chance.rounds):
        assert len(of_round) == missing
        assert {first for _, first in of_round} == {2 * index}
        missing -= sum(map(chance.is_mixed, of_round))
    assert len(chance.rounds) <= bound
    assert missing == 0 or len(chance.rounds) == bound
