"""Metrics that only health checks need: of a step's responses, and of the prompts."""

import math
from collections import Counter
from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridrl.config.schema import ModelConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged, in_chunks
from hybridrl.data.sources.tokenizer import Decode
from hybridrl.models.resolve import model_folder
from hybridrl.models.vocabulary import stop_token_ids
from hybridrl.trainer.record import Row
from hybridrl.trainer.tracking.token_log import distances

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens that are named.
SHOWN = 3


class MarkedTokens(NamedTuple):
    """Token ids of a model, int64.

    Attributes:
        ends: those that end a response.
        special: the tokenizer's other special ones.
    """

    ends: Tensor
    special: Tensor


def marked_tokens(model: ModelConfig, tokenizer: "PreTrainedTokenizerBase") -> MarkedTokens:
    """Return a model's end tokens and, of its tokenizer's special ones, the others."""
    ends = stop_token_ids(model_folder(model))
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(id for id, token in added if token.special)}
    groups = (ends, sorted(special - {*ends}))
    return MarkedTokens(*(torch.tensor(ids, dtype=torch.int64) for ids in groups))


def response_measures(batch: RolloutBatch, tokens: MarkedTokens) -> Row:
    """Compute shares of a step's responses, which have at least one token each.

    An agent's episode is one response, whatever its token sequences.

    Returns:
        response/empty_fraction: the policy sampled nothing but end tokens.
        response/unended_fraction: no end token and not truncated; null in conversations, which
            environments may end.
        response/special_fraction: special tokens other than end tokens.
        response/repeated_fraction: see `repeated`; null where prompts have one response.
    """
    batch = batch.by_episode()
    responses, sampled = batch.responses, batch.response_mask.values
    is_end, is_special = _is_marked(responses.values, tokens)
    unended = ~is_end[responses.lengths.cumsum(0) - 1] & ~batch.truncated
    has_text, has_special = (
        responses.like(kind & sampled).counts() > 0 for kind in (~is_end, is_special)
    )
    return {
        "response/empty_fraction": _share(~has_text),
        "response/unended_fraction": _share(unended) if batch.conversation is None else None,
        "response/special_fraction": _share(has_special),
        "response/repeated_fraction": repeated(batch),
    }


def _is_marked(values: Tensor, tokens: MarkedTokens) -> tuple[Tensor, Tensor]:
    """Return [N] bool each: which values are ends, and which are other special tokens.

    One look-up in a table: torch.isin takes up to 60 times as long, more with each special token.
    """
    most = max(int(ids.max()) for ids in (values, *tokens) if len(ids))
    kinds = np.zeros(most + 1, np.uint8)
    kinds[tokens.ends], kinds[tokens.special] = 1, 2
    kind = torch.from_numpy(kinds[values.numpy()])
    return kind == 1, kind == 2


def _share(rows: Tensor) -> float:
    return float(rows.float().mean())


def repeated(batch: RolloutBatch) -> float | None:
    """Compute the share of equal pairs of responses to a prompt, less the expected share.

    A response of probability p equals another sample with probability p. So the mean of p over
    the samples of a prompt estimates the share of equal pairs without bias. The result is the
    lower end of the difference's interval of two standard errors over prompts. It is below 0 for
    independent samples, and up to 1 for copies.
    """
    sampled, mask = batch.rollout_log_probs.values, batch.response_mask.values
    sampled = sampled if bool(mask.all()) else sampled.where(mask, 0.0)
    chances = torch.segment_reduce(sampled, "sum", lengths=batch.responses.lengths).exp().tolist()
    texts = [hash(row.tobytes()) for row in batch.responses.views()]
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(batch.group_id.tolist()):
        groups.setdefault(group, []).append(index)
    pairs, excess = 0.0, []
    for rows in groups.values():
        of_group = _pairs(len(rows))
        equal = sum(map(_pairs, Counter(texts[row] for row in rows).values()))
        excess.append(equal - of_group * fmean(chances[row] for row in rows))
        pairs += of_group
    return (sum(excess) - 2 * math.hypot(*excess)) / pairs if pairs else None


def _pairs(count: int) -> float:
    return count * (count - 1) / 2


def carriers(batch: RolloutBatch, one: Ragged, other: Ragged, decode: Decode) -> str:
    """Name the tokens whose log-probs `one` and `other`, in nats, differ most."""
    distance = in_chunks(distances, one.values, other.values, batch.response_mask.values)
    farthest = distance.topk(min(SHOWN, len(distance))).indices
    rows = batch.responses.row_ids()[farthest].tolist()
    starts = batch.responses.lengths.cumsum(0) - batch.responses.lengths
    tokens = zip(farthest.tolist(), rows, strict=True)
    return "most in " + ", ".join(
        f"{decode([[int(batch.responses.values[index])]])[0]!r} (response {row}, token "
        f"{index - int(starts[row])}: {float(distance[index]):.3g} nats)"
        for index, row in tokens
    )


def token_details(
    batch: RolloutBatch, updated: Callable[[], Ragged], decode: Decode
) -> dict[str, Callable[[], str]]:
    """Return what checks say of single tokens, by check.

    `updated` returns the log-probs after the step's updates, in the real part.
    """
    old = batch.old_log_probs
    details = {
        "exploded_ratio": lambda: carriers(batch, old.like(updated().values.real), old, decode)
    }
    if "ref_log_probs" in batch.added:
        details["exploded_kl"] = lambda: carriers(batch, old, batch.ref_log_probs, decode)
    return details
