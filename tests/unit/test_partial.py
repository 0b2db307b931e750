"""Partial rollouts on simulated engines: no token is lost or too old, lengths have no bias."""

import math
from itertools import cycle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.data.requests import Request
from hybridrl.trainer.episodes.base import Generator
from hybridrl.trainer.episodes.responses import Group, Response
from hybridrl.trainer.episodes.turns import TurnEpisodes, Turns
from hybridrl.trainer.sampling.partial import GroupsInFlight, due
from hybridrl.trainer.sampling.source import StepSource
from hybridrl.trainer.sampling.split import GroupsAhead
from tests.support.fake_engine import FakeEngines
from tests.support.sampling_fakes import in_flight_config, prompt, source_parts

EACH = 2


class Engines(FakeEngines):
    """Engines whose responses have drawn lengths; a response's first token is its number.

    Attributes:
        lengths: of all responses, by number.
        numbers: of responses, by their first seed.
        names, named: names of responses by number, numbers by name.
    """

    def __init__(self, num_engines: int, longest: int) -> None:
        super().__init__(self.script, num_engines)
        self.longest = longest
        self.lengths: list[int] = []
        self.numbers: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.named: dict[str, int] = {}
        self.generator = torch.Generator().manual_seed(3)

    def draw(self) -> int:
        """A log-normal length whose maximum is many times its mean."""
        drawn = math.exp(2 + float(torch.randn((), generator=self.generator)))
        return min(self.longest, max(1, int(drawn)))

    def script(self, request: Request) -> list[int]:
        start = len(request.prompt) - 2
        if not start and request.seed not in self.numbers:
            self.numbers[request.seed] = len(self.lengths)
            self.lengths.append(self.draw())
        number = request.prompt[2] if start else self.numbers[request.seed]
        # A response has one name in all calls, and no other has it.
        assert self.names.setdefault(number, request.request_id) == request.request_id
        assert self.named.setdefault(request.request_id, number) == number
        return [at or number for at in range(start, self.lengths[number])]


def run(
    num_steps,
    *,
    per_step=8,
    in_flight=16,
    max_versions=3,
    num_engines=2,
    longest=200,
    warmup=None,
    prompts=10**6,
):
    """Steps of training on simulated engines: their batches, what is left, and the engines.

    With steps of warm-up, in which the weights do not change, sampling goes on beside training.
    """
    engines = Engines(num_engines, longest)
    bounds = {"max_in_flight": in_flight, "max_versions": max_versions, "keep_kv": True}
    config = in_flight_config(per_step, longest, **bounds)
    numbers = cycle(range(prompts))
    take = lambda count: [prompt(next(numbers)) for _ in range(count)]  # noqa: E731
    trains = lambda step: step > (warmup or 0)  # noqa: E731
    episodes = TurnEpisodes(config.rollout, Turns(), engines.generate)
    generator = Generator(episodes, engines.generate)
    parts = source_parts(
        config, take, generator, engine=engines, rollout=engines, trains_policy=trains
    )
    kind = GroupsInFlight if warmup is None else GroupsAhead
    source = StepSource(kind(parts), parts)
    batches = []
    for step in range(1, num_steps + 1):
        batches.append(source.take(step))
        engines.weight_version += trains(step)
        batches[-1].metrics.update(source.after_update(step))
        if warmup is None or not max_versions:  # the loop moves weights before the next step
            engines.holds = engines.weight_version
    return batches, source.state(), engines


@pytest.mark.parametrize("warmup", [None, 0, 2])
@pytest.mark.parametrize(("num_engines", "prompts"), [(1, 10**6), (2, 10**6), (2, 12)])
def test_every_sampled_token_is_trained_once_with_its_log_prob_and_version(
    num_engines, prompts, warmup
):
    """Also of a data set of fewer prompts than are in flight, which are taken again."""
    sampled, left, engines = run(30, num_engines=num_engines, warmup=warmup, prompts=prompts)
    seen = []
    for step, one in enumerate(sampled):
        batch = one.batch
        assert len(batch) == len(one.prompts) == 8 * EACH
        rows = zip(
            one.prompts,
            batch.prompts.rows(),
            batch.responses.rows(),
            batch.rollout_log_probs.rows(),
            batch.token_versions.rows(),
            strict=True,
        )
        for asked, prompt_ids, tokens, log_probs, versions in rows:
            assert prompt_ids.tolist() == asked.token_ids
            assert tokens[1:].tolist() == list(range(1, len(tokens)))
            assert torch.equal(log_probs, -tokens.float())
            now = max(0, step - (warmup or 0))
            assert (versions.diff() >= 0).all() and 0 <= now - int(versions[0]) <= 3
            seen.append((int(tokens[0]), len(tokens)))
        assert (batch.group_id.bincount() == EACH).all()
        last = [int(versions[-1]) for versions in batch.token_versions.rows()]
        assert batch.weight_version.tolist() == last
    begun = [(int(d.tokens[0]), len(d)) for group in left for d in group.responses if len(d)]
    assert all(length <= engines.lengths[number] for number, length in begun)
    assert all(length == engines.lengths[number] for number, length in seen)
    unbegun = sum(len(one) == 0 for group in left for one in group.responses)
    numbers = {number for number, _ in seen + begun}
    assert len(numbers) == len(seen + begun) == len(engines.lengths) - unbegun
    assert any(one.metrics["partial/version_lag_max"] > 1 for one in sampled)


def test_no_step_waits_for_its_longest_response():
    sampled, _, engines = run(60, num_engines=1)
    mean = sum(engines.lengths) / len(engines.lengths)
    tokens = [sum(engine.tokens for engine in one.batch.engines) for one in sampled[10:]]
    wanted = 8 * EACH * mean
    assert wanted * 0.8 < sum(tokens) / len(tokens) < wanted * 1.2


def test_training_waits_for_few_responses_and_trains_tokens_of_the_update_before():
    sampled, _, engines = run(60, num_engines=1, warmup=0)
    later = sampled[10:]
    assert sum(one.metrics["partial/rounds"] > 0 for one in later) < 0.2 * len(later)
    lags = [one.metrics["partial/version_lag_mean"] for one in later]
    assert 1 < sum(lags) / len(lags) < 2
    mean = sum(engines.lengths) / len(engines.lengths)
    tokens = [one.metrics["split/sampled_tokens"] for one in later]
    assert 8 * EACH * mean * 0.8 < sum(tokens) / len(tokens) < 8 * EACH * mean * 1.2


@pytest.mark.parametrize(("max_versions", "in_flight"), [(0, 8), (1, 8), (2, 16), (5, 40)])
def test_split_keeps_the_bound_of_versions(max_versions, in_flight):
    sampled, _, _ = run(40, in_flight=in_flight, max_versions=max_versions, warmup=0)
    assert max(one.metrics["partial/version_lag_max"] for one in sampled) <= max_versions
    if not max_versions:
        assert all(one.metrics["partial/rounds"] == 1 for one in sampled)


@pytest.mark.parametrize(
    ("num_steps", "warmup"),
    [
        (40, None),
        pytest.param(400, None, marks=pytest.mark.slow),
        pytest.param(400, 0, marks=pytest.mark.slow),
    ],
    ids=["partial", "partial, 10^5 responses", "split, 10^5 responses"],
)
def test_trained_lengths_are_distributed_as_sampled_ones(num_steps, warmup):
    """Kolmogorov-Smirnov, up to 10^5 responses: only the last ones are not trained."""
    sampled, _, engines = run(num_steps, per_step=125, in_flight=250, num_engines=1, warmup=warmup)
    trained = torch.cat([one.batch.responses.lengths for one in sampled])
    drawn = torch.tensor(engines.lengths)
    assert len(trained) == 250 * num_steps
    at = torch.arange(1, 201)
    shares = [
        torch.searchsorted(x.sort().values, at, right=True) / len(x) for x in (trained, drawn)
    ]
    assert (shares[0] - shares[1]).abs().max() < 1.36 * math.sqrt(2 / len(trained))


def groups(versions):
    return [Group(prompt(0), 1, version, 0, (Response.empty(),)) for version in versions]


@pytest.mark.parametrize(
    ("versions", "now", "count"),
    [
        ([], 0, 0),
        ([0] * 4, 0, 0),  # two a step, within two more steps
        ([0] * 6, 0, 2),  # two now, two in each of two more steps
        ([0, 0, 1, 1], 1, 0),
        ([0, 0, 1, 1], 2, 2),  # the first two have no later step
        ([1, 1, 1, 1], 2, 2),  # four, of which the next step can take two
        ([1, 2, 2, 2], 2, 0),
    ],
)
def test_groups_that_must_be_trained_by_hand(versions, now, count):
    assert due(groups(versions), now, max_versions=2, per_step=2) == count


@given(st.data())
def test_no_more_groups_are_due_than_a_step_trains(data):
    per_step, max_versions = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 4))
    most = data.draw(st.integers(per_step, per_step * (max_versions + 1)))
    versions: list[int] = []
    for now in range(12):
        versions += [now] * (most - len(versions))
        assert all(now - version <= max_versions for version in versions)
        count = due(groups(versions), now, max_versions, per_step)
        assert count <= per_step
        # Of the others, any may be finished early.
        others = range(count, len(versions))
        chosen = data.draw(st.permutations(list(others)))[: per_step - count]
        versions = [v for i, v in enumerate(versions) if i >= count and i not in chosen]
