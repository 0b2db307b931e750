"""Less work for vLLM's scheduler, for which a GPU with hundreds of sequences waits.

What is scheduled, allocated and cached is what vLLM does by itself.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any
from unittest.mock import patch


def relieve_scheduler(core: Any) -> None:
    """Make the scheduler of an engine core look at a sequence only when something changes.

    vLLM looks for memory and for blocks to cache with each token of each sequence, and builds each
    step's schedule anew. Here it looks at the ends of blocks, and a step in which no request begins
    or ends is scheduled like the one before it. A sampled token that neither ends its request nor a
    block is only added to it, but with vLLM 0.25.
    """
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    scheduler = core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    block_sizes = [group.block_size for group in manager.coordinator.single_type_managers]
    if len(block_sizes) > 1:
        return
    allocate, cache, (block_size,) = manager.allocate_slots, manager.cache_blocks, block_sizes
    schedule, update, last = scheduler.schedule, scheduler.update_from_output, None

    def needs_no_block(num_computed_tokens: int) -> bool:
        # A block's first token needs its memory; the last one may enter it into the prefix cache.
        return 0 < num_computed_tokens % block_size < block_size - 1

    def allocate_slots(request: Any, num_new_tokens: int, **options: Any) -> Any:
        if num_new_tokens == 1 and needs_no_block(request.num_computed_tokens):
            return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, **options)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens % block_size == 0:
            cache(request, num_computed_tokens)

    def schedule_or_repeat(*args: Any, **options: Any) -> Any:
        nonlocal last
        last = _repeated(scheduler, last, needs_no_block) or schedule(*args, **options)
        return last

    def update_from_output(scheduled: Any, output: Any) -> Any:
        added = _added(scheduler, scheduled, output, needs_no_block)
        if not added:
            return update(scheduled, output)
        left = {name: n for name, n in scheduled.num_scheduled_tokens.items() if name not in added}
        found = update(replace(scheduled, num_scheduled_tokens=left), output)
        step = found.setdefault(0, EngineCoreOutputs())
        step.outputs = step.outputs + [
            EngineCoreOutput(request_id=name, new_token_ids=tokens)
            for name, tokens in added.items()
        ]
        return found

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks
    scheduler.schedule = schedule_or_repeat
    if "is_stale" in signature(scheduler._update_request_with_output).parameters:  # not in 0.25
        scheduler.update_from_output = update_from_output


@contextmanager
def vllms_scheduler(core: Any) -> Iterator[None]:
    """Within this context, undo what `relieve_scheduler` replaces, for comparisons."""
    scheduler = core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    replaced = [(scheduler, "schedule"), (scheduler, "update_from_output")]
    replaced += [(manager, "allocate_slots"), (manager, "cache_blocks")]
    with ExitStack() as stack:
        for owner, name in replaced:
            own = getattr(type(owner), name).__get__(owner)
            stack.enter_context(patch.object(owner, name, own))
        yield


def _repeated(scheduler: Any, last: Any, needs_no_block: Callable[[int], bool]) -> Any:
    """Return the schedule after `last`, if that is one further token of each request; else None."""
    running, manager = scheduler.running, scheduler.kv_cache_manager
    if (
        last is None
        or not running
        or not len(running) == len(last.num_scheduled_tokens) == last.total_num_scheduled_tokens
        or last.scheduled_new_reqs
        or last.scheduled_cached_reqs.resumed_req_ids
        or last.has_structured_output_requests
        or scheduler.get_request_counts()[1]  # waiting
        or scheduler.finished_req_ids
        or scheduler.pause_state
        or manager.block_pool.get_num_free_blocks() < len(running)
    ):
        return None
    computed, sampled = [], []
    for request in running:
        done, queued = request.num_computed_tokens, request.num_output_placeholders
        known, prompt = request.num_tokens + queued, request.num_prompt_tokens
        # vLLM does not schedule a request whose last token is queued.
        end = min(prompt + request.max_tokens, scheduler.max_model_len) - 2
        if known - done != 1 or done - queued >= end:
            return None
        computed.append(done)
        sampled.append(known - prompt)
    blocks = [
        None
        if needs_no_block(done)
        else manager.allocate_slots(request, 1).get_block_ids(allow_none=True)
        for request, done in zip(running, computed, strict=True)
    ]
    requests = replace(
        last.scheduled_cached_reqs,
        new_block_ids=blocks,
        num_computed_tokens=computed,
        num_output_tokens=sampled,
        all_token_ids={},
    )
    found = replace(
        last,
        scheduled_cached_reqs=requests,
        finished_req_ids=scheduler.finished_req_ids,
        preempted_req_ids=scheduler.reset_preempted_req_ids,
    )
    scheduler._update_after_schedule(found)
    return found


def _added(
    scheduler: Any, scheduled: Any, output: Any, needs_no_block: Callable[[int], bool]
) -> dict[str, list[int]]:
    """Add sampled tokens to their requests where nothing else follows; return them by request."""
    from vllm.v1.request import RequestStatus

    tokens, rows, running = output.sampled_token_ids, output.req_id_to_index, RequestStatus.RUNNING
    if not tokens or output.logprobs or scheduled.scheduled_spec_decode_tokens:
        return {}
    added = {}
    for name, num_scheduled in scheduled.num_scheduled_tokens.items():
        request = scheduler.requests.get(name)
        if request is None or len(sampled := tokens[rows[name]]) != 1:
            continue
        (token,), params = sampled, request.sampling_params
        so_far, length = len(request._output_token_ids), len(request._all_token_ids) + 1
        if (
            num_scheduled == 1
            and needs_no_block(length - 1)  # else vLLM hashes or caches a block
            and 0 < so_far < request.max_tokens - 1
            and length < scheduler.max_model_len
            and token != params.eos_token_id
            and token not in (params.stop_token_ids or ())
            and request.status is running
            and request.num_stale_output_tokens == 0
            and request.structured_output_request is None
            and params.repetition_detection is None
        ):
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= request.num_output_placeholders > 0
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            added[name] = sampled
    return added
