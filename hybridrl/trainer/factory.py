"""Factories of generation, of rewards and of the source of a step's groups."""

import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from hybridrl.config.choices import Schedule
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import Generate
from hybridrl.data.sources.prompts import PromptSets
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.environments.pool import EnvironmentPool
from hybridrl.rewards.scorer import RewardScorer, rule_config
from hybridrl.trainer.agents.programs import ProgramPool
from hybridrl.trainer.multi_turn.conversations import Conversations, Limits
from hybridrl.trainer.multi_turn.environment import EnvironmentRewards, RunEnvironment, turn_tokens
from hybridrl.trainer.multi_turn.generator import MultiTurn
from hybridrl.trainer.rewarding import FunctionRewards, RewardSource
from hybridrl.trainer.sampling.drafts import OneTurn, Turns
from hybridrl.trainer.sampling.dynamic import DynamicSampling
from hybridrl.trainer.sampling.partial import GroupsInFlight
from hybridrl.trainer.sampling.source import Source, SourceParts, StepSource
from hybridrl.trainer.sampling.split import GroupsAhead
from hybridrl.trainer.sampling.whole import WholeGroups


def open_environment(config: RunConfig, stack: ExitStack) -> RunEnvironment | None:
    """Start the processes of the environment or agent, which `stack` ends; None without both.

    Raises:
        ConfigError: the agent's endpoint cannot listen on agent.host and agent.port.
    """
    if config.agent is not None:
        check_address(config.agent.host, config.agent.port)
        return RunEnvironment(stack.enter_context(ProgramPool(config.agent)))
    if config.environment is None:
        return None
    pool = EnvironmentPool(
        config.environment.function,
        config.environment.args,
        timeout_s=config.reward.timeout_s,
        num_processes=config.reward.num_processes,
    )
    return RunEnvironment(stack.enter_context(pool))


def check_address(host: str, port: int, keys: str = "agent.host = {}, agent.port = {}") -> None:
    """Check that an endpoint can listen on an address, before engines start.

    Raises:
        ConfigError: it cannot. `keys` formats host and port.
    """
    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError, TypeError, UnicodeError) as error:
        raise ConfigError(
            f"{keys.format(host, port)}, but the endpoint cannot listen there: {error}.\n"
            "Set port 0 for a free one, and an IPv4 address of this machine as host."
        ) from error


def open_rewards(
    config: RunConfig, environment: RunEnvironment | None, decode: Decode, stack: ExitStack
) -> RewardSource:
    """Return the rewards of the environment or agent, or of the reward function."""
    if environment is not None:
        return EnvironmentRewards(decode, environment.failures, config.reward.failed_score)
    return FunctionRewards(decode, stack.enter_context(RewardScorer(config.reward)))


def generator_for(
    config: RunConfig,
    environment: RunEnvironment | None,
    rollout: WorkerGroup,
    prompts: PromptSets,
    decode: Decode,
    stack: ExitStack,
) -> Generate:
    """Return the generation of an agent or environment, if there is one, else the single-turn one.

    `stack` ends the agent's endpoint.
    """
    single_turn = partial(rollout.call, "generate")
    if environment is None:
        return single_turn
    by_id = {prompt.prompt_id: prompt for prompt in [*prompts.train, *prompts.held_out]}
    if config.agent is not None:
        # A web server, which other runs do not need.
        from hybridrl.trainer.agents.endpoint import Endpoint
        from hybridrl.trainer.agents.generator import AgentGenerator

        assert isinstance(environment.processes, ProgramPool)
        endpoint = Endpoint(
            config.rollout,
            rollout,
            config.agent.host,
            config.agent.port,
            tool_parser=config.agent.tool_parser,
            other_sampling=config.agent.other_sampling,
            template_options=config.data.chat_template_kwargs,
        )
        stack.enter_context(endpoint)
        return AgentGenerator(
            endpoint,
            config.rollout.seed,
            environment.processes,
            by_id,
            environment.failures,
            config.reward.failed_score,
        )
    assert config.environment is not None
    assert isinstance(environment.processes, EnvironmentPool)
    conversations = Conversations(
        environment.processes,
        turn_tokens(config.model, config.environment, config.data.chat_template_kwargs),
        decode,
        {number: prompt.example for number, prompt in by_id.items()},
        Limits(config.environment.max_turns, config.rollout.max_response_tokens),
        environment.failures,
    )
    return MultiTurn(single_turn, conversations)


def open_rules(config: RunConfig, stack: ExitStack) -> dict[str, RewardScorer]:
    """Return the rules of eval.rules by name; `stack` ends their processes."""
    return {
        name: stack.enter_context(RewardScorer(rule_config(config.reward, rule)))
        for name, rule in config.eval.rules.items()
    }


def open_source(parts: SourceParts) -> StepSource:
    """Return the source of a run's groups, as rollout.schedule and algorithm say."""
    config = parts.config
    kind = "agent" if config.agent is not None else "turns"
    source = SOURCES[config.rollout.schedule, kind](parts)
    if config.algorithm.max_sampling_rounds > 1:
        source = DynamicSampling(source, parts)
    return StepSource(source, parts)


def _turns(parts: SourceParts) -> Turns:
    generator = parts.generation.generate
    return generator.conversations if isinstance(generator, MultiTurn) else OneTurn()


def _programs(parts: SourceParts) -> Source:
    # A web server, which other runs do not need.
    from hybridrl.trainer.agents.generator import AgentGenerator
    from hybridrl.trainer.agents.sampling import ProgramsInFlight

    generator = parts.generation.generate
    assert isinstance(generator, AgentGenerator)
    return ProgramsInFlight(parts, generator)


# By rollout.schedule, and by what responses are made of.
SOURCES: Mapping[tuple[Schedule, str], Callable[[SourceParts], Source]] = {
    (Schedule.sync, "turns"): WholeGroups,
    (Schedule.sync, "agent"): WholeGroups,
    (Schedule.partial, "turns"): lambda parts: GroupsInFlight(parts, _turns(parts)),
    (Schedule.partial, "agent"): _programs,
    (Schedule.split, "turns"): lambda parts: GroupsAhead(parts, _turns(parts)),
}
