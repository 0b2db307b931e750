"""A run's agent: processes of its programs, and their episodes at the endpoint."""

from contextlib import ExitStack

from hybridrl.agents.training.endpoint import Endpoint, check_address
from hybridrl.agents.training.episodes import ProgramEpisodes
from hybridrl.agents.training.programs import ProgramPool
from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.trainer.episodes.base import Episodes
from hybridrl.trainer.episodes.environment import Environment, FailureReasons


def open_agent(config: RunConfig, stack: ExitStack) -> Environment:
    """Start the processes of the programs, which `stack` ends.

    Raises:
        ConfigError: the endpoint cannot listen on agent.host and agent.port.
    """
    agent = config.agent
    assert agent is not None
    check_address(agent.host, agent.port)
    pool, failures = stack.enter_context(ProgramPool(agent)), FailureReasons()

    def episodes(rollout: WorkerGroup, decode: Decode, stack: ExitStack) -> Episodes:
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
        return ProgramEpisodes(endpoint, seed, pool, failures, score)

    # Engines in turn.
    return Environment(episodes, failures, lambda request, n: [k % n for k in range(len(request))])
