"""Generation by agents: one run of a program per response.

    endpoint     HTTP server in a thread of the driver; requests by key belong to an episode
    programs     in processes of their own, agent.concurrency at a time
    engines      sample continuously for all of them, called by the driver's main thread

What the engines sampled is recorded by the endpoint as token ids and becomes the batch.
"""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hybridrl.agents.episode import Episode, Settings
from hybridrl.data.batch import PromptBatch, RolloutBatch
from hybridrl.data.sources.prompts import Prompt
from hybridrl.environments.programs import Job, Reward
from hybridrl.rewards.processes.messages import Failure, FailureKind
from hybridrl.trainer.agents.batch import EpisodeResult, batch_of
from hybridrl.trainer.agents.endpoint import Endpoint
from hybridrl.trainer.agents.programs import Found, ProgramPool, task_of
from hybridrl.trainer.agents.turn_rewards import unknown_turns
from hybridrl.trainer.multi_turn.environment import FailureReasons
from hybridrl.trainer.sampling.generation import CallStats

log = logging.getLogger(__name__)


class Running(NamedTuple):
    """An episode whose program was started, and its reward or `Failure` once it has ended."""

    prompt: Prompt
    name: str
    found: Found


class AgentGenerator:
    """Generator whose responses are the episodes of a program.

    Args:
        endpoint: through which the programs sample.
        seed: of the run's sampling.
        programs: processes of the program.
        prompts: prompts of training and evaluation by id.
        failures: numbers the reasons of failures.
        failed_score: reward of an episode that failed.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        seed: int,
        programs: ProgramPool,
        prompts: Mapping[int, Prompt],
        failures: FailureReasons,
        failed_score: float,
    ) -> None:
        self._endpoint = endpoint
        self._seed = seed
        self._programs, self._prompts = programs, prompts
        programs.on_repeat = self._repeat
        self.failures, self._failed_score = failures, failed_score
        self._has_branched = self._has_unknown = False

    def __call__(self, request: PromptBatch) -> RolloutBatch:
        """Run `responses_per_prompt` episodes of each prompt; all of an episode lie together.

        Those of one prompt share an engine, as they share its tokens.
        """
        each, engines = range(request.responses_per_prompt), self._endpoint.engines
        first = [0] * len(request) if request.first_sample is None else request.first_sample
        settings = self._endpoint.settings
        settings = replace(settings, temperature=request.temperature, top_p=request.top_p)
        running: list[Running] = []
        for place, number in enumerate(request.prompt_id.tolist()):
            prompt, samples = self._prompts[number], [int(first[place]) + k for k in each]
            engine = place % engines.num_engines
            running += self.begin(prompt, request.step, samples, engine, settings)
        self.run(lambda: all(one.found.done() for one in running))
        idle_s = min(one.idle_s for one in self._endpoint.engines.served)
        batch = self.batch(self.end(running))
        return replace(batch, engines=self.stats, environment_s=idle_s)

    @property
    def stats(self) -> CallStats:
        """Throughput of each engine in the last `run`."""
        return tuple(one.stats for one in self._endpoint.engines.served)

    def begin(
        self,
        prompt: Prompt,
        step: int,
        samples: Sequence[int],
        engine: int,
        settings: Settings | None = None,
    ) -> list[Running]:
        """Start the programs of some samples of a prompt; seeds derive from `step` and sample.

        `settings` are those of training steps by default.
        """
        endpoint = self._endpoint
        episodes = [
            endpoint.episode(
                secrets.token_urlsafe(16),
                (self._seed, "agent", step, prompt.prompt_id, sample),
                engine,
                settings or endpoint.settings,
            )
            for sample in samples
        ]
        jobs = [Job(task_of(prompt), endpoint.server.url, episode.key) for episode in episodes]
        found = self._programs.begin(jobs)
        for one in found:
            one.add_done_callback(endpoint.engines.wake)
        names = [episode.name for episode in episodes]
        return [Running(prompt, *both) for both in zip(names, found, strict=True)]

    def run(self, is_enough: Callable[[], bool]) -> None:
        """Sample until it is enough; it is asked again when a program has ended."""
        self._endpoint.engines.run(is_enough, self._endpoint.server.loop)

    def end(self, running: Sequence[Running]) -> list[EpisodeResult]:
        """Return the results of episodes whose programs have ended."""
        names = [one.name for one in running]
        episodes = self._endpoint.server.call(self._endpoint.policy.close, names)
        found = [one.found.result() for one in running]
        self._programs.log(found)
        prompts = [one.prompt for one in running]
        results = [self._result(*one) for one in zip(prompts, episodes, found, strict=True)]
        self._note_branch(results)
        return results

    def batch(self, results: Sequence[EpisodeResult]) -> RolloutBatch:
        """Return the token sequences of episodes as a batch."""
        version = self._endpoint.engines.served[0].weight_version
        return batch_of(results, version, self._endpoint.end_token)

    def _repeat(self, name: str, attempt: str) -> None:
        """Note that the program of an episode begins anew, before it does; called in any thread."""
        loop, policy = self._endpoint.server.loop, self._endpoint.policy
        loop.call_soon_threadsafe(policy.repeat, name, attempt)

    def _result(self, prompt: Prompt, episode: Episode, found: Reward | Failure) -> EpisodeResult:
        record = episode.record
        if isinstance(found, Reward) and (reason := unknown_turns(record, found.turns)):
            if not self._has_unknown:
                self._has_unknown = True
                log.warning("an episode failed: %s; reward/failed counts further ones", reason)
            found = Failure(0, FailureKind.error, reason)
        fixed = prompt.prompt_id, episode.engine, prompt.token_ids, record
        if isinstance(found, Failure):
            failure = self.failures.number(found.kind, found.reason)
            return EpisodeResult(*fixed, self._failed_score, failure)
        return EpisodeResult(*fixed, found.total, 0, found.turns)

    def _note_branch(self, results: Sequence[EpisodeResult]) -> None:
        """Log an example of the first branches of a run."""
        example = next((one.record.branch for one in results if one.record.branch), "")
        if example and not self._has_branched:
            self._has_branched = True
            log.warning("an episode has several token sequences (agent/branches): %s", example)
