"""Factories of a run's episodes, rewards and source of groups."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from hybridrl.config.choices import Schedule
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.classes import locate
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import PromptBatch
from hybridrl.data.sources.prompts import PromptSets
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.environments.pool import EnvironmentPool
from hybridrl.rewards.scorer import RewardScorer, rule_config
from hybridrl.trainer.episodes.base import Episodes, Generator, OneCall, WholeEpisodes
from hybridrl.trainer.episodes.conversations import Conversations, Limits
from hybridrl.trainer.episodes.environment import EnvironmentRewards, FailureReasons, turn_tokens
from hybridrl.trainer.episodes.turns import OneTurn, TurnEpisodes
from hybridrl.trainer.rewarding import FunctionRewards, RewardSource
from hybridrl.trainer.sampling.dynamic import DynamicSampling
from hybridrl.trainer.sampling.partial import GroupsInFlight
from hybridrl.trainer.sampling.source import Source, SourceParts, StepSource
from hybridrl.trainer.sampling.split import GroupsAhead
from hybridrl.trainer.sampling.whole import WholeGroups

# Sources by rollout.schedule.
SOURCES: Mapping[Schedule, Callable[[SourceParts], Source]] = {
    Schedule.sync: WholeGroups,
    Schedule.partial: GroupsInFlight,
    Schedule.split: GroupsAhead,
}
# Opens the programs of an agent: a web server, which other runs do not need.
PROGRAMS = "hybridrl.trainer.agents.run.Programs"


class Environment(Protocol):
    """Environment or agent of a run, whose processes are running.

    Attributes:
        failures: those that generation met in them.
    """

    failures: FailureReasons

    def episodes(self, rollout: WorkerGroup, decode: Decode, stack: ExitStack) -> Episodes:
        """Return episodes on the engines `rollout`; `stack` ends what they open."""
        ...

    def engines(self, request: PromptBatch, num_engines: int) -> list[int]:
        """Return the engine of each prompt."""
        ...


@dataclass(frozen=True)
class Environments:
    """`Environment` whose processes answer the turns of conversations."""

    config: RunConfig
    pool: EnvironmentPool
    failures: FailureReasons = field(default_factory=FailureReasons)

    @classmethod
    def open(cls, config: RunConfig, stack: ExitStack) -> "Environments":
        """Start the processes, which `stack` ends."""
        assert config.environment is not None
        pool = EnvironmentPool(
            config.environment.function,
            config.environment.args,
            timeout_s=config.reward.timeout_s,
            num_processes=config.reward.num_processes,
        )
        return cls(config, stack.enter_context(pool))

    def episodes(self, rollout: WorkerGroup, decode: Decode, stack: ExitStack) -> Episodes:
        """Return conversations with the environments."""
        config, environment = self.config, self.config.environment
        assert environment is not None
        conversations = Conversations(
            self.pool,
            turn_tokens(config.model, environment, config.data.chat_template_kwargs),
            decode,
            Limits(environment.max_turns, config.rollout.max_response_tokens),
            self.failures,
        )
        return TurnEpisodes(config.rollout, conversations, partial(rollout.call, "generate"))

    def engines(self, request: PromptBatch, num_engines: int) -> list[int]:
        """Balance the engines by the lengths that earlier responses had."""
        return request.engines(num_engines)


def open_environment(config: RunConfig, stack: ExitStack) -> Environment | None:
    """Start the processes of the environment or agent, which `stack` ends; None without both.

    Raises:
        ConfigError: the agent's endpoint cannot listen on agent.host and agent.port.
    """
    if config.agent is not None:
        programs: Environment = locate("agent", PROGRAMS).open(config, stack)
        return programs
    return None if config.environment is None else Environments.open(config, stack)


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
    prompts: PromptSets,
    decode: Decode,
    stack: ExitStack,
) -> Generator:
    """Return the generation of whole responses; `stack` ends what it opens."""
    if environment is None:
        call = partial(rollout.call, "generate")
        return OneCall(TurnEpisodes(config.rollout, OneTurn(), call), call)
    return WholeEpisodes(
        environment.episodes(rollout, decode, stack),
        {prompt.prompt_id: prompt for prompt in [*prompts.train, *prompts.held_out]},
        partial(environment.engines, num_engines=rollout.num_shards),
    )


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
