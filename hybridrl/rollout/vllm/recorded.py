"""What an engine records while it samples: experts of tokens, and sets of kept tokens.

Shapes:  L = layers   K = experts of a token

A router calls back with its choices, also from within a CUDA graph. After each forward they are
copied to host memory, to the slots that the tokens have in the KV cache. So tokens that a request
finds in the prefix cache have their experts there, too: those of the forward that computed them.
vLLM's own `enable_return_routed_experts` does not run on CPUs.

vLLM's sampler for GPUs returns the sets to which rollout.top_p cuts distributions, a step's in one
array. All requests of a call are sampled alike; for those with another top_p than the run's nothing
is recorded. NAMES are the private names in use, KEPT_NAMES those of sets.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridrl.config.errors import ConfigError, Problem
from hybridrl.data.ragged import Ragged, joined

NAMES: tuple[tuple[str, str], ...] = (
    (
        "vllm.v1.core.sched.output",
        "CachedRequestData.req_ids NewRequestData.req_id NewRequestData.block_ids "
        "NewRequestData.num_computed_tokens",
    ),
    ("vllm.model_executor.layers.fused_moe.router.base_router", "BaseRouter.set_capture_fn"),
    ("vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner"),
    ("vllm.v1.kv_cache_interface", "FullAttentionSpec"),
    ("vllm.v1.outputs", "ModelRunnerOutput.req_ids"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model"),
)
KEPT_NAMES: tuple[tuple[str, str], ...] = (
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


class RoutedExperts:
    """Recorder of the experts of each token; as values 1 + their index, 0 is none.

    Args:
        runner: vLLM's model runner with a loaded model with experts, before graphs are captured.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        model, self._runner = runner.get_model(), runner
        routers = [layer.router for layer in model.modules() if isinstance(layer, MoERunner)]
        shape = len(routers), routers[0].top_k
        tokens = runner.vllm_config.scheduler_config.max_num_batched_tokens
        dtype = torch.uint8 if routers[0].global_num_experts < 256 else torch.int16
        device = next(model.parameters()).device
        self._buffer = torch.zeros(tokens, *shape, dtype=dtype, device=device)
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self._capture, layer))
        self._steps: dict[int, Tensor] = {}
        self._group, self._block_size = 0, 0
        self._slots: dict[str, NDArray[np.int64]] = {}
        self._ends: dict[str, int] = {}
        self._done: dict[str, NDArray[np.integer[Any]]] = {}
        self._table: NDArray[np.integer[Any]] = np.empty((0, 0), np.uint8)

    def _capture(self, layer: int, ids: Tensor) -> None:
        self._buffer[: len(ids), layer] = ids + 1

    def record(self, core: Any) -> None:
        """Record the steps of an engine core from now on.

        A token's slot is that of a layer without a window: others give slots up.
        """
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        scheduler, runner = core.engine_core.scheduler, self._runner
        groups = scheduler.kv_cache_config.kv_cache_groups
        specs = [group.kv_cache_spec for group in groups]
        whole = (index for index, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec))
        self._group = next(whole, 0)
        self._block_size = specs[self._group].block_size
        execute, update = runner.execute_model, scheduler.update_from_output

        def copy_after(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            result = execute(scheduled, *args, **kwargs)
            # Tokens are sampled after this copy, on the same stream: with them, it has arrived.
            rows = self._buffer[: sum(scheduled.num_scheduled_tokens.values())].flatten(1)
            copied = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
            self._steps[id(scheduled)] = copied.copy_(rows, non_blocking=True)
            return result

        def record(scheduled: Any, output: Any) -> Any:
            self._record(scheduled, output.req_ids)
            of_clients = update(scheduled, output)
            for outputs in of_clients.values():
                for one in outputs.outputs:
                    if one.finish_reason is not None:  # the next step may use its slots
                        slots, end = self._slots.pop(one.request_id), self._ends.pop(one.request_id)
                        self._done[one.request_id] = self._table[slots[:end]]
            return of_clients

        runner.execute_model, scheduler.update_from_output = copy_after, record

    def _record(self, scheduled: Any, request_ids: Sequence[str]) -> None:
        """Store a step's rows, whose requests are in the order of `request_ids`."""
        rows = self._steps.pop(id(scheduled)).numpy()
        starts = self._follow(scheduled)
        if not request_ids:
            return
        parts = []
        for request_id in request_ids:
            count = scheduled.num_scheduled_tokens[request_id]
            slots = self._slots.get(request_id)
            if slots is None:  # finished meanwhile; vLLM leaves block 0 unused
                parts.append(np.zeros(count, np.int64))
                continue
            self._ends[request_id] = starts[request_id] + count
            parts.append(slots[starts[request_id] : self._ends[request_id]])
        if not self._table.size:
            slots = self._runner.vllm_config.cache_config.num_gpu_blocks * self._block_size
            self._table = np.zeros((slots, rows.shape[1]), rows.dtype)
        self._table[np.concatenate(parts)] = rows

    def _follow(self, scheduled: Any) -> dict[str, int]:
        """Note new slots; return the position of each request's first token of a step."""
        old, new = scheduled.scheduled_cached_reqs, scheduled.scheduled_new_reqs
        for request in new:
            self._slots[request.req_id] = self._slots_of(request.block_ids)
        for request_id, blocks in zip(old.req_ids, old.new_block_ids, strict=True):
            if blocks is None or request_id not in self._slots:
                continue
            known = [] if request_id in old.resumed_req_ids else [self._slots[request_id]]
            self._slots[request_id] = np.concatenate([*known, self._slots_of(blocks)])
        starts = dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
        return starts | {request.req_id: request.num_computed_tokens for request in new}

    def _slots_of(self, blocks: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """Return the slots of blocks, given those of each group of layers."""
        first = np.array(blocks[self._group], np.int64)[:, None] * self._block_size
        return (first + np.arange(self._block_size)).flatten()

    def take(self, request_ids: Sequence[str]) -> dict[str, Ragged]:
        """Return `RolloutBatch.routed_experts` of finished requests, and forget them.

        The last token of each has no experts: it was sampled, not computed.
        """
        rows: list[NDArray[np.integer[Any]]] = []
        for experts in map(self._done.pop, request_ids):
            rows += [experts.flatten(), np.zeros(experts[0].size, experts.dtype)]
        sizes = torch.tensor([row.size for row in rows], dtype=torch.int64)
        values = joined(rows, self._buffer[:0].flatten())
        return {"routed_experts": Ragged(values, sizes.view(-1, 2).sum(1))}


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
