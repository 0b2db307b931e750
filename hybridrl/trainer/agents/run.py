"""A run's agent: processes of its programs, and their episodes at the endpoint."""

from contextlib import ExitStack
from dataclasses import dataclass, field

from hybridrl.config.schema import AgentConfig, RunConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import PromptBatch
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.trainer.agents.endpoint import Endpoint, check_address
from hybridrl.trainer.agents.episodes import ProgramEpisodes
from hybridrl.trainer.agents.programs import ProgramPool
from hybridrl.trainer.episodes.base import Episodes
from hybridrl.trainer.episodes.environment import FailureReasons


@dataclass(frozen=True)
class Programs:
    """Programs of a run's agent, as an `Environment` (trainer/factory.py)."""

    config: RunConfig
    agent: AgentConfig
    pool: ProgramPool
    failures: FailureReasons = field(default_factory=FailureReasons)

    @classmethod
    def open(cls, config: RunConfig, stack: ExitStack) -> "Programs":
        """Start the processes, which `stack` ends.

        Raises:
            ConfigError: the endpoint cannot listen on agent.host and agent.port.
        """
        assert config.agent is not None
        check_address(config.agent.host, config.agent.port)
        return cls(config, config.agent, stack.enter_context(ProgramPool(config.agent)))

    def episodes(self, rollout: WorkerGroup, decode: Decode, stack: ExitStack) -> Episodes:
        """Return episodes at an endpoint over the engines, which `stack` ends."""
        config, agent = self.config, self.agent
        endpoint = Endpoint(
            config.rollout,
            rollout,
            agent.host,
            agent.port,
            tool_parser=agent.tool_parser,
            other_sampling=agent.other_sampling,
            template_options=config.data.chat_template_kwargs,
        )
        stack.enter_context(endpoint)
        score, seed = config.reward.failed_score, config.rollout.seed
        return ProgramEpisodes(endpoint, seed, self.pool, self.failures, score)

    def engines(self, request: PromptBatch, num_engines: int) -> list[int]:
        """Return engines in turn."""
        return [place % num_engines for place in range(len(request))]
