"""Factories of generation and rewards: with an environment, without one, and for evaluations."""

from contextlib import ExitStack
from functools import partial

from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import Generate
from hybridrl.data.sources.prompts import PromptSets
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.environments.pool import EnvironmentPool
from hybridrl.rewards.scorer import RewardScorer, rule_config
from hybridrl.trainer.multi_turn.conversations import Conversations, Limits
from hybridrl.trainer.multi_turn.environment import EnvironmentRewards, RunEnvironment, turn_tokens
from hybridrl.trainer.multi_turn.generator import MultiTurn
from hybridrl.trainer.rewarding import FunctionRewards, RewardSource


def open_environment(config: RunConfig, stack: ExitStack) -> RunEnvironment | None:
    """Start the environment's processes, which `stack` ends; None without an environment."""
    if config.environment is None:
        return None
    pool = EnvironmentPool(
        config.environment.function,
        config.environment.args,
        timeout_s=config.reward.timeout_s,
        num_processes=config.reward.num_processes,
    )
    return RunEnvironment(stack.enter_context(pool))


def open_rewards(
    config: RunConfig, environment: RunEnvironment | None, decode: Decode, stack: ExitStack
) -> RewardSource:
    """Return the rewards of the environment, or of the reward function in its own processes."""
    if environment is not None:
        return EnvironmentRewards(decode, environment.failures, config.reward.failed_score)
    return FunctionRewards(decode, stack.enter_context(RewardScorer(config.reward)))


def generator_for(
    config: RunConfig,
    environment: RunEnvironment | None,
    rollout: WorkerGroup,
    prompts: PromptSets,
    decode: Decode,
) -> Generate:
    """Return the multi-turn generation if there is an environment, else the single-turn one."""
    single_turn = partial(rollout.call, "generate")
    if config.environment is None or environment is None:
        return single_turn
    conversations = Conversations(
        environment.processes,
        turn_tokens(config.model.path, config.environment),
        decode,
        {prompt.prompt_id: prompt.example for prompt in [*prompts.train, *prompts.held_out]},
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
