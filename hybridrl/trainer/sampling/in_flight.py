"""Responses in flight: begun in one step and continued in later ones (rollout.schedule=partial)."""

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrl.data.sources.prompts import Prompt
from hybridrl.rewards.processes.messages import FailureKind
from hybridrl.trainer.sampling.drafts import Draft

_NUMPY = {"tokens": np.int32, "log_probs": np.float32, "versions": np.int32, "mask": np.bool_}


@dataclass(frozen=True)
class Group:
    """All responses to one prompt.

    Attributes:
        step: in which the first tokens were sampled; seeds derive from it.
        version: number of the weights in that step; no token is older.
        engine: index of the engine that samples them.
        first_sample: index of the first response among all to this prompt in `step`.
    """

    prompt: Prompt
    step: int
    version: int
    engine: int
    drafts: tuple[Draft, ...]
    first_sample: int = 0

    @property
    def is_finished(self) -> bool:
        """True if all responses are finished."""
        return all(draft.finished for draft in self.drafts)

    def with_drafts(self, new: Mapping[int, Draft]) -> "Group":
        """Return this group with other responses at some indices."""
        drafts = tuple(new.get(index, draft) for index, draft in enumerate(self.drafts))
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
            "first_sample": group.first_sample,
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
            group["first_sample"],
        )
        for group in state
    )


def _encode_draft(draft: Draft) -> dict[str, Any]:
    return {
        name: b64encode(value.numpy().astype(_NUMPY[name]).tobytes()).decode()
        if isinstance(value, Tensor)
        else value
        for name, value in vars(draft).items()
    }


def _decode_draft(state: Mapping[str, Any]) -> Draft:
    arrays = {
        name: torch.from_numpy(np.frombuffer(b64decode(state[name]), dtype).copy())
        for name, dtype in _NUMPY.items()
    }
    failure = state["failure"] and FailureKind(state["failure"])
    return Draft(**{**state, **arrays, "failure": failure})
