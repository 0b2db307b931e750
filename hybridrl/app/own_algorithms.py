"""Trials of user code on a small batch, before a run; `try_out` calls them in another process."""

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from hybridrl.algorithms.masked import WrongReturn
from hybridrl.algorithms.token_loss import as_token_loss
from hybridrl.config.annotations import NoValue, Unusable
from hybridrl.config.estimators import SETTINGS, estimator_of
from hybridrl.config.policy_losses import policy_loss_of
from hybridrl.config.sections import AlgorithmConfig
from hybridrl.config.user_code.classes import locate
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.trainer.advantage import AdvantageEstimator


def try_estimator(
    key: str, path: str, config: AlgorithmConfig, responses_per_prompt: int
) -> Iterator[str]:
    """Estimate advantages as the trainer does, and yield what is wrong.

    There is no trial if the config lacks a setting, which is a problem of its own.
    """
    estimator = estimator_of(path)
    if any(isinstance(vars(config)[n], NoValue) for n in (*SETTINGS, "whiten_advantages")):
        return
    least = max(2, config.pass_k + 1) if estimator.compares_groups else 1
    batch = toy_batch(max(least, responses_per_prompt))
    try:
        AdvantageEstimator(config).estimate(batch, batch.scores)
    except WrongReturn as error:
        yield f"{key} = {error}"


def try_loss(key: str, path: str, config: AlgorithmConfig) -> Iterator[str]:
    """Compute a policy loss and its gradient, and yield what is wrong.

    There is no trial if the config lacks a setting, which is a problem of its own.
    """
    loss, args = policy_loss_of(path), {}
    with suppress(Unusable):
        args = config.loss.args
    if loss.settings.keys() != args.keys():
        return
    tokens = toy_tokens()
    log_probs, mask = tokens["log_probs"], tokens["response_mask"]
    returned = locate(key, path)(**{name: tokens[name] for name in loss.tensors}, **args)
    try:
        values = as_token_loss(returned, path, log_probs).values
    except WrongReturn as error:
        yield f"{key} = {error}"
        return
    if not values.requires_grad:
        yield f"{key} = {path} returned a loss without gradient.\nCompute it from log_probs."
        return
    values[mask].sum().backward()
    assert log_probs.grad is not None
    for what, numbers in (("loss", values), ("gradient", log_probs.grad)):
        if not bool(numbers[mask].isfinite().all()):
            yield f"{key} = {path} computed a {what} that is NaN or infinite on a small batch."
            return


def toy_batch(group_size: int) -> RolloutBatch:
    """Return at least 9 responses of 1 to 5 tokens, in at least 3 groups.

    Rewards are 0 and 1, on the last token; those of the last group are all 1.
    """
    rows = torch.arange(max(3, -(-9 // group_size)) * group_size)
    lengths = rows * 3 % 5 + 1
    num_tokens = int(lengths.sum())
    rewards = torch.zeros(num_tokens)
    rewards[lengths.cumsum(0) - 1] = ((rows % 2 == 1) | (rows >= len(rows) - group_size)).float()

    def ragged(values: Tensor) -> Ragged:
        return Ragged(values, lengths)

    return RolloutBatch(
        prompts=Ragged(rows.int(), torch.ones_like(rows)),
        responses=ragged(torch.zeros(num_tokens, dtype=torch.int32)),
        response_mask=ragged(torch.ones(num_tokens, dtype=torch.bool)),
        rollout_log_probs=ragged(torch.linspace(-3.0, -0.1, num_tokens)),
        group_id=rows // group_size * 7 + 3,  # ids of prompts, not counted from 0
        weight_version=torch.zeros_like(rows),
        truncated=torch.zeros_like(rows, dtype=torch.bool),
        added={
            "scores": ragged(rewards),
            "values": ragged(torch.linspace(0.0, 1.0, num_tokens)),
            "baseline_rewards": (rows % 3 == 0).float(),
        },
    )


def toy_tokens() -> dict[str, Tensor]:
    """Return the inputs of a policy loss by name, [N] each; one token does not count."""
    batch = toy_batch(3)
    sampled, rows = batch.rollout_log_probs.values, batch.responses.row_ids()
    places = torch.arange(len(sampled))
    return {
        "log_probs": sampled.clone().requires_grad_(),
        "old_log_probs": sampled + 0.2 * (places % 5 - 2),
        "rollout_log_probs": sampled - 0.01,
        "advantages": rows % 3 - 1.0,
        "response_mask": places != 4,
        "sequence_id": rows,
        "ref_log_probs": sampled - 0.1 * (places % 3 - 1),
        "preferred": rows % 2 == 0,
        "kl_baseline": torch.full_like(sampled, 0.1),
    }
