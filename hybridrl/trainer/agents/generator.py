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
from typing import Self

from hybridrl.agents.policy import Episode, Policy, Settings
from hybridrl.agents.record import EpisodeRecord
from hybridrl.agents.server import EndpointServer
from hybridrl.agents.text import ModelText
from hybridrl.config.choices import OtherSampling
from hybridrl.config.schema import AgentConfig, RolloutConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import PromptBatch, RolloutBatch
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.tokenizer import load_tokenizer
from hybridrl.environments.programs import Job, Task
from hybridrl.models.end_tokens import stop_token_ids
from hybridrl.models.resolve import plain_folder
from hybridrl.rewards.processes.messages import Failure
from hybridrl.rollout.tool_calls import tool_parser
from hybridrl.trainer.agents.batch import EpisodeResult, batch_of
from hybridrl.trainer.agents.engines import LiveEngines
from hybridrl.trainer.agents.programs import ProgramPool
from hybridrl.trainer.multi_turn.environment import FailureReasons

log = logging.getLogger(__name__)


class AgentGenerator:
    """Generator whose responses are the episodes of a program. Use it as a context manager.

    Args:
        config: of the agent.
        rollout: config of the engines.
        group: the engines.
        programs: processes of the program.
        prompts: prompts of training and evaluation by id.
        failures: numbers the reasons of failures.
        failed_score: reward of an episode that failed.
    """

    def __init__(
        self,
        config: AgentConfig,
        rollout: RolloutConfig,
        group: WorkerGroup,
        programs: ProgramPool,
        prompts: Mapping[int, Prompt],
        failures: FailureReasons,
        failed_score: float,
    ) -> None:
        tokenizer = load_tokenizer(rollout.model.path)
        ends = stop_token_ids(plain_folder(rollout.model.path))
        parse = None
        if config.tool_parser is not None:
            parse = tool_parser(config.tool_parser, tokenizer)
        self._end_token = ends[0]
        self._seed = rollout.seed
        self._programs, self._prompts = programs, prompts
        self._failures, self._failed_score = failures, failed_score
        self._settings = Settings(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            training_temperature=rollout.temperature,
            training_top_p=rollout.top_p,
            context=rollout.max_prompt_tokens + rollout.max_response_tokens,
            masks_other=config.other_sampling is OtherSampling.mask,
        )
        self._engines = LiveEngines(group)
        self._policy = Policy(ModelText(tokenizer, ends), self._engines, parse)
        self._server = EndpointServer(self._policy, config.host, config.port)
        self._has_branched = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def generate(self, request: PromptBatch) -> RolloutBatch:
        """Run `responses_per_prompt` episodes of each prompt; all of an episode lie together."""
        prompts = [self._prompts[number] for number in request.prompt_id.tolist()]
        episodes = self._episodes(request)
        each = request.responses_per_prompt
        jobs = [
            Job(self._task(prompts[index // each]), self._server.url, episode.key)
            for index, episode in enumerate(episodes)
        ]
        for episode in episodes:
            self._policy.open(episode)
        running = self._programs.begin(jobs)
        self._engines.run(running, self._server.loop)
        self._server.call(self._policy.close, [episode.key for episode in episodes])
        results = [
            self._result(prompts[index // each], episode, found)
            for index, (episode, found) in enumerate(zip(episodes, running.result(), strict=True))
        ]
        self._note_branch(results)
        batch = batch_of(results, self._engines.weight_version, self._end_token)
        return replace(batch, engines=self._engines.stats)

    def _episodes(self, request: PromptBatch) -> list[Episode]:
        """Build the episodes; those of one prompt share an engine, as they share its tokens."""
        first = [0] * len(request) if request.first_sample is None else request.first_sample
        settings = replace(self._settings, temperature=request.temperature, top_p=request.top_p)
        return [
            Episode(
                key=secrets.token_urlsafe(16).replace(".", ""),
                seed_parts=(self._seed, "agent", request.step, number, int(first[place]) + k),
                engine=place % self._engines.num_engines,
                settings=settings,
                record=EpisodeRecord(self._policy.text.encode),
            )
            for place, number in enumerate(request.prompt_id.tolist())
            for k in range(request.responses_per_prompt)
        ]

    def _task(self, prompt: Prompt) -> Task:
        return Task(prompt.example, prompt.messages, prompt.text)

    def _result(self, prompt: Prompt, episode: Episode, found: float | Failure) -> EpisodeResult:
        failure, reward = 0, self._failed_score
        if isinstance(found, Failure):
            failure = self._failures.number(found.kind, found.reason)
        else:
            reward = found
        ids, record = prompt.token_ids, episode.record
        return EpisodeResult(prompt.prompt_id, episode.engine, ids, record, reward, failure)

    def _note_branch(self, results: Sequence[EpisodeResult]) -> None:
        """Log an example of the first branches of a run."""
        example = next((one.record.branch for one in results if one.record.branch), "")
        if example and not self._has_branched:
            self._has_branched = True
            log.warning("an episode has several token sequences (agent/branches): %s", example)
