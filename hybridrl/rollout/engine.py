"""Protocol of a rollout engine: generation on one copy of the rollout weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from hybridrl.data.batch import PromptBatch
from hybridrl.data.ragged import Ragged
from hybridrl.distributed.regions import Trace


class EnginePart(Enum):
    """Parts of an engine that wake separately; weights first."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


@dataclass(frozen=True)
class Generated:
    """Responses in the order of the prompts, those of one prompt together.

    Attributes:
        responses: ragged int32, the end token included.
        log_probs: ragged float32, log pi of each token under the sampled distribution, nats.
        truncated: [B] bool, true where the length limit ended the response.
        first_token_s: seconds from the call to the first sampled token; 0 where there was none.
        seconds: seconds of the whole call.
    """

    responses: Ragged
    log_probs: Ragged
    truncated: Tensor
    first_token_s: float
    seconds: float


class RolloutEngine(Protocol):
    """One rank's part of a rollout engine, whose weights a reshard writes.

    The engine's config selects the parts that sleep between rollouts. A new engine is in that
    state, with undefined weights. All its ranks get the same calls with the same arguments.
    """

    @property
    def awake(self) -> frozenset[EnginePart]:
        """Parts that have memory and keep its content."""
        ...

    @property
    def keeps_weights(self) -> bool:
        """True if the content of the parameters outlives `sleep`."""
        ...

    def trace(self, sources: Sequence[tuple[str, tuple[int, ...]]]) -> Trace:
        """Trace the writes of the loader on this rank, given the shapes of a checkpoint."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the live parameters by name, and the buffers that the loader writes.

        Their addresses never change.
        """
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write whole checkpoint tensors into the parameters with the engine's own loader."""
        ...

    def check(self) -> None:
        """Raise if an address of a parameter has changed."""
        ...

    def wake(self, part: EnginePart) -> None:
        """Allocate the memory of a sleeping part: weights undefined, KV cache empty."""
        ...

    def reset_prefix_cache(self) -> None:
        """Discard the keys and values of all prompts; required after a change of weights."""
        ...

    def sleep(self) -> None:
        """Free the memory of the parts that sleep between rollouts; their content is lost."""
        ...

    def generate(self, prompts: PromptBatch) -> Generated:
        """Sample responses; the engine must be awake."""
        ...
