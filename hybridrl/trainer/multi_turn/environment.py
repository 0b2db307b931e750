"""Rewards that responses have earned from an environment while they were generated."""

from collections.abc import Mapping
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import EnvironmentConfig
from hybridrl.data.batch import Generate, Rollout, RolloutBatch
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.tokenizer import Decode, load_tokenizer
from hybridrl.data.turns import TurnTokens
from hybridrl.models.resolve import plain_folder
from hybridrl.rewards.scorer import Failure
from hybridrl.rollout.sampling import stop_token_ids
from hybridrl.trainer.multi_turn.conversation_failures import Failures
from hybridrl.trainer.multi_turn.conversations import Conversations, Environments, Limits
from hybridrl.trainer.rewarding import Rewarded


class EnvironmentJudge:
    """The environment's part in a run: it answers the model's turns, and its rewards count.

    Args:
        environments: answer the turns.
        tokens: makes token ids of the answers.
        decode: token ids of many responses -> their texts.
        examples: prompt id -> the row of the data set.
        limits: what ends a conversation that nobody has ended.
        failed_score: of a response whose environment failed.
    """

    def __init__(
        self,
        environments: Environments,
        tokens: TurnTokens,
        decode: Decode,
        examples: Mapping[int, dict[str, Any]],
        limits: Limits,
        failed_score: float,
    ) -> None:
        self._environments = environments
        self._tokens = tokens
        self._decode = decode
        self._examples = examples
        self._limits = limits
        self._failed_score = failed_score
        self._failures = Failures()

    def in_turns(self, generate: Generate) -> Generate:
        """Generation in turns with the environment."""
        return Conversations(
            generate,
            self._environments,
            self._tokens,
            self._decode,
            self._examples,
            self._limits,
            self._failures,
        )

    def score(self, prompts: list[Prompt], batch: RolloutBatch) -> Rewarded:
        """The responses' texts, the environment's among them, and the sums of their rewards."""
        assert batch.environment_rewards is not None and batch.environment_failures is not None
        failures = [
            Failure(index, *self._failures.told(number), traceback="")
            for index, number in enumerate(batch.environment_failures.tolist())
            if number
        ]
        scores = batch.environment_rewards.tolist()
        for failure in failures:
            scores[failure.index] = self._failed_score
        texts = self._decode(row.tolist() for row in batch.responses.rows())
        return Rewarded(texts, scores, failures)


def turn_metrics(rollout: Rollout) -> dict[str, float]:
    """What is known of a step's conversations as such; nothing without an environment."""
    batch = rollout.batch
    if batch.turns is None:
        return {}
    turns = batch.turns.float()
    return {
        "rollout/turns_mean": float(turns.mean()),
        "rollout/turns_max": float(turns.max()),
        "environment/tokens_mean": float((~batch.response_mask.values).sum()) / len(batch),
        "environment/seconds": rollout.environment_s,
    }


def turn_tokens(model_path: str, config: EnvironmentConfig) -> TurnTokens:
    """Those of a model, as an environment's config asks.

    Raises:
        ConfigError: there is no such model, or a stop string is not one token of it.
    """
    ends = stop_token_ids(plain_folder(model_path))
    return TurnTokens(load_tokenizer(model_path), ends, config.stop, config.role)


def stop_problems(model_path: str, config: EnvironmentConfig) -> list[str]:
    """What is wrong with environment.stop for a model."""
    try:
        turn_tokens(model_path, config)
    except ConfigError as error:
        return error.problems
    return []
