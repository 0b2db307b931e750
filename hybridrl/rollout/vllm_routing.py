"""Experts that vLLM's routers choose, recorded while it samples.

Shapes:  L = layers   K = experts of a token

A router calls back with its choices, also from within a CUDA graph. After each forward they are
copied to host memory, to the slots that the tokens have in the KV cache. So tokens that a request
finds in the prefix cache have their experts there, too: those of the forward that computed them.

vLLM's own `enable_return_routed_experts` does not run on CPUs. NAMES are the private names in use.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
