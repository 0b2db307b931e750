"""Episodes over several steps on simulated programs: none is lost, a resume keeps ended ones."""

import json
import random
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from hybridrl.agents.episode import Episode, Settings
from hybridrl.agents.record import EpisodeRecord
from hybridrl.agents.training.episodes import ProgramEpisodes
from hybridrl.config.choices import OtherSampling
from hybridrl.data.batch import EngineStats, RolloutBatch
from hybridrl.data.requests import SamplingParams, Served
from hybridrl.environments.programs import Reward
from hybridrl.processes.messages import Failure, FailureKind
from hybridrl.trainer.episodes.base import Generator, Wanted, whole_episodes
from hybridrl.trainer.episodes.conversations import FailureReasons
from hybridrl.trainer.episodes.responses import decode, encode
from hybridrl.trainer.sampling.partial import GroupsInFlight
from hybridrl.trainer.sampling.source import StepSource
from tests.support.sampling_fakes import in_flight_config, prompt, source_parts

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
        firsts: of each beginning, whether its programs come before others.
    """

    weight_version: int = 0
    longest: int = 40
    begun: list[tuple[int, int, int]] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)
    firsts: list[bool] = field(default_factory=list)
    failures: FailureReasons = field(default_factory=FailureReasons)
    running: dict[str, Future] = field(default_factory=dict)
    episodes: dict[str, Episode] = field(default_factory=dict)
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    num_shards: int = 2
    settings: Settings = field(
        default_factory=lambda: Settings(*[1.0] * 4, 99, OtherSampling.refuse)
    )
    url: str = ""
    loop: None = None
    text: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(images=None))
    end_token: int = 0

    @property
    def engines(self) -> "Agents":
        return self

    server = policy = engines

    @property
    def served(self) -> list[Served]:
        stats = EngineStats(1, 1.0, 0.5), EngineStats(0, 0.0, 0.0)
        return [Served(one, 0.0, self.weight_version) for one in stats]

    def episode(self, key, seed_parts, engine, settings) -> Episode:
        key = f"key{len(self.begun)}"
        self.begun.append(seed_parts[2:])
        self.lengths[key] = min(self.longest, int(self.draw.lognormvariate(1, 1)))
        record = EpisodeRecord(lambda text, last, images: [1, 2])
        self.episodes[key] = Episode(key, seed_parts, engine, settings, record)
        return self.episodes[key]

    def begin(self, jobs, first) -> list[Future]:
        self.firsts.append(first)
        outcomes = {job.key: Future() for job in jobs}
        self.running |= outcomes
        return [*outcomes.values()]

    def wake(self, *_) -> None:
        pass

    def run(self, is_enough, loop) -> None:
        while not is_enough():
            for key, outcome in list(self.running.items()):
                record, done = self.episodes[key].record, self.lengths[key]
                turns = sum(len(sequence.turns) for sequence in record.sequences)
                if turns < done:
                    text = record.sequences[0].text if turns else ""
                    version = [self.weight_version]
                    options = {"trained": True, "truncated": False, "name": f"{key}t{turns}"}
                    record.add(record.start(text), [turns], [-0.5], version, "x", **options)
                    continue
                number = int(key[3:])
                rewards = {f"chatcmpl-{key}t0": 0.25} if done else {}
                failure = Failure(0, FailureKind.error, f"reason {number}")
                ended = failure if number % 10 == 9 else Reward(float(number), rewards)
                outcome.set_result(ended)
                del self.running[key]

    def call(self, function, names) -> list[Episode]:
        return function(names)

    def close(self, names) -> list[Episode]:
        return [self.episodes.pop(name) for name in names]

    def log(self, outcomes) -> None:
        pass


def assert_first_turns_are_rewarded(batch: RolloutBatch) -> None:
    samples = batch.response_mask.values[batch.response_mask.lengths.cumsum(0) - 1]
    rewarded = samples & (batch.conversation.environment_failures == 0)
    assert torch.stack([row.sum() for row in batch.turn_rewards.rows()]).equal(0.25 * rewarded)
    assert rewarded.any()


def source_of(agents: Agents, first: int) -> StepSource:
    """Source with prompts from a number on."""
    bounds = {"max_in_flight": IN_FLIGHT, "max_versions": MAX_VERSIONS, "keep_kv": False}
    config = in_flight_config(PER_STEP, 40, **bounds)
    numbers = iter(range(first, 10**6))
    take = lambda count: [prompt(next(numbers)) for _ in range(count)]  # noqa: E731
    episodes = ProgramEpisodes(agents, 1, agents, agents.failures, -1.0)
    parts = source_parts(config, take, Generator(episodes, None), engine=agents, rollout=agents)
    return StepSource(GroupsInFlight(parts), parts)


def test_every_episode_is_trained_once_and_no_token_is_too_old():
    agents = Agents()
    source, rewards, lags = source_of(agents, 0), [], []
    for step in range(1, 31):
        sampled = source.take(step)
        batch, (turns, earned, reasons) = sampled.batch, vars(sampled.batch.conversation).values()
        assert (batch.group_id.bincount() == EACH).all() and len(batch) == PER_STEP * EACH
        assert_first_turns_are_rewarded(batch)
        assert [one.prompt_id for one in sampled.prompts[::EACH]] == sorted(
            {one.prompt_id for one in sampled.prompts}
        )
        rewards += earned.tolist()
        for reward, reason, count in zip(rewards[-8:], reasons.tolist(), turns, strict=True):
            if reason:
                _, text = agents.failures.look_up(reason)
                reward = float(text.split()[1])
            assert count == max(1, agents.lengths[f"key{int(reward)}"])
        mask, versions = batch.response_mask.values, batch.token_versions.values
        lags.append(int((agents.weight_version - versions[mask]).max()))
        agents.weight_version += 1
    scores = [reward for reward in rewards if reward >= 0]
    assert len({*scores}) == len(scores) and len(scores) < len(rewards)
    assert 1 < max(lags) <= MAX_VERSIONS


def test_programs_of_an_evaluation_come_before_those_of_training():
    agents = Agents()
    source_of(agents, 0).take(1)
    wanted = Wanted([prompt(5)], 1, SamplingParams(0.0, 1.0))
    episodes = ProgramEpisodes(agents, 1, agents, agents.failures, -1.0)
    whole_episodes(episodes, lambda wanted, count: [0], 2, wanted)
    assert agents.firsts == [False, True]


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
        for k, one in enumerate(group.responses)
        if not one.is_finished
    ]
    kept = sum(one.is_finished for group in source.state() for one in group.responses)
    sampled = resumed.take(6)
    assert again.begun[: len(wanted)] == wanted and kept > 0
    assert all(number >= 1000 for _, number, _ in again.begun[len(wanted) :])
    versions = sampled.batch.token_versions.values
    assert versions.min() < again.weight_version and torch.isin(versions, torch.arange(6)).all()
    assert_first_turns_are_rewarded(sampled.batch)
