"""Conversations in flight: turns that are cut go on, and environments survive a checkpoint."""

import json
from dataclasses import replace

import pytest
import torch

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.requests import Request, Requests
from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.turns import TurnTokens
from hybridrl.trainer.episodes.answers import AnswerImages
from hybridrl.trainer.episodes.base import Generator
from hybridrl.trainer.episodes.conversations import Conversations, FailureReasons, Limits
from hybridrl.trainer.episodes.responses import Response
from hybridrl.trainer.episodes.responses import decode as decode_groups
from hybridrl.trainer.episodes.responses import encode as encode_groups
from hybridrl.trainer.episodes.turns import TurnEpisodes
from hybridrl.trainer.rewarding import Rewarded
from hybridrl.trainer.sampling.dynamic import DynamicSampling
from hybridrl.trainer.sampling.partial import GroupsInFlight
from hybridrl.trainer.sampling.source import StepSource
from hybridrl.trainer.sampling.split import GroupsAhead
from tests.support.fake_engine import FakeEngines
from tests.support.role_configs import model_config
from tests.support.sampling_fakes import in_flight_config, source_parts
from tests.support.talking import AB, END, ONE, STOP, TOKENIZER, A, B, Here, decode

EACH, PER_STEP, IN_FLIGHT, MAX_VERSIONS, LONGEST = 2, 4, 12, 3, 60
POLICY = [A, B, AB, ONE, A, B, AB, ONE, STOP, END]


def log_prob(prefix: list[int]) -> float:
    """Of a prefix's last token: any change of what a token was sampled after shows."""
    return -(derive_seed(*prefix) % 4096) / 4096


class Engines(FakeEngines):
    """Engines whose next token is drawn by the seed; turns end by chance.

    Attributes:
        sampled: tokens in all.
        cut: turns that calls have cut after some of their tokens.
        in_flight: of each step, the unfinished responses that it leaves.
    """

    def __init__(self) -> None:
        super().__init__(self.script, 2, log_prob=log_prob)
        self.sampled = self.cut = 0
        self.in_flight: list[list[Response]] = []

    def script(self, request: Request) -> list[int]:
        drawn, tokens = torch.Generator().manual_seed(request.seed), [A]
        while tokens[-1] not in (STOP, END):
            tokens.append(POLICY[int(torch.randint(len(POLICY), (), generator=drawn))])
        return tokens[1:]

    def generate(self, requests: Requests) -> RolloutBatch:
        batch = super().generate(requests)
        self.sampled += len(batch.responses.values)
        self.cut += int((batch.responses.lengths[batch.unfinished] > 0).sum())
        return batch


def prompt(number: int) -> Prompt:
    return Prompt(number, [A] * (1 + number % 3), "", "", {"greeting": "ba" * (number % 2)}, {})


class LengthIsReward:
    """Rewards by which some prompts are mixed and others are not."""

    def score(self, prompts, batch):
        scores = [float(len(row) % 2) for row in batch.responses.rows()]
        return Rewarded([""] * len(scores), scores, [])


def run(
    num_steps,
    *,
    split=False,
    restarts=False,
    rounds=1,
    max_versions=MAX_VERSIONS,
    most=IN_FLIGHT,
    in_flight=(),
):
    """Batches of some steps, what is in flight then, and the engines.

    With restarts, each step begins with what a checkpoint of the step before holds.
    """
    engines = Engines()
    bounds = {"max_in_flight": most, "max_versions": max_versions, "keep_kv": False}
    config = in_flight_config(PER_STEP, LONGEST, rounds=rounds, **bounds)
    taken = 0

    def take(count):
        nonlocal taken
        taken += count
        return [prompt(number) for number in range(taken - count, taken)]

    parts = source_parts(config, take, None, LengthIsReward(), engine=engines, rollout=engines)

    def source(in_flight):
        conversations = Conversations(
            Here("tests.support.environment_cases.Counts", turns=4),
            TurnTokens(TOKENIZER, [END], ["="], "user"),
            decode,
            Limits(3, LONGEST),
            FailureReasons(),
            AnswerImages(model_config("embedded"), []),
        )
        episodes = TurnEpisodes(config.rollout, conversations, engines.generate)
        generation = replace(parts.generation, generate=Generator(episodes, engines.generate))
        own = replace(parts, generation=generation)
        source = (GroupsAhead if split else GroupsInFlight)(own)
        source = StepSource(DynamicSampling(source, own) if rounds > 1 else source, own)
        source.restore(in_flight)
        return source

    current, batches = source(in_flight), []
    for step in range(1, num_steps + 1):
        batches.append(current.take(step))
        engines.weight_version += 1
        current.after_update(step)
        responses = [one for group in current.state() for one in group.responses]
        engines.in_flight.append([one for one in responses if not one.is_finished])
        if not split or not max_versions:
            engines.holds = engines.weight_version
        if restarts:
            kept = json.loads(json.dumps(encode_groups(current.state())))
            current = source(decode_groups(kept, prompt))
    return batches, current.state(), engines


@pytest.mark.parametrize("split", [False, True], ids=["partial", "split"])
def test_cut_turns_go_on_and_each_token_is_trained_once(split):
    sampled, left, engines = run(12, split=split)
    trained = 0
    for step, one in enumerate(sampled):
        batch = one.batch
        rows = zip(
            batch.prompts.rows(),
            batch.responses.rows(),
            batch.response_mask.rows(),
            batch.rollout_log_probs.rows(),
            batch.token_versions.rows(),
            batch.conversation.turns.tolist(),
            strict=True,
        )
        for asked, response, mask, log_probs, versions, turns in rows:
            tokens, begun = [*asked.tolist(), *response.tolist()], len(asked)
            wanted = [log_prob(tokens[: begun + k + 1]) for k in range(len(response))]
            assert torch.equal(log_probs, torch.tensor(wanted).masked_fill(~mask, 0.0))
            own = versions[mask]
            assert (own.diff() >= 0).all() and 0 <= step - int(own[0]) <= MAX_VERSIONS
            assert (versions[~mask] == -1).all() and bool(mask[-1])
            # Answers separate the turns, unless they have no tokens.
            begins = int((mask.int().diff() == 1).sum()) + bool(mask[0])
            assert begins <= turns <= 3
            assert len(response) <= LONGEST
        trained += int(batch.response_mask.values.sum())
        assert batch.conversation.environment_rewards.tolist() == [
            sum(range(1, turns + 1)) for turns in batch.conversation.turns.tolist()
        ]
    kept = sum(int(one.mask.sum()) for group in left for one in group.responses)
    assert trained + kept == engines.sampled
    assert engines.cut > 20
    assert any((one.batch.token_versions.values.unique() >= 0).sum() > 1 for one in sampled)


@pytest.mark.parametrize("split", [False, True], ids=["partial", "split"])
def test_answers_do_not_wait_for_the_longest_turn(split):
    """Conversations in flight are in different turns, at their beginning and within them."""
    _, _, engines = run(12, split=split)
    begun = [[one for one in responses if one.turns] for responses in engines.in_flight]
    assert any(len({one.turns for one in responses}) > 1 for responses in begun)
    assert {one.turn_tokens > 0 for responses in begun for one in responses} == {False, True}


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("split", [False, True], ids=["partial", "split"])
def test_a_checkpoint_holds_all_of_a_conversation(split, rounds):
    """Environments, turns, rewards: with a restart after each step nothing changes."""
    whole, left, _ = run(8, split=split, rounds=rounds)
    resumed, other_left, _ = run(8, split=split, restarts=True, rounds=rounds)
    for one, other in zip(whole, resumed, strict=True):
        assert one.batch.tensors().keys() == other.batch.tensors().keys()
        for name, value in one.batch.tensors().items():
            found = other.batch.tensors()[name]
            values = (x.values if isinstance(x, Ragged) else x for x in (value, found))
            assert torch.equal(*values), name
    assert encode_groups(left) == encode_groups(other_left)


@pytest.mark.parametrize("split", [False, True], ids=["partial", "split"])
def test_unmixed_prompts_are_replaced_by_the_next_finished_ones(split):
    sampled, _, _ = run(12, split=split, rounds=3)
    for one in sampled:
        lag = one.metrics["partial/version_lag_max"]
        assert one.metrics["sampling/rounds"] <= 3 and lag <= MAX_VERSIONS
        scores = torch.tensor(one.rewarded.scores).view(PER_STEP, EACH)
        mixed = (scores != scores[:, :1]).any(1)
        assert int((~mixed).sum()) == one.metrics["sampling/unmixed_prompts"]
        counted = one.batch.responses.like(one.batch.counted.values).counts().view(PER_STEP, EACH)
        assert torch.equal(counted.sum(1) > 0, mixed)
        assert len(one.batch.group_id.unique()) == PER_STEP
    assert any(one.metrics["sampling/rounds"] > 1 for one in sampled)


def test_a_run_that_is_resumed_with_lower_bounds_goes_on():
    """Prompts in flight beyond the new bound are trained first; none is taken for them."""
    _, left, _ = run(3)
    sampled, later, _ = run(4, in_flight=left, most=PER_STEP, max_versions=0)
    assert len(left) == IN_FLIGHT - PER_STEP > len(later) == 0
    assert all(len(one.batch) == PER_STEP * EACH for one in sampled)
