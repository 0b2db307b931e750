"""Conversations in flight: turns that are cut go on, and environments survive a checkpoint."""

import json
from dataclasses import dataclass, field, replace

import pytest
import torch

from hybridrl.data.batch import EngineStats, PromptBatch, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.turns import TurnTokens
from hybridrl.trainer.episodes.base import Generator
from hybridrl.trainer.episodes.conversations import Conversations, FailureReasons, Limits
from hybridrl.trainer.episodes.responses import Response
from hybridrl.trainer.episodes.responses import decode as decode_groups
from hybridrl.trainer.episodes.responses import encode as encode_groups
from hybridrl.trainer.episodes.turns import TurnEpisodes
from hybridrl.trainer.rewarding import Rewarded
from hybridrl.trainer.sampling.dynamic import DynamicSampling
from hybridrl.trainer.sampling.hybrid_engine import SplitEngine
from hybridrl.trainer.sampling.partial import GroupsInFlight
from hybridrl.trainer.sampling.source import StepSource
from hybridrl.trainer.sampling.split import GroupsAhead
from tests.support.sampling_fakes import in_flight_config, source_parts
from tests.support.talking import AB, END, ONE, STOP, TOKENIZER, A, B, Here, decode

EACH, PER_STEP, IN_FLIGHT, MAX_VERSIONS, LONGEST = 2, 4, 12, 3, 60
POLICY = [A, B, AB, ONE, A, B, AB, ONE, STOP, END]


def log_prob(prefix: list[int]) -> float:
    """Of a prefix's last token: any change of what a token was sampled after shows."""
    return -(derive_seed(*prefix) % 4096) / 4096


@dataclass
class Engines(SplitEngine):
    """Engines whose next token is drawn by the seed; turns end by chance.

    Attributes:
        weight_version: as that of a HybridEngine.
        sampled: tokens in all.
        cut: turns that calls have cut after some of their tokens.
        in_flight: of each step, the unfinished responses that it leaves.
    """

    num_engines: int = 2
    weight_version: int = 0
    holds: int = 0
    sampled: int = 0
    cut: int = 0
    in_flight: list[list[Response]] = field(default_factory=list)

    @property
    def num_shards(self) -> int:
        return self.num_engines

    def begin(self, method: str, request: PromptBatch, arriving: int | None):
        return lambda: self.generate(request)

    def send(self):
        return self.weight_version

    def swap(self, sent):
        self.holds = sent
        return {}

    def generate(self, request: PromptBatch) -> RolloutBatch:
        prompts = [row.tolist() for row in request.prompts.rows()]
        rows: list[list[int]] = [[] for _ in prompts]
        open_rows = set(range(len(rows)))
        drawn = [torch.Generator().manual_seed(seed) for seed in request.seeds.tolist()]
        limits = request.max_tokens.tolist()
        for engine in range(self.num_engines):
            mine = (request.engine == engine).nonzero().flatten().tolist()
            budget, enough = len(mine) * request.token_budget, len(mine) * request.enough_ended
            while here := [row for row in mine if row in open_rows]:
                spent = sum(len(rows[row]) for row in mine) >= budget
                spent = spent or len(mine) - len(here) >= enough
                if spent and not any(request.must_finish[row] for row in here):
                    break
                for row in here:
                    choice = int(torch.randint(len(POLICY), (), generator=drawn[row]))
                    rows[row].append(POLICY[choice])
                    ends = POLICY[choice] in (STOP, END)
                    if ends or len(rows[row]) == limits[row]:
                        open_rows.remove(row)
        self.sampled += sum(map(len, rows))
        self.cut += sum(bool(rows[row]) for row in open_rows)
        responses = Ragged.from_rows(rows, torch.int32)
        log_probs = [
            [log_prob([*prefix, *row[: k + 1]]) for k in range(len(row))]
            for prefix, row in zip(prompts, rows, strict=True)
        ]
        is_cut = [
            len(row) == limit and row[-1] not in (STOP, END)
            for row, limit in zip(rows, limits, strict=True)
        ]
        return RolloutBatch(
            prompts=request.prompts,
            responses=responses,
            response_mask=responses.like(torch.ones_like(responses.values).bool()),
            rollout_log_probs=Ragged.from_rows(log_probs, torch.float32),
            group_id=request.prompt_id,
            weight_version=torch.full((len(rows),), self.holds),
            truncated=torch.tensor(is_cut),
            unfinished=torch.tensor([row in open_rows for row in range(len(rows))]),
            engines=(EngineStats(len(responses.values), 1.0, 0.1),) * self.num_engines,
        )


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
            batch.turns.tolist(),
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
        assert batch.environment_rewards.tolist() == [
            sum(range(1, turns + 1)) for turns in batch.turns.tolist()
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
