"""Decoding steps of vLLM's newer GPU runner with two launches of CUDA graphs each.

vLLM replays a graph of the model; sampling and the next step's inputs are kernels that Python
launches one by one. Here a second graph holds those, so that a slow CPU does not bound decoding. A
submission's first step is vLLM's own: it writes block tables for all steps and the inputs' buffers.
The graphs hold addresses of weights, KV cache and states, which a sleep does not change.

Shapes:  B = requests of the model's graph, of which the last ones may be padding
NAMES are the private names in use.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridrl.config.checks.installation import is_current

NAMES: tuple[tuple[str, str], ...] = (
    ("vllm.v1.attention.backend", "AttentionMetadataBuilder.supports_draft_decode_metadata_update"),
    ("vllm.v1.outputs", "LogprobsTensors ModelRunnerOutput"),
    ("vllm.v1.worker.gpu.async_utils", "AsyncOutput"),
    ("vllm.v1.worker.gpu.block_table", "BlockTables.compute_slot_mappings"),
    (
        "vllm.v1.worker.gpu.cudagraph_utils",
        "BatchExecutionDescriptor.num_reqs BatchExecutionDescriptor.num_tokens "
        "ModelCudaGraphManager.dispatch ModelCudaGraphManager.run_fullgraph",
    ),
    (
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch.cu_num_logits_np InputBatch.expanded_idx_mapping InputBatch.has_prefill "
        "InputBatch.idx_mapping_np InputBatch.logits_indices InputBatch.query_start_loc",
    ),
    (
        "vllm.v1.worker.gpu.model_runner",
        "ExecuteModelState.attn_metadata ExecuteModelState.hidden_states "
        "GPUModelRunner.main_stream GPUModelRunner.postprocess_sampled GPUModelRunner.sample",
    ),
    ("vllm.v1.worker.gpu.model_states.default", "DefaultModelState"),
    ("vllm.v1.worker.gpu.sample.output", "SamplerOutput.logprobs_tensors"),
    ("vllm.v1.worker.gpu.sample.sampler", "Sampler.get_logprobs_dims"),
    ("vllm.v1.worker.utils", "AttentionGroup.update_draft_decode_metadata"),
)
# Most steps of a submission besides its first one.
MOST_STEPS = 64
# Index of rows without a request. vLLM's kernels skip these, or read an element ahead of a table.
PADDING = -1
# Elements ahead of a table: its address stays a multiple of 16 bytes, as Triton's kernels like it.
AHEAD = 16
# Of a logit bias, penalties and bad words.
BUILT_IN_PROCESSORS = 3
# A capture cannot take memory that torch keeps for later: at most this, and logits of each request
# in bfloat16 and float32, whole, gathered from tensor-parallel ranks and divided by temperature.
FREE_BYTES, FREE_BYTES_A_LOGIT = 1 << 30, 10

# Shape of the model's graph, and whether a temperature divides logits.
Key = tuple[Any, bool]


def has_decode_graphs(runner: Any) -> bool:
    """Return whether a runner's model fits: on GPUs, without images and recurrent layers."""
    if runner.device.type != "cuda" or not is_current():
        return False
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    return (
        type(runner.model_state) is DefaultModelState
        and runner.model_state.rope_state is None
        and not runner.uses_inputs_embeds
        and runner.lora_config is None
        and runner.batch_sharder is None
        and len(runner.sampler.logits_processors) == BUILT_IN_PROCESSORS
        and not runner.sampler.thinking_budget_state.enabled
        and all(one.supports_draft_decode_metadata_update for one in chain(*runner.attn_groups))
    )


class DecodeGraphs:
    """Graphs of the operations between two replays of the model's graph, by its batch size.

    A size's first submission launches the operations one by one, which compiles kernels. The second
    one captures them.

    Args:
        runner: vLLM's model runner, one that `has_decode_graphs`.

    Attributes:
        replays: how often a graph of sampling was replayed.
    """

    def __init__(self, runner: Any) -> None:
        self._runner, self.replays = runner, 0
        most, device = runner.max_num_reqs, runner.device
        # Addresses that graphs hold. Row r is that of request r of a batch: the slot of its state.
        self._slots = torch.full((most,), PADDING, dtype=torch.int64, device=device)
        self._order = torch.arange(most + 1, device=device)
        self._cumulated = self._order.int()
        self._column = torch.zeros(1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(most, MOST_STEPS, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(most, MOST_STEPS, device=device)
        # vLLM writes these tables to another host buffer with each step.
        sampling = runner.sampler.sampling_states
        self._tables = [
            (table, torch.ones(AHEAD + most, dtype=table.gpu.dtype, device=device)[AHEAD:])
            for table in (runner.req_states.prefill_len, sampling.temperature, sampling.seeds)
        ]
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None] = {}
        self._stream = torch.cuda.Stream(device)

    @torch.inference_mode()
    def run(self, state: Any, steps: int) -> Any:
        """Run further steps of a batch that the runner has just sampled.

        Args:
            state: the runner's `execute_model_state` of its last step.
            steps: tokens of each request.

        Returns:
            Their output, several tokens of each request, or None if the batch has no graph.
        """
        batch, manager = state.input_batch, self._runner.cudagraph_manager
        count, slots = batch.num_reqs, batch.idx_mapping_np
        if batch.has_prefill or batch.num_tokens != count or steps > MOST_STEPS:
            return None
        shape = manager.dispatch(count, count, 1, num_active_loras=0, max_query_len=1)
        if shape not in manager.graphs or shape.num_reqs != shape.num_tokens:
            return None
        if not self._is_plain(slots):
            return None
        self._slots.fill_(PADDING)
        self._slots[:count].copy_(batch.idx_mapping)
        self._column.zero_()
        for table, copy in self._tables:
            copy.copy_(table.gpu)
        key = shape, bool(self._runner.sampler.needs_logits_processing[slots].any())
        begin, go_on = self._actions(key, state)
        begin()
        for _ in range(steps):
            manager.run_fullgraph(shape)
            go_on()
        if self._graphs[key] is not None:
            self.replays += steps
        return self._output(batch.req_ids, steps)

    def _is_plain(self, slots: NDArray[np.int64]) -> bool:
        """Return whether at most a temperature changes the logits of these requests."""
        sampler = self._runner.sampler
        states, (bias, penalties, bad_words) = sampler.sampling_states, sampler.logits_processors
        changes = (
            states.top_k.np[slots] != states.vocab_size,
            states.top_p.np[slots] != 1,
            states.min_p.np[slots] != 0,
            bias.use_logit_bias[slots],
            penalties.use_penalty[slots],
            bad_words.num_bad_words.np[slots] > 0,
        )
        is_changed = any(change.any() for change in changes)
        return not is_changed and sampler.get_logprobs_dims(slots) == (0, 0)

    def _actions(self, key: Key, state: Any) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return the actions before the first replay of the model's graph, and after each."""
        graphs = self._graphs.get(key)
        if graphs is None:
            batch, size = state.input_batch, key[0].num_reqs
            slots = self._slots[:size]
            static = replace(
                batch,
                num_reqs=size,
                idx_mapping=slots,
                expanded_idx_mapping=slots,
                # Which kernels are launched depends on these slots.
                idx_mapping_np=np.resize(batch.idx_mapping_np, size),
                cu_num_logits=self._cumulated[: size + 1],
                cu_num_logits_np=np.arange(size + 1, dtype=np.int32),
            )
            begin = partial(self._prepare, static, state.attn_metadata)
            go_on = partial(self._go_on, static, state.attn_metadata, state.hidden_states)
            if key not in self._graphs:
                self._graphs[key] = None
                return begin, go_on
            graphs = self._graphs[key] = self._captured(begin), self._captured(go_on)
        return graphs[0].replay, graphs[1].replay

    def _captured(self, action: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture an action as a graph; graphs of one engine share their memory.

        Not by `torch.cuda.graph`, which would always empty the trainer's cache of GPU memory.
        """
        graph, pool = torch.cuda.CUDAGraph(), self._runner.cudagraph_manager.pool
        torch.cuda.synchronize()
        logits = self._runner.max_num_reqs * self._runner.vocab_size
        if torch.cuda.mem_get_info()[0] < FREE_BYTES + FREE_BYTES_A_LOGIT * logits:
            torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            # Other threads go on using CUDA. None may wait for the whole device.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                action()
            finally:
                graph.capture_end()
        return graph

    def _go_on(self, batch: Any, metadata: Any, hidden: Tensor) -> None:
        """Sample a step's tokens and prepare the next step, which a last step does not need."""
        runner, slots = self._runner, batch.idx_mapping
        # Rows of padding sample from the first row: their own hidden states are not defined.
        rows = self._order[: len(slots)] * (slots >= 0)
        with ExitStack() as stack:
            for table, copy in self._tables:
                stack.enter_context(patch.object(table, "gpu", copy))
            batch = replace(batch, logits_indices=rows)
            output, sampled, rejected = runner.sample(hidden, batch, None)
        tokens, log_probs = output.sampled_token_ids, output.logprobs_tensors.logprobs
        runner.postprocess_sampled(slots, tokens, sampled, rejected, batch.query_start_loc)
        self._tokens[: len(slots)].index_copy_(1, self._column, tokens)
        self._log_probs[: len(slots)].index_copy_(1, self._column, log_probs)
        self._column.add_(1)
        self._prepare(batch, metadata)

    def _prepare(self, batch: Any, metadata: Any) -> None:
        """Write the next step's inputs to the buffers that the model's graph reads."""
        runner, slots = self._runner, batch.idx_mapping
        is_request = slots >= 0  # the others keep a length of 0
        batch.positions.add_(is_request)
        batch.seq_lens.add_(is_request)
        batch.input_ids.copy_(runner.req_states.last_sampled_tokens[:, 0][slots])
        runner.block_tables.compute_slot_mappings(
            slots, batch.query_start_loc, batch.positions, len(slots)
        )
        for group in chain(*runner.attn_groups):
            # As when vLLM captured the model: valid for all lengths.
            metadata[group.layer_names[0]].max_seq_len = runner.max_model_len
            group.update_draft_decode_metadata(metadata)

    def _output(self, request_ids: list[str], steps: int) -> Any:
        """Copy tokens and log-probs to the host, on the runner's stream for that."""
        from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
        from vllm.v1.worker.gpu.async_utils import AsyncOutput
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        runner, count = self._runner, len(request_ids)
        # The next submission overwrites the buffers, maybe before these copies.
        tokens = self._tokens[:count, :steps].clone()
        log_probs = self._log_probs[:count, :steps].clone()
        counts = torch.full((count,), steps, device=tokens.device)
        return AsyncOutput(
            model_runner_output=ModelRunnerOutput(req_ids=request_ids, req_id_to_index={}),
            sampler_output=SamplerOutput(
                sampled_token_ids=tokens,
                logprobs_tensors=LogprobsTensors(tokens, log_probs, counts),
                num_nans=None,
                num_sampled=counts,
                num_rejected=counts,
            ),
            num_sampled_tokens=counts,
            main_stream=runner.main_stream,
            copy_stream=runner.output_copy_stream,
            check_ep_fault=False,
            pending_aux_output=None,
        )
