"""What vLLM's scheduler allocates and caches, as the engine has it and as vLLM does by itself."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from hybridrl.data.ragged import Ragged
from hybridrl.rollout.vllm_compat import engine_core
from hybridrl.rollout.vllm_engine import VLLMEngine
from tests.reshard_cases import prompts


def by_block_and_by_token(engine: VLLMEngine) -> list[dict[str, Any]]:
    """Responses that cross the ends of blocks of 16 and of 128 tokens, and their cache."""
    manager = engine_core(engine._llm).engine_core.scheduler.kv_cache_manager
    names = ("allocate_slots", "cache_blocks")
    own = {name: getattr(type(manager), name).__get__(manager) for name in names}
    rows = [[length] * length for length in (10, 16, 117, 122)]
    request = prompts()
    request = replace(
        request, prompts=Ragged.from_rows(rows, torch.int64), prompt_id=torch.arange(len(rows))
    )
    return [cache_after(engine, manager, request), cache_after(engine, manager, request, **own)]


def cache_after(engine: VLLMEngine, manager: Any, request: Any, **methods: Any) -> dict[str, Any]:
    """What a call samples, the blocks that it asks for step by step, and those that are cached."""
    engine.reset_prefix_cache()
    pool, asked = manager.block_pool, []
    take = pool.get_new_blocks

    def get_new_blocks(count: int) -> Any:
        asked.append(count)
        return take(count)

    changed = {name: getattr(manager, name) for name in ("allocate_slots", "cache_blocks")}
    with (
        patch.multiple(manager, **(changed | methods)),
        patch.object(pool, "get_new_blocks", get_new_blocks),
    ):
        generated = engine.generate(request)
    return {"generated": generated, "asked": asked, "cached": len(pool.cached_block_hash_to_block)}


def assert_same(caches: list[dict[str, Any]]) -> None:
    """Compare what `by_block_and_by_token` returns."""
    ours, vllms = caches
    assert ours["asked"] == vllms["asked"] and len(ours["asked"]) > len(ours["generated"].responses)
    assert ours["cached"] == vllms["cached"] > 0
    assert torch.equal(ours["generated"].responses.values, vllms["generated"].responses.values)
