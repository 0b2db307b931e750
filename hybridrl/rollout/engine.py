"""Seam between training and what samples responses.

    worker (workers/rollout.py)     sleep, wake; moves weights into `tensors`, then sync
    loop (rollout/sampler.py)       submit, step, step, ..., cancel: batches and live requests

An engine holds one model on one or several ranks, of which each has its own object. All ranks get
the same calls in the same order and sample the same tokens. It decides what each step computes;
the loop decides which requests there are and when to stop, counts, and keeps the tokens. So another
engine has nothing to do with budgets, held requests, agents or statistics.

The first implementation is vLLM inside the process (rollout/vllm/engine.py). Another one is a class
with these members, which a subclass of `RolloutWorker` builds (`build_engine`).
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridrl.data.ragged import Ragged
from hybridrl.data.requests import Request
from hybridrl.distributed.experts import CheckpointTensor
from hybridrl.distributed.regions import Trace


class EnginePart(Enum):
    """Parts of an engine that wake separately; weights first."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


class Step(NamedTuple):
    """Tokens of one or several decoding steps.

    Attributes:
        request_ids: the request of each token; those of one request are in their order.
        tokens: one for each of `request_ids`.
        log_probs: [n], of `tokens` under the distribution that they were sampled from, nats.
        ended: requests that end with this step, with the reason: STOP or LENGTH, or any other text
            if the engine could not go on.
        steps: decoding steps, at least 1.
    """

    request_ids: list[str]
    tokens: list[int]
    log_probs: NDArray[np.float32]
    ended: Mapping[str, str]
    steps: int = 1


class Engine(Protocol):
    """One rank's part of an engine.

    Attributes:
        awake: parts that have memory and keep its content; an engine samples with all of them.
        keeps_weights: the content of `tensors` outlives `sleep`.
        sources: tensors of the model's checkpoint; empty if the engine takes no weights.
        trace: regions of `sources` that lie in `tensors` on this rank.
        peers: group of the engine's ranks on CPUs; None if there is one rank.
    """

    awake: frozenset[EnginePart]
    sources: list[CheckpointTensor]
    trace: Trace

    @property
    def keeps_weights(self) -> bool: ...  # noqa: D102

    @property
    def peers(self) -> ProcessGroup | None: ...  # noqa: D102

    def tensors(self) -> dict[str, Tensor]:
        """Return the live weights by name, into which new ones are written; they never move."""
        ...

    def wake(self, part: EnginePart) -> None:
        """Allocate a sleeping part's memory: weights undefined, KV cache empty, weights first."""
        ...

    def sleep(self) -> None:
        """Free the memory of the parts that the config names."""
        ...

    def sync(self) -> None:
        """Sample by the weights in `tensors` from now on; new requests reuse no older cache."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Open requests."""
        ...

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Drop open requests."""
        ...

    def step(self, most: int = 1) -> Step:
        """Decode up to `most` tokens of each open request; of long prompts' first steps none.

        A request that is neither ended nor cancelled stays open, also while no steps are made and
        over changes of the weights.
        """
        ...

    def drain(self) -> Iterator[Step]:
        """Yield steps that were begun before they were asked for; begin no further one."""
        ...

    def take_recorded(self, request_ids: Sequence[str]) -> dict[str, Ragged]:
        """Return what was recorded of ended requests: fields of `RolloutBatch` by name."""
        ...
