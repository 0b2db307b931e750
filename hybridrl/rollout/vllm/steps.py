"""Decoding steps of vLLM's engine core: token ids in, tokens and their log-probs out.

`LLM.generate` spends much of each step on text, counters and log-prob tables that are not needed
here. The scheduler looks at each token of each sequence, while a GPU with hundreds of them waits.
What is scheduled, allocated and cached is what vLLM does by itself. NAMES are the private
names in use.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridrl.rollout.engine import Step
from hybridrl.rollout.vllm.multi_step import MultiStep, steps_ahead

NAMES: tuple[tuple[str, str], ...] = (
    ("vllm.sampling_params", "SamplingParams.eos_token_id SamplingParams.repetition_detection"),
    ("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks"),
    (
        "vllm.v1.core.kv_cache_manager",
        "KVCacheBlocks.get_block_ids KVCacheManager.allocate_slots KVCacheManager.cache_blocks",
    ),
    (
        "vllm.v1.core.sched.output",
        "CachedRequestData.all_token_ids CachedRequestData.new_block_ids "
        "CachedRequestData.num_computed_tokens CachedRequestData.num_output_tokens "
        "CachedRequestData.resumed_req_ids SchedulerOutput.finished_req_ids "
        "SchedulerOutput.has_structured_output_requests SchedulerOutput.num_scheduled_tokens "
        "SchedulerOutput.preempted_req_ids SchedulerOutput.scheduled_cached_reqs "
        "SchedulerOutput.scheduled_new_reqs SchedulerOutput.scheduled_spec_decode_tokens "
        "SchedulerOutput.total_num_scheduled_tokens",
    ),
    (
        "vllm.v1.core.sched.scheduler",
        "Scheduler.schedule Scheduler.update_from_output Scheduler._update_after_schedule "
        "Scheduler._update_request_with_output Scheduler.has_requests "
        "Scheduler.get_request_counts Scheduler.pause_state",
    ),
    (
        "vllm.v1.engine",
        "EngineCoreRequest FinishReason.STOP FinishReason.LENGTH EngineCoreOutput.request_id "
        "EngineCoreOutput.finish_reason EngineCoreOutput.new_token_ids EngineCoreOutputs.outputs",
    ),
    (
        "vllm.v1.engine.core_client",
        "InprocClient.abort_requests InprocClient.add_request InprocClient.get_output "
        "InprocClient.sleep InprocClient.wake_up",
    ),
    (
        "vllm.v1.outputs",
        "ModelRunnerOutput.req_id_to_index ModelRunnerOutput.sampled_token_ids "
        "ModelRunnerOutput.logprobs LogprobsLists.logprobs",
    ),
    ("vllm.v1.request", "RequestStatus.RUNNING"),
)
# Fields about requests that begin, with their values in a schedule in which none does.
NOTHING_NEW: dict[str, object] = {
    "encoder_input_updates": {},
    "kv_cache_block_copies": None,
    "new_block_ids_to_zero": None,
    "scheduled_encoder_inputs": {},
    "scheduled_new_reqs": [],
}
# Requests that wait begin once this share of the places is free, or places for all of them: a step
# in which some begin has no CUDA graph of all operations, and is submitted alone.
FREE_PLACES = 1 / 32


class CoreSteps:
    """Steps of an engine core in this process.

    - Log-probs are read before the scheduler splits them by request, which takes a tenth of a step
      with hundreds of sequences.
    - vLLM looks for memory and blocks to cache with each token, and here at the ends of blocks.
    - A step in which no request begins is scheduled like the one before it, also if some wait
      while few places are free. Several are submitted at once (MultiStep).
    - Tokens that neither end their request nor a block are only added to it (not with vLLM 0.25).

    Args:
        core: client of the engine core.
        runner: its model runner.
        exact: rollout.exact.
    """

    def __init__(self, core: Any, runner: Any, *, exact: bool) -> None:
        from vllm.v1.core.sched.output import SchedulerOutput

        self._core = core
        self._multi_step = MultiStep(runner, exact=exact)
        self._most = 1
        self._scheduler = scheduler = core.engine_core.scheduler
        self._manager = manager = scheduler.kv_cache_manager
        # Of the last output: rows of requests, log-probs of tokens, tokens added here, steps.
        self._rows: dict[str, int] = {}
        self._log_probs: NDArray[np.float32] | None = None
        self._added: dict[str, list[int]] = {}
        self._sampled = 1
        self._update, scheduler.update_from_output = scheduler.update_from_output, self._record
        self._block_size, *others = [
            group.block_size for group in manager.coordinator.single_type_managers
        ]
        known = signature(scheduler._update_request_with_output).parameters
        self._adds_tokens = not others and "is_stale" in known  # not in 0.25
        self._multi_step.most = self._multi_step.most if self._adds_tokens else 1
        fields = SchedulerOutput.__annotations__.keys()
        self._nothing_new = {name: NOTHING_NEW[name] for name in NOTHING_NEW.keys() & fields}
        if others:
            return
        self._last_schedule: Any = None
        self._schedule, scheduler.schedule = scheduler.schedule, self._schedule_or_repeat
        self._allocate, manager.allocate_slots = manager.allocate_slots, self._allocate_slots
        self._cache, manager.cache_blocks = manager.cache_blocks, self._cache_blocks

    def add(
        self,
        request_id: str,
        prompt: list[int],
        params: Any,
        salt: str = "",
        images: Sequence[object] | None = None,
    ) -> None:
        """Open a request; those of one `salt` share cached prefixes."""
        from vllm.v1.engine import EngineCoreRequest

        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            mm_features=images,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        self._core.add_request(request)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Drop open requests."""
        self._core.abort_requests([*request_ids])

    def step(self, most: int = 1) -> Step:
        """Run up to `most` steps, or queue them and take the result of earlier ones."""
        self._most, self._added = most, {}
        outputs = self._core.get_output().outputs
        sampled = self._added
        ended = {}
        for output in outputs:
            if output.new_token_ids:  # one that fails may have none
                sampled[output.request_id] = output.new_token_ids
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason.name
        if not sampled:
            return Step([], [], np.empty(0, np.float32), ended)
        assert self._log_probs is not None, "vLLM sampled without log-probs"
        log_probs = self._log_probs[[self._rows[name] for name in sampled]]
        counts = np.array([*map(len, sampled.values())])
        is_kept = np.arange(log_probs.shape[1]) < counts[:, None]
        names = [name for name, tokens in sampled.items() for _ in tokens]
        tokens = [token for tokens in sampled.values() for token in tokens]
        return Step(names, tokens, log_probs[is_kept], ended, self._sampled)

    def drain(self) -> Iterator[Step]:
        """Yield the results of queued steps, of which asynchronous scheduling leaves one behind."""
        self._core.sleep(level=0, mode="keep")  # open requests begin no further step
        while self._core.engine_core.batch_queue:
            yield self.step()
        self._core.wake_up(["scheduling"])

    def forget_ended(self) -> None:
        """Run empty steps until vLLM's model runner has dropped all cancelled requests."""
        while self._scheduler.has_requests() or self._core.engine_core.batch_queue:
            self._core.get_output()

    def _record(self, scheduled: Any, output: Any) -> Any:
        """Replace `Scheduler.update_from_output`, which reads a step's log-probs once."""
        self._rows = output.req_id_to_index
        # A column for each step: with logprobs=0 the sampled token's alone.
        self._log_probs = None if output.logprobs is None else output.logprobs.logprobs
        output.logprobs = None
        self._sampled = steps = self._multi_step.of(scheduled)
        if steps > 1:
            counts = dict.fromkeys(scheduled.num_scheduled_tokens, steps)
            scheduled = replace(scheduled, num_scheduled_tokens=counts)
        self._added = self._add_tokens(scheduled, output) if self._adds_tokens else {}
        if self._added:
            counts = scheduled.num_scheduled_tokens.items()
            left = {name: count for name, count in counts if name not in self._added}
            scheduled = replace(scheduled, num_scheduled_tokens=left)
        return self._update(scheduled, output)

    def _needs_no_block(self, num_computed_tokens: int) -> bool:
        # A block's first token needs its memory; the last one may enter it into the prefix cache.
        return 0 < num_computed_tokens % self._block_size < self._block_size - 1

    def _allocate_slots(self, request: Any, num_new_tokens: int, **options: Any) -> Any:
        if num_new_tokens == 1 and self._needs_no_block(request.num_computed_tokens):
            return self._manager.empty_kv_cache_blocks
        return self._allocate(request, num_new_tokens, **options)

    def _cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens % self._block_size < self._sampled:  # a block has ended
            self._cache(request, num_computed_tokens)

    def _schedule_or_repeat(self, *args: Any, **options: Any) -> Any:
        self._last_schedule = self._repeated() or self._schedule(*args, **options)
        return self._last_schedule

    def _repeated(self) -> Any:
        """Return the next schedule, if it is more tokens of each request of the last one."""
        last, scheduler, manager = self._last_schedule, self._scheduler, self._manager
        running, places = scheduler.running, scheduler.max_num_running_reqs
        names = [request.request_id for request in running]
        waiting = scheduler.get_request_counts()[1]
        enough = min(waiting, max(1, FREE_PLACES * places))
        if (
            last is None
            or not running
            or not last.num_scheduled_tokens.keys() >= set(names)
            or last.has_structured_output_requests
            or last.free_encoder_mm_hashes
            or (waiting and places - len(running) >= enough)
            or scheduler.pause_state
            or manager.block_pool.get_num_free_blocks() < len(running)
        ):
            return None
        most = min(self._most, self._multi_step.most)
        steps, computed, sampled = steps_ahead(running, scheduler.max_model_len, most)
        if not steps:
            return None
        more_blocks = -(-steps // self._block_size) * len(running)
        if manager.block_pool.get_num_free_blocks() < more_blocks:
            steps = 1
        blocks = [
            None
            if steps == 1 and self._needs_no_block(done)
            else manager.allocate_slots(request, steps).get_block_ids(allow_none=True)
            for request, done in zip(running, computed, strict=True)
        ]
        requests = replace(
            last.scheduled_cached_reqs,
            req_ids=names,
            resumed_req_ids=set(),
            new_block_ids=blocks,
            num_computed_tokens=computed,
            num_output_tokens=sampled,
            all_token_ids={},
        )
        repeated = replace(
            last,
            scheduled_cached_reqs=requests,
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            **self._nothing_new,
            finished_req_ids=scheduler.finished_req_ids,
            preempted_req_ids=scheduler.reset_preempted_req_ids,
        )
        scheduler._update_after_schedule(repeated)
        if steps > 1:
            self._multi_step.submit(repeated, running, steps)
        return repeated

    def _add_tokens(self, scheduled: Any, output: Any) -> dict[str, list[int]]:
        """Add sampled tokens to their requests where nothing else follows; return these."""
        from vllm.v1.request import RequestStatus

        tokens, rows = output.sampled_token_ids, output.req_id_to_index
        scheduler, block_size = self._scheduler, self._block_size
        if not tokens or output.logprobs or scheduled.scheduled_spec_decode_tokens:
            return {}
        added = {}
        for name, num_scheduled in scheduled.num_scheduled_tokens.items():
            request, sampled = scheduler.requests.get(name), tokens[rows[name]]
            if request is None or len(sampled) != num_scheduled:
                continue
            params, count = request.sampling_params, num_scheduled
            so_far, length = len(request._output_token_ids), len(request._all_token_ids) + count
            if (
                # Else vLLM hashes or caches a block; the first token may follow a longer prompt.
                count <= (length - 1) % block_size < block_size - 1
                and 0 < so_far < request.max_tokens - count
                and length < scheduler.max_model_len
                and params.eos_token_id not in sampled
                and not any(token in sampled for token in params.stop_token_ids or ())
                and request.status is RequestStatus.RUNNING
                and request.num_stale_output_tokens == 0
                and request.structured_output_request is None
                and params.repetition_detection is None
            ):
                request.num_in_flight_tokens -= count
                if request.num_output_placeholders:
                    request.num_output_placeholders -= count
                request._output_token_ids.extend(sampled)
                request._all_token_ids.extend(sampled)
                added[name] = sampled
        return added
