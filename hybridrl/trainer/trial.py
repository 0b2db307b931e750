"""Trials of user code on a small batch, before a run; `try_out` calls them in another process."""

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from hybridrl.algorithms.masked import WrongReturn
from hybridrl.algorithms.token_loss import aggregate, as_token_loss
from hybridrl.config.algorithm_schema import AlgorithmConfig
from hybridrl.config.annotations import Unusable
from hybridrl.config.estimators import SETTINGS, estimator_of
from hybridrl.config.policy_losses import policy_loss_of
from hybridrl.config.user_code.classes import locate
from hybridrl.data.batch import RolloutBatch, Totals
from hybridrl.data.ragged import Ragged
from hybridrl.trainer.advantage import AdvantageEstimator

# Longest response of the batch, in tokens.
MAX_TOKENS = 5


def try_estimator(
    key: str, path: str, config: AlgorithmConfig, responses_per_prompt: int
) -> Iterator[str]:
    """Estimate advantages as the trainer does, and yield what is wrong.

    Args:
        key, path: of the estimator, for messages.
        config: of the run; there is no trial if it lacks a setting.
        responses_per_prompt: of the run; an estimator that compares them gets at least 2.
    """
    estimator = estimator_of(path)
    with suppress(Unusable):
        if not vars(config).keys() >= {*SETTINGS}:
            return
        least = max(2, config.pass_k + 1) if estimator.compares_groups else 1
        batch = toy_batch(max(least, responses_per_prompt))
        assert batch.scores is not None
        try:
            AdvantageEstimator(config).estimate(batch, batch.scores)
        except WrongReturn as error:
            yield f"{key} = {error}"


def try_loss(key: str, path: str, config: AlgorithmConfig) -> Iterator[str]:
    """Compute a policy loss and its gradient as the actor does, and yield what is wrong.

    There is no trial if the loss lacks a setting, which is a problem of its own.
    """
    with suppress(Unusable):
        loss, args = policy_loss_of(path), config.loss.args
        if loss.settings.keys() != args.keys():
            return
        tokens = toy_tokens()
        log_probs, mask = tokens["log_probs"], tokens["response_mask"]
        found = locate(key, path)(**{name: tokens[name] for name in loss.tensors}, **args)
        try:
            values = as_token_loss(found, path, log_probs).values
        except WrongReturn as error:
            yield f"{key} = {error}"
            return
        if not values.requires_grad:
            yield (
                f"{key} = {path} returned a loss without gradient: it does not depend on "
                f"log_probs, or is detached from them.\nCompute it from log_probs."
            )
            return
        totals = Totals(int(mask.sum()), 3)
        kind = config.aggregation
        aggregate(kind, values, mask, tokens["sequence_id"], totals, MAX_TOKENS).backward()
        assert log_probs.grad is not None
        wrong = [
            what
            for what, numbers in (("loss", values.detach()), ("gradient", log_probs.grad))
            if not bool(numbers[mask].isfinite().all())
        ]
        if wrong:
            yield f"{key} = {path} computed a {wrong[0]} that is NaN or infinite on a small batch."


def toy_batch(group_size: int) -> RolloutBatch:
    """Return at least 9 responses of 1 to MAX_TOKENS tokens, in groups of at least 3 prompts.

    Rewards are 0 and 1, on the last token; those of the last group are all 1.
    """
    groups = max(3, -(-9 // group_size))
    rows = torch.arange(groups * group_size)
    lengths = rows * 3 % MAX_TOKENS + 1
    num_tokens = int(lengths.sum())
    rewards = torch.zeros(num_tokens)
    rewards[lengths.cumsum(0) - 1] = ((rows % 2 == 1) | (rows >= len(rows) - group_size)).float()

    def ragged(values: Tensor) -> Ragged:
        return Ragged(values, lengths)

    return RolloutBatch(
        prompts=Ragged(rows.int(), torch.ones_like(rows)),
        responses=ragged(torch.zeros(num_tokens, dtype=torch.int32)),
        response_mask=ragged(torch.ones(num_tokens, dtype=torch.bool)),
        rollout_log_probs=ragged(torch.full((num_tokens,), -1.0)),
        group_id=rows // group_size * 7 + 3,  # ids of prompts, not counted from 0
        weight_version=torch.zeros_like(rows),
        truncated=torch.zeros_like(rows, dtype=torch.bool),
        scores=ragged(rewards),
        values=ragged(torch.linspace(0.0, 1.0, num_tokens)),
        baseline_rewards=(rows % 3 == 0).float(),
    )


def toy_tokens() -> dict[str, Tensor]:
    """Return the flat tensors [N] of three responses by name; one token does not count."""
    sequence_id = torch.tensor([0] * 2 + [1] * MAX_TOKENS + [2] * 3)
    num_tokens = len(sequence_id)
    log_probs = torch.linspace(-3.0, -0.1, num_tokens)
    return {
        "log_probs": log_probs.clone().requires_grad_(),
        "old_log_probs": log_probs + torch.linspace(-0.4, 0.4, num_tokens).flip(0),
        "rollout_log_probs": log_probs - 0.01,
        "advantages": torch.tensor([1.0, -0.5, 0.0])[sequence_id],
        "response_mask": torch.arange(num_tokens) != 4,
        "sequence_id": sequence_id,
    }
