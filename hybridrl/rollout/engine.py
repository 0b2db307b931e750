"""Generation on one copy of the rollout weights: what the rest of the program relies on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from hybridrl.data.batch import PromptBatch
from hybridrl.data.ragged import Ragged
from hybridrl.distributed.regions import Trace


class EnginePart(Enum):
    """What wakes separately; weights first."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


@dataclass(frozen=True)
class Generated:
    """Responses, those of each prompt together, in the order of the prompts.

    Attributes:
        responses: ragged int32, the end token included.
        log_probs: ragged float32, log pi of each token under what was sampled from, nats.
        truncated: [B] bool, true where the length limit ended the response.
        first_token_s: seconds from the call to the first sampled token; 0 where there was none.
        seconds: of the whole call.
    """

    responses: Ragged
    log_probs: Ragged
    truncated: Tensor
    first_token_s: float
    seconds: float


class RolloutEngine(Protocol):
    """One rank's part of an engine that generates with weights which others write.

    What sleeps between rollouts the engine's config decides; an engine is built in that state, with
    weights that mean nothing yet. All its ranks get the same calls with the same arguments.
    """

    @property
    def awake(self) -> frozenset[EnginePart]:
        """The parts that have their memory and keep what is in it."""
        ...

    @property
    def keeps_weights(self) -> bool:
        """Whether what was written into the parameters outlives `sleep`."""
        ...

    def trace(self, sources: Sequence[tuple[str, tuple[int, ...]]]) -> Trace:
        """What the loader would write on this rank, given checkpoint tensors of these shapes."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The live parameters by name, and the buffers that `trace` saw written.

        Where they lie does not change.
        """
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Let the engine's own loader write whole checkpoint tensors into the parameters."""
        ...

    def check(self) -> None:
        """Raise if the parameters no longer lie where `tensors` said."""
        ...

    def wake(self, part: EnginePart) -> None:
        """Give a sleeping part its memory back: weights undefined, KV cache empty."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of all prompts; due whenever the weights have changed."""
        ...

    def sleep(self) -> None:
        """Give back the memory of the parts that sleep between rollouts, and what is in it."""
        ...

    def generate(self, prompts: PromptBatch) -> Generated:
        """Sample responses; the engine must be awake."""
        ...
