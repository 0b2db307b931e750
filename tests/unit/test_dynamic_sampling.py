"""Resampling of prompts from which nothing is learned, greedy baselines, overlong shaping.

Responses here are a function of prompt and sample, so that every reward is known beforehand.
"""

import pytest
import torch

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.sources.prompts import Prompt
from hybridrl.processes.messages import Failure, FailureKind
from hybridrl.rewards.scorer import ScoreResult
from hybridrl.trainer.episodes.base import Wanted
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.factory import open_source
from hybridrl.trainer.rewarding import (
    FunctionRewards,
    Rewarded,
    baseline_rewards,
    overlong_shaping,
)
from tests.support.run_configs import run_config
from tests.support.sampling_fakes import decode, generate, prompt, source_parts

EACH = 2


def config(rounds: int = 3, prompts: int = 4, advantage: str = "gae"):
    return run_config(
        f"algorithm.advantage={advantage}",
        f"data.prompts_per_step={prompts}",
        f"rollout.responses_per_prompt={EACH}",
        f"actor.mini_batch_size={prompts * EACH}",
        f"algorithm.max_sampling_rounds={rounds}",
    )


class Source:
    """Prompts 0, 1, 2, ... and how many were asked for at a time."""

    def __init__(self) -> None:
        self.next = 0
        self.asked: list[int] = []

    def take(self, count: int) -> list[Prompt]:
        self.asked.append(count)
        self.next += count
        return [prompt(number) for number in range(self.next - count, self.next)]


class Scorer:
    """Rewards by prompt and sample; which prompts teach something is said beforehand."""

    def __init__(self, mixed: set[int]) -> None:
        self.mixed = mixed

    def score(self, items):
        pairs = [tuple(map(int, text.split()[:2])) for _, text, *_ in items]
        scores = [float(sample % 2) if n in self.mixed else 1.0 for n, sample in pairs]
        return ScoreResult(scores, [])


def sampled(mixed: set[int]):
    source, rewarder = Source(), FunctionRewards(decode, Scorer(mixed))
    parts = source_parts(config(), source.take, generate, rewarder)
    return open_source(parts).take(step=1), source


def numbers(result) -> list[int]:
    return [p.prompt_id for p in result.prompts[::EACH]]


def test_prompts_that_teach_nothing_are_replaced_by_the_next_ones():
    result, source = sampled(mixed={1, 3, 4, 6})
    # 0..3: 1 and 3 stay; 4, 5: 4 stays; 6
    assert source.asked == [4, 2, 1]
    assert numbers(result) == [1, 3, 4, 6]
    assert "loss_mask" not in result.batch.added
    assert result.metrics == {
        "sampling/rounds": 3.0,
        "sampling/prompts": 7.0,
        "sampling/mixed_fraction": 4 / 7,
        "sampling/unmixed_prompts": 0.0,
        "sampling/reward_mean": (4 * 1 + 3 * 2) / 14,
    }


def test_engines_are_timed_over_all_rounds():
    result, _ = sampled(mixed={1, 3, 4, 6})
    first, second = result.batch.engines
    # Samples 0 and 1 have 5 tokens, 2 and 3 have 6, 4 and 5 have 7.
    assert first.tokens + second.tokens == 4 * 5 + 2 * 6 + 7
    # The last round has one prompt, which one engine samples.
    assert (first.seconds, first.first_token_s, second.seconds) == (6.0, 0.5, 4.0)


def test_one_round_scores_nothing_while_sampling():
    source = Source()
    rewarder = FunctionRewards(decode, Scorer(set()))
    result = open_source(source_parts(config(rounds=1), source.take, generate, rewarder)).take(1)
    assert result.rewarded is None and numbers(result) == [0, 1, 2, 3]
    assert result.greedy is None and result.metrics == {}


def test_a_greedy_baseline_is_the_same_for_all_responses_to_a_prompt():
    source, rewarder = Source(), FunctionRewards(decode, Scorer({2}))
    remax = config(rounds=1, prompts=3, advantage="remax")
    requests: list[Wanted] = []

    def noting(request: Wanted) -> RolloutBatch:
        requests.append(request)
        return generate(request)

    source.next = 1
    result = open_source(source_parts(remax, source.take, noting, rewarder)).take(1)
    sampled, greedy = requests
    assert (sampled.params.temperature, sampled.each) == (1.0, EACH)
    assert (greedy.params.temperature, greedy.each) == (0.0, 1)
    shaped = run_config("algorithm.overlong.buffer_tokens=4", "algorithm.overlong.penalty=0.5")
    shaped.rollout.max_response_tokens = 4  # a greedy response has 2: (4 - 4 - 2) / 4 * 0.5
    rewards = baseline_rewards(shaped, rewarder, result.prompts, result.greedy)
    assert rewards.tolist() == [0.75, 0.75, -0.25, -0.25, 0.75, 0.75]


def test_rewards_of_some_rows_keep_their_failures():
    failure = Failure(2, FailureKind.error, "", "")
    rewarded = Rewarded(["a", "b", "c"], [1.0, 2.0, 3.0], [failure], {"x": [0.5]})
    kept = Rewarded.joined([(rewarded, [2, 0])])
    assert kept.texts == ["c", "a"] and kept.scores == [3.0, 1.0]
    assert [f.index for f in kept.failures] == [0]
    assert Rewarded.joined([(rewarded, [0, 1])]).failures == []
    both = Rewarded.joined([(rewarded, [0, 1, 2]), (kept, [0, 1])])
    assert both.scores == [1.0, 2.0, 3.0, 3.0, 1.0]
    assert [f.index for f in both.failures] == [2, 3]
    assert both.parts == {"x": [0.5, 0.5]}


def test_a_step_ends_the_run_if_the_rewards_of_all_episodes_failed():
    """The first episode has two sequences, and one reward."""
    failures = [Failure(row, FailureKind.error, "x", "") for row in (1, 2)]
    rewarded = Rewarded([""] * 3, [0.0] * 3, failures)
    with pytest.raises(RunStopped, match="all 2 rewards failed"):
        rewarded.stop_if_all_failed(1, 2)
    rewarded.stop_if_all_failed(1, 3)


def test_overlong_shaping_by_config():
    lengths = torch.tensor([20, 38, 48])
    assert overlong_shaping(run_config(), lengths).tolist() == [0.0, 0.0, 0.0]
    shaped = run_config("algorithm.overlong.buffer_tokens=20", "algorithm.overlong.penalty=0.5")
    assert shaped.rollout.max_response_tokens == 48
    assert overlong_shaping(shaped, lengths).tolist() == pytest.approx([0.0, -0.25, -0.5])
