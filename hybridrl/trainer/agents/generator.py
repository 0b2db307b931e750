"""Generation by agents: one run of a program per response.

    endpoint     HTTP server in a thread of the driver; requests by key belong to an episode
    programs     in processes of their own, agent.concurrency at a time
    engines      sample continuously for all of them, called by the driver's main thread

What the engines sampled is recorded by the endpoint as token ids and becomes the batch.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridrl.agents.episode import Episode
from hybridrl.data.batch import PromptBatch, RolloutBatch
from hybridrl.data.sources.prompts import Prompt
from hybridrl.environments.programs import Job, Reward, Task
from hybridrl.rewards.processes.messages import Failure, FailureKind
from hybridrl.trainer.agents.batch import EpisodeResult, batch_of
from hybridrl.trainer.agents.endpoint import Endpoint
from hybridrl.trainer.agents.programs import ProgramPool
from hybridrl.trainer.agents.turn_rewards import unknown_turns
from hybridrl.trainer.multi_turn.environment import FailureReasons

log = logging.getLogger(__name__)


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
        self._failures, self._failed_score = failures, failed_score
        self._has_branched = self._has_unknown = False

    def generate(self, request: PromptBatch) -> RolloutBatch:
        """Run `responses_per_prompt` episodes of each prompt; all of an episode lie together."""
        each, endpoint = request.responses_per_prompt, self._endpoint
        prompts = [self._prompts[number] for number in request.prompt_id.tolist()]
        of_episodes = [prompt for prompt in prompts for _ in range(each)]
        episodes = self._open(request)
        jobs = [
            Job(_task(prompt), endpoint.server.url, episode.key)
            for prompt, episode in zip(of_episodes, episodes, strict=True)
        ]
        running = self._programs.begin(jobs)
        try:
            endpoint.engines.run(running, endpoint.server.loop)
        finally:
            keys = [episode.key for episode in episodes]
            endpoint.server.call(endpoint.policy.close, keys)
        results = [
            self._result(prompt, episode, found)
            for prompt, episode, found in zip(of_episodes, episodes, running.result(), strict=True)
        ]
        self._note_branch(results)
        batch = batch_of(results, endpoint.engines.weight_version, endpoint.end_token)
        engines = endpoint.engines
        return replace(batch, engines=engines.stats, environment_s=engines.waited_s)

    def _open(self, request: PromptBatch) -> list[Episode]:
        """Open the episodes; those of one prompt share an engine, as they share its tokens."""
        first = [0] * len(request) if request.first_sample is None else request.first_sample
        endpoint, engines = self._endpoint, self._endpoint.engines.num_engines
        settings = replace(endpoint.settings, temperature=request.temperature, top_p=request.top_p)
        return [
            endpoint.episode(
                secrets.token_urlsafe(16),
                (self._seed, "agent", request.step, number, int(first[place]) + k),
                place % engines,
                settings,
            )
            for place, number in enumerate(request.prompt_id.tolist())
            for k in range(request.responses_per_prompt)
        ]

    def _result(self, prompt: Prompt, episode: Episode, found: Reward | Failure) -> EpisodeResult:
        ids, record = prompt.token_ids, episode.record
        if isinstance(found, Reward) and (reason := unknown_turns(record, found.turns)):
            if not self._has_unknown:
                self._has_unknown = True
                log.warning("an episode failed: %s; reward/failed counts further ones", reason)
            found = Failure(0, FailureKind.error, reason)
        fixed = prompt.prompt_id, episode.engine, ids, record
        if isinstance(found, Failure):
            failure = self._failures.number(found.kind, found.reason)
            return EpisodeResult(*fixed, self._failed_score, failure)
        return EpisodeResult(*fixed, found.total, 0, found.turns)

    def _note_branch(self, results: Sequence[EpisodeResult]) -> None:
        """Log an example of the first branches of a run."""
        example = next((one.record.branch for one in results if one.record.branch), "")
        if example and not self._has_branched:
            self._has_branched = True
            log.warning("an episode has several token sequences (agent/branches): %s", example)


def _task(prompt: Prompt) -> Task:
    return Task(prompt.example, [dict(message) for message in prompt.messages], prompt.text)
