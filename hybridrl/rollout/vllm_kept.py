"""Tokens to which rollout.top_p cuts each distribution, recorded while vLLM samples.

vLLM's sampler for GPUs returns these sets, a step's in one array. All requests of a call are
sampled alike; for those with another top_p than the run's nothing is recorded. NAMES are the
private names in use.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hybridrl.config.errors import ConfigError, Problem
from hybridrl.data.ragged import Ragged, joined

NAMES: tuple[tuple[str, str], ...] = (
    ("vllm.config", "ModelConfig.return_sampling_mask"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.add_request Scheduler.update_from_output"),
    (
        "vllm.v1.outputs",
        "ModelRunnerOutput.req_id_to_index ModelRunnerOutput.sampling_masks "
        "SamplingMaskLists.token_ids SamplingMaskLists.offsets",
    ),
    ("vllm.v1.request", "Request.num_output_tokens"),
)
# Most tokens of the sets of an engine's call: 4 GiB.
MOST_TOKENS = 2**30


class KeptTokens:
    """Recorder of the sets of sampled tokens.

    Args:
        runner: vLLM's model runner, started with `return_sampling_mask`.
        top_p: the run's, below 1.
    """

    def __init__(self, runner: Any, top_p: float) -> None:
        self._runner, self._top_p = runner, top_p
        self._sets: dict[str, list[NDArray[np.int32]]] = {}
        self._tokens = self._kept = 0

    def record(self, core: Any) -> None:
        """Record the steps of an engine core from now on."""
        scheduler = core.engine_core.scheduler
        add, update = scheduler.add_request, scheduler.update_from_output

        def add_request(request: Any) -> None:
            self._runner.sampler.return_sampling_mask = request.sampling_params.top_p == self._top_p
            add(request)

        def record(scheduled: Any, output: Any) -> Any:
            # Not left to the scheduler, which would split them.
            masks, output.sampling_masks = output.sampling_masks, None
            if masks is None:
                return update(scheduled, output)
            requests = [scheduler.requests.get(name) for name in output.req_id_to_index]
            before = [one.num_output_tokens if one else 0 for one in requests]
            of_clients = update(scheduled, output)
            rows = output.req_id_to_index.values()
            for request, tokens, row in zip(requests, before, rows, strict=True):
                # Else it has ended before, or its prompt goes on.
                if request is not None and request.num_output_tokens > tokens:
                    start, end = masks.offsets[row : row + 2]
                    self._add(request.request_id, masks.token_ids[start:end])
            return of_clients

        scheduler.add_request, scheduler.update_from_output = add_request, record

    def _add(self, request_id: str, ids: NDArray[np.int32]) -> None:
        self._sets.setdefault(request_id, []).append(ids)
        self._tokens, self._kept = self._tokens + 1, self._kept + len(ids)
        if self._kept > MOST_TOKENS:
            raise ConfigError(
                Problem(
                    "kept_tokens",
                    "rollout.top_p",
                    self._top_p,
                    "a value that keeps few tokens",
                    f"of each distribution it keeps {self._kept / self._tokens:.0f} tokens in the "
                    f"mean, which are recorded with 4 bytes each: "
                    f"{self._kept * 4 / 2**30:.1f} GiB so far in a call of one engine",
                    "Set rollout.top_p=1, or a lower one, or train a model that is surer",
                )
            )

    def take(self, request_ids: Sequence[str]) -> dict[str, Ragged]:
        """Return `kept_ids` and `kept_counts` of `RolloutBatch` for ended requests; forget all."""
        sets = [self._sets.get(name, []) for name in request_ids]
        counts = Ragged.from_rows([[*map(len, row)] for row in sets], torch.int32)
        ids = joined([one for row in sets for one in row], torch.empty(0, dtype=torch.int32))
        self._sets, self._tokens, self._kept = {}, 0, 0
        sizes = torch.tensor([sum(map(len, row)) for row in sets], dtype=torch.int64)
        return {"kept_ids": Ragged(ids, sizes), "kept_counts": counts}
