"""Episodes over several steps on simulated programs: none is lost, a resume keeps ended ones."""

import json
import random
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from hybridrl.agents.record import EpisodeRecord
from hybridrl.data.batch import EngineStats, RolloutBatch
from hybridrl.rewards.processes.messages import Failure, FailureKind
from hybridrl.trainer.agents.batch import EpisodeResult, batch_of
from hybridrl.trainer.agents.generator import Running
from hybridrl.trainer.agents.sampling import ProgramsInFlight
from hybridrl.trainer.multi_turn.environment import FailureReasons
from hybridrl.trainer.sampling.in_flight import decode, encode
from hybridrl.trainer.sampling.source import StepSource
from tests.support.sampling_fakes import prompt, source_parts

EACH, PER_STEP, IN_FLIGHT, MAX_VERSIONS = 2, 4, 12, 3


@dataclass
class Agents:
    """Programs of drawn lengths, which sample a turn of one token at each tick of a clock.

    Each reports a reward of 0.25 for its first turn.

    Attributes:
        weight_version: as that of a HybridEngine.
        longest: most turns of a program.
        begun: (step, prompt, sample) of each program that was started.
        lengths: turns of each program, by its key; every tenth fails.
    """

    weight_version: int = 0
    longest: int = 40
    begun: list[tuple[int, int, int]] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)
    open: dict[str, Running] = field(default_factory=dict)
    episodes: dict[str, SimpleNamespace] = field(default_factory=dict)
    failures: FailureReasons = field(default_factory=FailureReasons)
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    num_shards: int = 2
    stats: tuple[EngineStats, ...] = (EngineStats(1, 1.0, 0.5), EngineStats(0, 0.0, 0.0))

    def call(self, method, request):
        raise AssertionError("programs sample through the endpoint")

    def begin(self, asked, step, samples, engine):
        new = []
        for sample in samples:
            key = f"key{len(self.begun)}"
            self.begun.append((step, asked.prompt_id, sample))
            self.lengths[key] = min(self.longest, int(self.draw.lognormvariate(1, 1)))
            record = EpisodeRecord(lambda text, last: [1, 2])
            self.episodes[key] = SimpleNamespace(engine=engine, record=record)
            new.append(Running(asked, key, Future()))
        self.open |= {one.name: one for one in new}
        return new

    def run(self, is_enough):
        while not is_enough():
            for key, one in list(self.open.items()):
                record, done = self.episodes[key].record, self.lengths[key]
                turns = sum(len(sequence.turns) for sequence in record.sequences)
                if turns < done:
                    text = record.sequences[0].text if turns else ""
                    version = [self.weight_version]
                    options = {"trained": True, "truncated": False, "name": f"{key}t{turns}"}
                    record.add(record.start(text), [turns], [-0.5], version, "x", **options)
                    continue
                number = int(key[3:])
                failure = Failure(0, FailureKind.error, f"reason {number}")
                one.found.set_result(failure if number % 10 == 9 else float(number))
                del self.open[key]

    def end(self, running):
        return [self._result(one, one.found.result()) for one in running]

    def batch(self, results) -> RolloutBatch:
        return batch_of(results, self.weight_version, 0)

    def _result(self, one: Running, found: float | Failure) -> EpisodeResult:
        reward, failure = found, 0
        turns, episode = {f"chatcmpl-{one.name}t0": 0.25}, self.episodes[one.name]
        if isinstance(found, Failure):
            reward, failure = -1.0, self.failures.number(found.kind, found.reason)
            turns = {}
        return EpisodeResult(0, episode.engine, [1], episode.record, reward, failure, turns)


def assert_first_turns_are_rewarded(batch: RolloutBatch) -> None:
    samples = batch.response_mask.values[batch.response_mask.lengths.cumsum(0) - 1]
    rewarded = samples & (batch.environment_failures == 0)
    assert torch.stack([row.sum() for row in batch.turn_rewards.rows()]).equal(0.25 * rewarded)
    assert rewarded.any()


def source_of(agents: Agents, first: int) -> StepSource:
    """Source with prompts from a number on."""
    rollout = {"max_in_flight": IN_FLIGHT, "max_versions": MAX_VERSIONS, "temperature": 1.0}
    rollout |= {"responses_per_prompt": EACH, "max_response_tokens": 40, "top_p": 1.0, "seed": 1}
    rollout["keep_kv"] = False
    overlong = SimpleNamespace(train_on_truncated=True)
    config = SimpleNamespace(
        algorithm=SimpleNamespace(overlong=overlong, advantage="grpo", max_sampling_rounds=1),
        data=SimpleNamespace(prompts_per_step=PER_STEP),
        rollout=SimpleNamespace(**rollout),
    )
    numbers = iter(range(first, 10**6))
    take = lambda count: [prompt(next(numbers)) for _ in range(count)]  # noqa: E731
    parts = source_parts(config, take, engine=agents, rollout=agents)
    return StepSource(ProgramsInFlight(parts, agents), parts)


def test_every_episode_is_trained_once_and_no_token_is_too_old():
    agents = Agents()
    source, rewards, lags = source_of(agents, 0), [], []
    for step in range(1, 31):
        sampled = source.take(step)
        batch, reasons = sampled.batch, sampled.batch.environment_failures.tolist()
        assert (batch.group_id.bincount() == EACH).all() and len(batch) == PER_STEP * EACH
        assert_first_turns_are_rewarded(batch)
        assert [one.prompt_id for one in sampled.prompts[::EACH]] == sorted(
            {one.prompt_id for one in sampled.prompts}
        )
        rewards += batch.environment_rewards.tolist()
        for reward, reason, turns in zip(rewards[-8:], reasons, batch.turns.tolist(), strict=True):
            if reason:
                _, text = agents.failures.look_up(reason)
                reward = float(text.split()[1])
            assert turns == max(1, agents.lengths[f"key{int(reward)}"])
        mask, versions = batch.response_mask.values, batch.token_versions.values
        lags.append(int((agents.weight_version - versions[mask]).max()))
        agents.weight_version += 1
    scores = [reward for reward in rewards if reward >= 0]
    assert len({*scores}) == len(scores) and len(scores) < len(rewards)
    assert 1 < max(lags) <= MAX_VERSIONS


def test_programs_that_sample_nothing_have_tokens_of_no_age():
    agents = Agents(longest=0)
    sampled = source_of(agents, 0).take(1)
    assert not sampled.batch.response_mask.values.any()
    assert sampled.metrics["partial/version_lag_max"] == 0.0


def test_a_checkpoint_has_ended_episodes_and_the_others_begin_anew():
    agents = Agents()
    source = source_of(agents, 0)
    for step in range(1, 6):
        source.take(step)
        agents.weight_version += 1
    text = json.dumps(encode(source.state()))
    again = Agents(weight_version=agents.weight_version)
    resumed = source_of(again, 1000)
    resumed.restore(decode(json.loads(text), prompt))
    assert json.dumps(encode(resumed.state())) == text
    wanted = [
        (group.step, group.prompt.prompt_id, group.first_sample + k)
        for group in source.state()
        for k, draft in enumerate(group.drafts)
        if not draft.finished
    ]
    kept = sum(draft.finished for group in source.state() for draft in group.drafts)
    sampled = resumed.take(6)
    assert again.begun[: len(wanted)] == wanted and kept > 0
    assert all(number >= 1000 for _, number, _ in again.begun[len(wanted) :])
    versions = sampled.batch.token_versions.values
    assert versions.min() < again.weight_version and torch.isin(versions, torch.arange(6)).all()
    assert_first_turns_are_rewarded(sampled.batch)
