"""Runs of an engine's scheduler without its model, as the engine has it and as vLLM has it."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from hybridrl.data.requests import Generate
from hybridrl.rollout.vllm import steps as vllm_steps
from hybridrl.rollout.vllm.engine import VLLMEngine
from tests.support.reshard_cases import prompts

STEPS, MOST_OPEN, STOP = 1500, 12, 3
# Steps that are queued, and what is scarce; with pairs, what waits begins once two places are free.
CASES = [(depth, scarce) for depth in (1, 2) for scarce in ("blocks", "places")]
PAIRS = (2, "pairs")
LENGTHS, MOST_TOKENS = (1, 15, 16, 17, 110, 120), 40
# Blocks of the cache beside those of a longest sequence: too few for so many requests.
MORE_BLOCKS = 4
# Requests that run at the same time where places are scarce.
PLACES = 2


@contextmanager
def vllms_own(engine: VLLMEngine, *, records: bool = False) -> Iterator[None]:
    """Within this context, undo what the engine replaces in vLLM's scheduler.

    With `records`, log-probs are still read, so that the engine can sample.
    """
    scheduler = engine._core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    replaced = [(scheduler, "schedule"), (manager, "allocate_slots"), (manager, "cache_blocks")]
    replaced += [] if records else [(scheduler, "update_from_output")]
    with ExitStack() as stack:
        stack.enter_context(patch.object(engine._steps, "_adds_tokens", False))
        for owner, name in replaced:
            own = getattr(type(owner), name).__get__(owner)
            stack.enter_context(patch.object(owner, name, own))
        yield


def both_ways(engine: VLLMEngine, generate: Generate) -> list[dict[Any, Any]]:
    """What the engine's scheduler does, and what vLLM's does."""
    found = []
    for by_vllm in (False, True):
        with vllms_own(engine, records=True) if by_vllm else nullcontext():
            found.append(
                {"generated": sampled(engine, generate)}
                | {case: schedules(engine, *case) for case in CASES}
            )
    return found


def assert_same(ways: list[dict[Any, Any]]) -> None:
    """Compare what `both_ways` returns."""
    ours, vllms = ways
    for name in ("asked", "cached"):
        assert ours["generated"][name] == vllms["generated"][name]
    assert ours["generated"]["cached"] > 0
    assert len(ours["generated"]["asked"]) > ours["generated"]["responses"]
    assert torch.equal(ours["generated"]["tokens"], vllms["generated"]["tokens"])
    for case in CASES:
        one, other = ours[case], vllms[case]
        assert one["steps"] == other["steps"] and one["outputs"] == other["outputs"]
        assert one["repeated"] > 0.1 * STEPS and other["repeated"] == 0
        assert one["updated"] < 0.7 * other["updated"] or one["vllm"].startswith("0.25.")
        assert any(step["preempted"] for step in one["steps"]) == (case[1] == "blocks")


@contextmanager
def of_class(scheduler: Any, kind: type) -> Iterator[None]:
    """Within this context, the scheduler is one of another class."""
    own, scheduler.__class__ = type(scheduler), kind
    yield
    scheduler.__class__ = own


def sampled(engine: VLLMEngine, generate: Generate) -> dict[str, Any]:
    """Sample responses that cross the ends of blocks; note the blocks that are asked for."""
    engine.sync()
    pool, asked = engine._core.engine_core.scheduler.kv_cache_manager.block_pool, []
    take = pool.get_new_blocks

    def get_new_blocks(count: int) -> Any:
        asked.append(count)
        return take(count)

    rows = [[length] * length for length in (10, 16, 117, 122)]
    with patch.object(pool, "get_new_blocks", get_new_blocks):
        responses = generate(prompts(rows=rows)).responses
    return {
        "tokens": responses.values,
        "responses": len(responses),
        "asked": asked,
        "cached": len(pool.cached_block_hash_to_block),
    }


def schedules(engine: VLLMEngine, depth: int, scarce: str) -> dict[str, Any]:
    """Schedule requests that come, end, are aborted and preempted, with invented tokens.

    With a `depth` of 2, a step is queued behind the one that runs, as on a GPU.
    """
    from vllm import SamplingParams
    from vllm import __version__ as version
    from vllm.v1.outputs import ModelRunnerOutput

    steps = engine._steps
    steps.forget_ended()
    engine.sync()
    scheduler, draw = engine._core.engine_core.scheduler, random.Random(depth)
    seen: dict[str, Any] = {"steps": [], "outputs": [], "repeated": 0, "updated": 0}
    seen["vllm"] = version

    def update_request(*args: Any, **options: Any) -> Any:
        seen["updated"] += 1
        return type(scheduler)._update_request_with_output(scheduler, *args, **options)

    def repeated() -> Any:
        seen["repeated"] += (found := type(steps)._repeated(steps)) is not None
        return found

    queued, count = [], 0
    with (
        queued_steps(engine, depth, scarce),
        patch.object(scheduler, "_update_request_with_output", update_request),
        patch.object(steps, "_repeated", repeated),
    ):
        for _ in range(STEPS):
            if len(scheduler.requests) < MOST_OPEN and draw.random() < 0.2:
                length = draw.choice(LENGTHS)
                params = SamplingParams(
                    max_tokens=draw.randint(1, MOST_TOKENS),
                    stop_token_ids=[STOP],
                    detokenize=False,
                )
                prompt = [5] * length
                steps.add(f"{depth}-{count}", prompt, params)
                count += 1
            if scheduler.requests and draw.random() < 0.02:
                steps.cancel([draw.choice([*scheduler.requests])])
            scheduled = scheduler.schedule()
            seen["steps"].append(plain(scheduled))
            queued.append(scheduled)
            if len(queued) == depth:
                scheduled = queued.pop(0)
                ids = [*scheduled.num_scheduled_tokens]
                tokens = [[draw.choice((STOP, *range(10, 90)))] for _ in ids]
                output = ModelRunnerOutput(ids, {name: at for at, name in enumerate(ids)}, tokens)
                by_client = scheduler.update_from_output(scheduled, output)
                outputs = [one for outputs in by_client.values() for one in outputs.outputs]
                ended = [(o.request_id, o.new_token_ids, str(o.finish_reason)) for o in outputs]
                added = [(name, tokens, "None") for name, tokens in steps._added.items()]
                seen["outputs"].append(sorted(ended + added))
        steps.cancel([*scheduler.requests])
    scheduler.schedule()  # the model has never heard of the last ones
    return seen


@contextmanager
def queued_steps(engine: VLLMEngine, depth: int, scarce: str) -> Iterator[None]:
    """Within this context blocks or places are scarce, and the scheduler queues `depth` steps."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    scheduler = engine._core.engine_core.scheduler
    manager, pool = scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_pool
    block_size = manager.coordinator.single_type_managers[0].block_size
    blocks = MORE_BLOCKS + -(-(max(LENGTHS) + MOST_TOKENS) // block_size)
    is_full = scarce == "blocks"
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - blocks) if is_full else []
    places = scheduler.max_num_running_reqs if is_full else PLACES
    with (
        of_class(scheduler, type(scheduler) if depth == 1 else AsyncScheduler),
        patch.object(scheduler, "_spec_token_placeholders", [], create=True),
        patch.object(scheduler, "pp_size", 1, create=True),
        patch.object(scheduler, "decode_stagger", 1, create=True),
        patch.object(vllm_steps, "FREE_PLACES", 2 / PLACES if scarce == "pairs" else 0),
        patch.object(scheduler, "max_num_running_reqs", places),
        patch.object(scheduler, "max_num_active_reqs", places, create=True),
    ):
        yield
    pool.free_blocks(taken)


def ends(engine: VLLMEngine, depth: int, scarce: str, most: int) -> dict[str, Any]:
    """Tokens and ends of requests whose tokens follow from their name and position.

    Up to `most` steps are submitted at once.
    """
    from vllm import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput

    steps, draw = engine._steps, random.Random(depth)
    steps.forget_ended()
    engine.sync()
    scheduler = engine._core.engine_core.scheduler
    tokens: dict[str, list[int]] = {}
    seen: dict[str, Any] = {"submitted": 0, "beside": 0, "preempted": 0, "ended": {}}
    lengths = {f"{most}-{k}": draw.choice(LENGTHS) for k in range(STEPS // 10)}
    most_tokens = {name: draw.randint(1, MOST_TOKENS) for name in lengths}
    queued, waiting = [], [*lengths]
    with queued_steps(engine, depth, scarce), patch.object(steps, "_most", most):
        while waiting or scheduler.requests or queued:
            if waiting and len(scheduler.requests) < MOST_OPEN and draw.random() < 0.3:
                name = waiting.pop(0)
                params = SamplingParams(
                    max_tokens=most_tokens[name], stop_token_ids=[STOP], detokenize=False
                )
                steps.add(name, [5] * lengths[name], params)
            if scheduler.requests:
                scheduled = scheduler.schedule()
                seen["preempted"] += len(scheduled.preempted_req_ids or ())
                count = steps._multi_step._steps.get(id(scheduled), 1)
                seen["submitted"] += count > 1
                seen["beside"] += count > 1 and scheduler.get_request_counts()[1] > 0
                queued.append((scheduled, count, positions(scheduled)))
                if len(queued) < depth and scheduled.num_scheduled_tokens:
                    continue
            if not queued:
                continue
            scheduled, count, at = queued.pop(0)
            ids = [*scheduled.num_scheduled_tokens]
            rows = [
                [token_at(name, at[name] + k) for k in range(count)]
                if at[name] >= lengths[name]
                else []
                for name in ids
            ]
            output = ModelRunnerOutput(ids, {name: row for row, name in enumerate(ids)}, rows)
            steps._added = {}
            by_client = scheduler.update_from_output(scheduled, output)
            new = [one for outputs in by_client.values() for one in outputs.outputs]
            for name, more in [*steps._added.items()] + [
                (o.request_id, o.new_token_ids) for o in new
            ]:
                tokens.setdefault(name, []).extend(more)
            for one in new:
                if one.finish_reason is not None:
                    name = one.request_id
                    seen["ended"][name.partition("-")[2]] = tokens[name], str(one.finish_reason)
    scheduler.schedule()
    return seen


def positions(scheduled: Any) -> dict[str, int]:
    """Length of each request's sequence after a schedule's step, before its sampled token."""
    old = scheduled.scheduled_cached_reqs
    starts = dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
    starts |= {one.req_id: one.num_computed_tokens for one in scheduled.scheduled_new_reqs}
    return {name: starts[name] + count for name, count in scheduled.num_scheduled_tokens.items()}


def token_at(name: str, position: int) -> int:
    """A token that depends on a request's number and a position alone; one in 80 ends it."""
    number = int(name.partition("-")[2])
    drawn = random.Random(number * 1000 + position).randrange(80)
    return STOP if drawn < 1 else 10 + drawn


def plain(scheduled: Any) -> dict[str, Any]:
    """A schedule by names of requests and numbers of blocks."""
    requests = scheduled.scheduled_cached_reqs
    return {
        "tokens": scheduled.num_scheduled_tokens,
        "total": scheduled.total_num_scheduled_tokens,
        "new": [one.req_id for one in scheduled.scheduled_new_reqs],
        "ids": requests.req_ids,
        "resumed": sorted(requests.resumed_req_ids),
        "blocks": [[len(group) for group in blocks or ()] for blocks in requests.new_block_ids],
        "computed": requests.num_computed_tokens,
        "sampled": requests.num_output_tokens,
        "all tokens": requests.all_token_ids,
        "finished": sorted(scheduled.finished_req_ids),
        "preempted": sorted(scheduled.preempted_req_ids or ()),
    }
