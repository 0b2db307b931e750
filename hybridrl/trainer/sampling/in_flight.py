"""Responses in flight: begun in one step and continued in later ones (rollout.schedule=partial)."""

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrl.data.sources.prompts import Prompt

_NUMPY = {"tokens": np.int32, "log_probs": np.float32, "versions": np.int32}


@dataclass(frozen=True)
class Draft:
    """A response so far.

    Attributes:
        tokens: [n] int32.
        log_probs: [n] float32, nats, of each token when it was sampled.
        versions: [n] int32, number of the weights that sampled each token.
        finished: it has its last token.
        truncated: the length limit ended it.
    """

    tokens: Tensor
    log_probs: Tensor
    versions: Tensor
    finished: bool = False
    truncated: bool = False

    @classmethod
    def empty(cls) -> "Draft":
        """Return a response without tokens."""
        none = torch.empty(0, dtype=torch.int32)
        return cls(none, torch.empty(0, dtype=torch.float32), none)

    def __len__(self) -> int:
        return len(self.tokens)

    def continued(
        self, tokens: Tensor, log_probs: Tensor, version: int, *, finished: bool, truncated: bool
    ) -> "Draft":
        """Return this response with more tokens, all sampled with weights `version`."""
        return Draft(
            torch.cat([self.tokens, tokens]),
            torch.cat([self.log_probs, log_probs]),
            torch.cat([self.versions, torch.full((len(tokens),), version, dtype=torch.int32)]),
            finished,
            truncated,
        )


@dataclass(frozen=True)
class Group:
    """All responses to one prompt.

    Attributes:
        step: in which the first tokens were sampled; seeds derive from it.
        version: number of the weights in that step; no token is older.
        engine: index of the engine that samples them.
    """

    prompt: Prompt
    step: int
    version: int
    engine: int
    drafts: tuple[Draft, ...]

    @property
    def is_finished(self) -> bool:
        """True if all responses are finished."""
        return all(draft.finished for draft in self.drafts)

    def with_draft(self, index: int, draft: Draft) -> "Group":
        """Return this group with another response at an index."""
        drafts = (*self.drafts[:index], draft, *self.drafts[index + 1 :])
        return replace(self, drafts=drafts)


def due(groups: Sequence[Group], version: int, max_versions: int, per_step: int) -> int:
    """Return how many of the oldest groups must be trained in the step with weights `version`.

    Then `per_step` groups in each later step are enough that no token is older than `max_versions`
    updates when it is trained. The result is at most per_step while at most
    (max_versions + 1) * per_step groups are in flight.

    Args:
        groups: oldest first.
    """
    needed = [
        index + 1 - per_step * (group.version + max_versions - version)
        for index, group in enumerate(groups)
    ]
    return max(0, *needed) if needed else 0


def encode(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return plain JSON; numbers keep their bits."""
    return [
        {
            "prompt_id": group.prompt.prompt_id,
            "step": group.step,
            "version": group.version,
            "engine": group.engine,
            "drafts": [_encode_draft(draft) for draft in group.drafts],
        }
        for group in groups
    ]


def decode(
    state: Sequence[Mapping[str, Any]], prompt_of: Callable[[int], Prompt]
) -> tuple[Group, ...]:
    """Return the groups of a value of `encode`; `prompt_of` finds a prompt by its id."""
    return tuple(
        Group(
            prompt_of(group["prompt_id"]),
            group["step"],
            group["version"],
            group["engine"],
            tuple(_decode_draft(draft) for draft in group["drafts"]),
        )
        for group in state
    )


def _encode_draft(draft: Draft) -> dict[str, Any]:
    arrays = {
        name: b64encode(getattr(draft, name).numpy().astype(dtype).tobytes()).decode()
        for name, dtype in _NUMPY.items()
    }
    return arrays | {"finished": draft.finished, "truncated": draft.truncated}


def _decode_draft(state: Mapping[str, Any]) -> Draft:
    arrays = {
        name: torch.from_numpy(np.frombuffer(b64decode(state[name]), dtype).copy())
        for name, dtype in _NUMPY.items()
    }
    return Draft(**arrays, finished=state["finished"], truncated=state["truncated"])
