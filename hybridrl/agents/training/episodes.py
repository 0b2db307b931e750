"""Episodes of agents: one run of a program per response.

    endpoint     HTTP server in a thread of the driver; requests by key belong to an episode
    programs     in processes of their own, agent.concurrency at a time
    engines      sample continuously for all of them, called by the driver's main thread

What the engines sampled is recorded by the endpoint as token ids and becomes the batch. With
rollout.schedule=partial, sampling ends when enough groups have. Other programs run on meanwhile;
their requests wait at the endpoint for the next step. Which episodes end first
is decided by the clock. A program does not survive the driver: a resumed run has the ended episodes
of a checkpoint, and starts the programs of the others again.
"""

import logging
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from hybridrl.agents.episode import Episode
from hybridrl.agents.record import TokenSequence, decode_sequences, encode_sequences
from hybridrl.agents.training.batch import EpisodeResult, batch_of, unknown_turns
from hybridrl.agents.training.endpoint import Endpoint, check_address
from hybridrl.agents.training.programs import Outcome, ProgramPool, task_of
from hybridrl.config.checks.frozen_models import named_models
from hybridrl.config.planner.world import num_engines
from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.requests import SamplingParams
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.environments.programs import Job, Reward
from hybridrl.processes.messages import Failure, FailureKind
from hybridrl.trainer.episodes.base import Episodes, Grown, Until, Wanted
from hybridrl.trainer.episodes.conversations import Environment, FailureReasons
from hybridrl.trainer.episodes.responses import (
    EpisodeState,
    Group,
    Place,
    Response,
    unfinished,
    with_responses,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunningProgram(EpisodeState):
    """State of an episode whose program was started: its name at the endpoint, and its outcome."""

    name: str
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class EndedProgram(EpisodeState):
    """State of an episode that has ended.

    Attributes:
        sequences: what it sampled.
        turns: parts of the reward that were earned by turns, by the ids of their completions.
    """

    kind: ClassVar[str] = "program"

    sequences: list[TokenSequence]
    turns: dict[str, float] = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        """Return plain JSON."""
        return super().encode() | {"sequences": encode_sequences(self.sequences)}

    @classmethod
    def decode(cls, fields: dict[str, Any]) -> Self:
        """Return the state of a value of `encode`."""
        return super().decode(fields | {"sequences": decode_sequences(fields["sequences"])})


class ProgramEpisodes:
    """`Episodes` that are runs of a program.

    Args:
        endpoint: through which the programs sample.
        seed: of the run's sampling.
        programs: processes of the program.
        failures: numbers the reasons of failures.
        failed_score: reward of an episode that failed.
    """

    counts_tokens: ClassVar[bool] = False

    def __init__(
        self,
        endpoint: Endpoint,
        seed: int,
        programs: ProgramPool,
        failures: FailureReasons,
        failed_score: float,
    ) -> None:
        self._endpoint = endpoint
        self._seed = seed
        self._programs = programs
        programs.on_repeat = self._repeat
        self._failures, self._failed_score = failures, failed_score
        self._has_branched = self._has_unknown = False

    def open(self, prompts: Sequence[Prompt]) -> list[Response]:
        """Return empty responses; their programs begin with the next growth."""
        return [Response.empty() for _ in prompts]

    def grow(self, groups: Sequence[Group], until: Until, params: SamplingParams) -> Grown:
        """Sample for the programs until `until.finished` groups have ended, the needed among them.

        It is asked again when a program has ended.
        """
        # Where all are waited for, as in evaluations, others that wait can end in a later step.
        running = self._running(groups, params, first=until.needed == len(groups))

        def is_enough() -> bool:
            is_open = {g for (g, _), one in running.items() if not one.outcome.done()}
            return len(groups) - len(is_open) >= until.finished and is_open.isdisjoint(
                range(until.needed)
            )

        self._endpoint.engines.run(is_enough, self._endpoint.server.loop)
        served = self._endpoint.engines.served
        ended = {place: one for place, one in running.items() if one.outcome.done()}
        new = {
            (g, k): replace(groups[g].responses[k], episode=one) for (g, k), one in running.items()
        } | self._ended(groups, ended)
        return Grown(
            with_responses(groups, new),
            [tuple(one.stats for one in served)],
            frozenset(one.weight_version for one in served),
            min(one.idle_s for one in served),
        )

    def batch(self, groups: Sequence[Group]) -> RolloutBatch:
        """Return the token sequences of ended episodes; all of an episode lie together."""
        results = [
            self._result(index, group, response)
            for index, group in enumerate(groups)
            for response in group.responses
        ]
        version = self._endpoint.engines.served[0].weight_version
        images = self._endpoint.policy.text.images
        return batch_of(results, version, self._endpoint.end_token, images)

    def _running(
        self, groups: Sequence[Group], params: SamplingParams, *, first: bool
    ) -> dict[Place, RunningProgram]:
        """Return the programs of episodes, started if they are new or their driver has ended."""
        states = {(g, k): groups[g].responses[k].episode for g, k in unfinished(groups)}
        running = {at: one for at, one in states.items() if isinstance(one, RunningProgram)}
        new = [place for place in states if place not in running]
        jobs = [self._job(groups[g], k, params) for g, k in new]
        outcomes = self._programs.begin(jobs, first=first)
        for place, job, outcome in zip(new, jobs, outcomes, strict=True):
            outcome.add_done_callback(self._endpoint.engines.wake)
            running[place] = RunningProgram(name=job.key, outcome=outcome)
        return {place: running[place] for place in states}

    def _job(self, group: Group, index: int, params: SamplingParams) -> Job:
        """Open an episode at the endpoint; return the job of its program."""
        endpoint, sample = self._endpoint, group.first_sample + index
        episode = endpoint.episode(
            secrets.token_urlsafe(16),
            (self._seed, "agent", group.step, group.prompt.prompt_id, sample),
            group.engine,
            replace(endpoint.settings, temperature=params.temperature, top_p=params.top_p),
        )
        return Job(task_of(group.prompt), endpoint.server.url, episode.key)

    def _ended(
        self, groups: Sequence[Group], ended: dict[Place, RunningProgram]
    ) -> dict[Place, Response]:
        """Return the finished responses of programs that have ended."""
        names = [one.name for one in ended.values()]
        episodes = self._endpoint.server.call(self._endpoint.policy.close, names)
        outcomes = [one.outcome.result() for one in ended.values()]
        self._programs.log(outcomes)
        rows = zip(ended, episodes, outcomes, strict=True)
        states = {place: self._state(episode, outcome) for place, episode, outcome in rows}
        return {
            (g, k): replace(groups[g].responses[k], is_finished=True, episode=state)
            for (g, k), state in states.items()
        }

    def _state(self, episode: Episode, outcome: Reward | Failure) -> EndedProgram:
        record = episode.record
        if record.branch and not self._has_branched:
            self._has_branched = True
            log.warning(
                "an episode has several token sequences (agent/branches): %s", record.branch
            )
        if isinstance(outcome, Reward) and (
            reason := unknown_turns(record.sequences, outcome.turns)
        ):
            if not self._has_unknown:
                self._has_unknown = True
                log.warning("an episode failed: %s; reward/failed counts further ones", reason)
            outcome = Failure(0, FailureKind.error, reason)
        if isinstance(outcome, Reward):
            return EndedProgram(
                sequences=record.sequences, reward=outcome.total, turns=outcome.turns
            )
        return EndedProgram(
            sequences=record.sequences,
            reward=self._failed_score,
            failure=outcome.kind,
            reason=outcome.reason,
        )

    def _result(self, index: int, group: Group, response: Response) -> EpisodeResult:
        state = response.episode
        assert isinstance(state, EndedProgram)
        failure = 0 if state.failure is None else self._failures.number(state.failure, state.reason)
        return EpisodeResult(
            index,
            group.engine,
            group.prompt.token_ids,
            state.sequences,
            state.reward,
            failure,
            state.turns,
            group.prompt.images.files if group.prompt.images else (),
        )

    def _repeat(self, name: str, attempt: str) -> None:
        """Note that the program of an episode begins anew, before it does; called in any thread."""
        loop, policy = self._endpoint.server.loop, self._endpoint.policy
        loop.call_soon_threadsafe(policy.repeat, name, attempt)


def open_agent(config: RunConfig, stack: ExitStack) -> Environment:
    """Start the processes of the programs, which `stack` ends.

    Raises:
        ConfigError: the endpoint cannot listen on agent.host and agent.port.
    """
    agent = config.agent
    assert agent is not None
    check_address(agent.host, agent.port)
    pool, failures = stack.enter_context(ProgramPool(agent, num_engines(config))), FailureReasons()

    def episodes(rollout: WorkerGroup, decode: Decode, stack: ExitStack) -> Episodes:
        endpoint = Endpoint(
            config.rollout,
            rollout,
            agent.host,
            agent.port,
            tool_parser=agent.tool_parser,
            other_sampling=agent.other_sampling,
            template_options=config.data.chat_template_kwargs,
            others=named_models(config),
        )
        stack.enter_context(endpoint)
        score, seed = config.reward.failed_score, config.rollout.seed
        return ProgramEpisodes(endpoint, seed, pool, failures, score)

    def engines(wanted: Wanted, num_engines: int) -> list[int]:
        return [place % num_engines for place in range(len(wanted.prompts))]

    return Environment(episodes, failures, engines)
