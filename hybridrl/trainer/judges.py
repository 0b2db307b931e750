"""Who judges responses: the reward function or the environment, and the rules of evaluations."""

from contextlib import ExitStack

from hybridrl.config.schema import RunConfig
from hybridrl.data.sources.prompt_sets import PromptSets
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.environments.pool import EnvironmentPool
from hybridrl.rewards.scorer import RewardScorer
from hybridrl.trainer.multi_turn.conversations import Limits
from hybridrl.trainer.multi_turn.environment import EnvironmentJudge, turn_tokens
from hybridrl.trainer.rewarding import Judge, Rewarder


def open_judge(config: RunConfig, prompts: PromptSets, decode: Decode, stack: ExitStack) -> Judge:
    """The environment, or without one the reward function; `stack` ends its processes."""
    reward, environment = config.reward, config.environment
    if environment is None:
        scorer = RewardScorer(
            reward.function,
            reward.args,
            timeout_s=reward.timeout_s,
            num_processes=reward.num_processes,
            failed_score=reward.failed_score,
        )
        return Rewarder(decode, stack.enter_context(scorer))
    pool = EnvironmentPool(
        environment.function,
        environment.args,
        timeout_s=reward.timeout_s,
        num_processes=reward.num_processes,
    )
    return EnvironmentJudge(
        stack.enter_context(pool),
        turn_tokens(config.model.path, environment),
        decode,
        {prompt.prompt_id: prompt.example for prompt in [*prompts.train, *prompts.held_out]},
        Limits(environment.max_turns, config.rollout.max_response_tokens),
        reward.failed_score,
    )


def open_rules(config: RunConfig, stack: ExitStack) -> dict[str, RewardScorer]:
    """The rules of eval.rules by name; `stack` ends their processes."""
    return {
        name: stack.enter_context(
            RewardScorer(
                rule.function,
                rule.args,
                timeout_s=config.reward.timeout_s,
                num_processes=1,
                failed_score=0.0,
            )
        )
        for name, rule in config.eval.rules.items()
    }
