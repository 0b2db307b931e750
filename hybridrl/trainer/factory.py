"""Factories of a run's episodes, rewards and source of groups."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from hybridrl.config.checks.frozen_models import named_models
from hybridrl.config.choices import Schedule
from hybridrl.config.schema import RolloutConfig, RunConfig
from hybridrl.config.user_code.classes import locate
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.requests import Generate
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.environments.base import EnvironmentPool
from hybridrl.rewards.scorer import RewardScorer, rule_config
from hybridrl.trainer.episodes.answers import AnswerImages
from hybridrl.trainer.episodes.base import Episodes, Generator, Wanted, whole_episodes
from hybridrl.trainer.episodes.conversations import (
    Conversations,
    Environment,
    EnvironmentRewards,
    FailureReasons,
    Limits,
    turn_tokens,
)
from hybridrl.trainer.episodes.turns import TurnEpisodes, Turns
from hybridrl.trainer.rewarding import FunctionRewards, RewardSource
from hybridrl.trainer.sampling.dynamic import DynamicSampling
from hybridrl.trainer.sampling.partial import GroupsInFlight
from hybridrl.trainer.sampling.source import Source, SourceParts, StepSource, WholeGroups
from hybridrl.trainer.sampling.split import GroupsAhead

# Sources by rollout.schedule.
SOURCES: Mapping[Schedule, Callable[[SourceParts], Source]] = {
    Schedule.sync: WholeGroups,
    Schedule.partial: GroupsInFlight,
    Schedule.split: GroupsAhead,
}
# Opens an agent: a web server, which other runs do not need.
AGENT = "hybridrl.agents.training.episodes.open_agent"


def open_environment(config: RunConfig, stack: ExitStack) -> Environment | None:
    """Start the processes of the environment or agent, which `stack` ends; None without both.

    Raises:
        ConfigError: the agent's endpoint cannot listen on agent.host and agent.port.
    """
    if config.agent is not None:
        agent: Environment = locate("agent", AGENT)(config, stack)
        return agent
    if (environment := config.environment) is None:
        return None
    pool = EnvironmentPool(
        environment.function,
        environment.args,
        timeout_s=config.reward.timeout_s,
        num_processes=config.reward.num_processes,
    )
    stack.enter_context(pool)
    limits = Limits(environment.max_turns, config.rollout.max_response_tokens)
    template, failures = config.data.chat_template_kwargs, FailureReasons()

    def episodes(rollout: WorkerGroup, decode: Decode, stack: ExitStack) -> Episodes:
        tokens = turn_tokens(config.model, environment, template)
        images = AnswerImages(config.model, named_models(config))
        conversations = Conversations(pool, tokens, decode, limits, failures, images)
        return TurnEpisodes(config.rollout, conversations, partial(rollout.call, "generate"))

    return Environment(episodes, failures, Wanted.engines)


def open_rewards(
    config: RunConfig, environment: Environment | None, decode: Decode, stack: ExitStack
) -> RewardSource:
    """Return the rewards of the environment or agent, or of the reward function."""
    if environment is not None:
        return EnvironmentRewards(decode, environment.failures, config.reward.failed_score)
    return FunctionRewards(decode, stack.enter_context(RewardScorer(config.reward)))


def generator_for(
    config: RunConfig,
    environment: Environment | None,
    rollout: WorkerGroup,
    decode: Decode,
    stack: ExitStack,
) -> Generator:
    """Return the generation of whole responses; `stack` ends what it opens."""
    if environment is None:
        call = partial(rollout.call, "generate")
        return one_turn(config.rollout, call)
    episodes = environment.episodes(rollout, decode, stack)
    placed = environment.engines, rollout.num_shards
    return Generator(episodes, partial(whole_episodes, episodes, *placed))


def one_turn(config: RolloutConfig, call: Generate) -> Generator:
    """Return the generation of responses of one turn, which are one call of the engines."""
    episodes = TurnEpisodes(config, Turns(), call)
    return Generator(episodes, lambda wanted: call(wanted.requests(config)))


def open_source(parts: SourceParts) -> StepSource:
    """Return the source of a run's groups, as rollout.schedule and algorithm say."""
    source = SOURCES[parts.config.rollout.schedule](parts)
    if parts.config.algorithm.max_sampling_rounds > 1:
        source = DynamicSampling(source, parts)
    return StepSource(source, parts)


def open_rules(config: RunConfig, stack: ExitStack) -> dict[str, RewardScorer]:
    """Return the rules of eval.rules by name; `stack` ends their processes."""
    return {
        name: stack.enter_context(RewardScorer(rule_config(config.reward, rule)))
        for name, rule in config.eval.rules.items()
    }
