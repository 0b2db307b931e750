"""Arguments and results of primitives, and the batch of a call's data.

A datum of N tokens is trained on N targets: targets[i] is what follows tokens[: i + 1]. In a batch
its first token is the prompt; the other tokens and the last target are the response. Log-probs are
those of the targets, which may be other tokens than those that follow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hybridrl.algorithms.primitive_losses import FIELDS
from hybridrl.data.batch import RolloutBatch, Values
from hybridrl.data.ragged import Ragged
from hybridrl.trainer.teaching import unsampled


class ServiceError(ValueError):
    """A call that cannot be done, by its own fault; the service goes on."""


@dataclass(frozen=True)
class Datum:
    """A sequence to train on.

    Attributes:
        tokens: N ids that the model reads, at least one.
        targets: N ids whose log-probs are computed: of the token after each.
        inputs: N numbers each, by name: what the loss takes (algorithms/primitive_losses.py).
    """

    tokens: Sequence[int]
    targets: Sequence[int]
    inputs: Mapping[str, Sequence[float]]


class Output(NamedTuple):
    """Result of a forward: each datum's log-probs of its targets, nats; sums over all tokens."""

    log_probs: list[list[float]]
    metrics: dict[str, float]


class AdamParams(NamedTuple):
    """Settings of one optimizer step; `grad_clip_norm` 0: gradients are not clipped."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class Sampling(NamedTuple):
    """Distribution of sampled tokens, and their end.

    Attributes:
        max_tokens: of an answer; None: as many as there is room for.
        top_k: None: all tokens.
        stop: texts or token ids that end an answer, besides the model's end tokens; the text or
            token is part of it.
        seed: equal calls with the same seed and weights return the same tokens.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop: tuple[str | int, ...] = ()
    seed: int | None = None


class Sample(NamedTuple):
    """An answer: its tokens, their log-probs in nats, and "stop" or "length"."""

    tokens: list[int]
    log_probs: list[float]
    stop_reason: str


def check(data: Sequence[Datum], names: Sequence[str], longest: int, vocabulary: int) -> None:
    """Check the data of a call whose loss takes the inputs `names`.

    Raises:
        ServiceError: names the first datum that does not fit.
    """
    if not data:
        raise ServiceError("there is no datum: expected at least one")
    for index, datum in enumerate(data):
        count = len(datum.tokens)
        if not 1 <= count <= longest:
            raise ServiceError(
                f"datum {index} has {count} tokens, expected 1 to {longest} "
                f"(rollout.max_prompt_tokens + rollout.max_response_tokens of the service)"
            )
        if datum.inputs.keys() != set(names):
            has, takes = ", ".join(datum.inputs) or "no inputs", ", ".join(names)
            raise ServiceError(f"datum {index} has {has}: the loss takes {takes}")
        rows = {"targets": datum.targets, **{name: datum.inputs[name] for name in names}}
        for name, row in rows.items():
            if len(row) != count:
                raise ServiceError(f"datum {index}: {len(row)} {name} for {count} tokens")
            if name != "targets" and not all(map(math.isfinite, row)):
                raise ServiceError(f"datum {index}: {name} are not all finite numbers")
        for ids in (datum.tokens, datum.targets):
            if not 0 <= min(ids) <= max(ids) < vocabulary:
                raise ServiceError(
                    f"datum {index} has a token outside of 0 to {vocabulary - 1}, the vocabulary"
                )


def batch_of(data: Sequence[Datum], names: Sequence[str], shards: int) -> RolloutBatch:
    """Return the batch of a call; its last rows fill the ranks and are not in response_mask."""
    rows = [*data, *[data[0]] * (-len(data) % shards)]
    responses = Ragged.from_rows([[*d.tokens[1:], d.targets[-1]] for d in rows], torch.int32)
    batch = unsampled(
        Ragged.from_rows([d.tokens[:1] for d in rows], torch.int32),
        responses,
        torch.arange(len(rows)),
    )
    is_own = torch.arange(len(rows)) < len(data)
    batch = replace(batch, response_mask=responses.like(responses.spread(is_own)))
    fields: dict[str, Values] = {
        "targets": Ragged.from_rows([d.targets for d in rows], torch.int32)
    }
    for name in names:
        dtype = torch.bool if FIELDS[name] == "loss_mask" else torch.float32
        fields[FIELDS[name]] = Ragged.from_rows([d.inputs[name] for d in rows], dtype)
    return batch.adding(**fields)
