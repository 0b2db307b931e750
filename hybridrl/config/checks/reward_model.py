"""Checks of the use of the reward model's scores."""

from collections.abc import Iterator

from hybridrl.config.checks.frozen_models import REWARD_MODEL_PATH
from hybridrl.config.errors import Problem, must_be
from hybridrl.config.estimators import BUILT_IN_ESTIMATORS, estimator_of, is_supervised
from hybridrl.config.schema import RunConfig

NO_REWARD = "hybridrl.rewards.none.score"


def reward_model_problems(config: RunConfig) -> Iterator[Problem]:
    """Find runs without any score, and settings that need scores before the reward model runs."""
    model = config.reward_model
    learns = config.earns_rewards or is_supervised(config)
    unrewarded = config.reward.function == NO_REWARD and not learns
    unrewarded &= config.teacher is None or config.teacher.reward_coef > 0
    if unrewarded and (model is None or model.weight == 0):
        without = "no reward model" if model is None else "reward_model.weight = 0"
        why = f"with {without} every response scores 0, so nothing could be learned"
        remedy = f"Set reward_model=default {REWARD_MODEL_PATH}=<checkpoint>, or another reward"
        yield Problem("no_reward", "reward.function", NO_REWARD, "another", why, remedy)
    if model is None:
        return
    rounds, more = config.algorithm.max_sampling_rounds, ", or reward_model=none"
    if rounds > 1:
        why = (
            "resampling uses the scores of reward.function while vLLM is awake; the reward model "
            "runs later"
        )
        yield must_be("late_scores", "algorithm.max_sampling_rounds", rounds, 1, why, more)
    advantage, key = config.algorithm.advantage, "algorithm.advantage"
    if estimator_of(advantage).needs_greedy_responses:
        others = [name for name, e in BUILT_IN_ESTIMATORS.items() if not e.needs_greedy_responses]
        why = "the reward model does not score the greedy responses of its baseline"
        remedy = f"Set {key} to one of {', '.join(others)}{more}"
        yield Problem("unscored_baseline", key, advantage, "another", why, remedy)
