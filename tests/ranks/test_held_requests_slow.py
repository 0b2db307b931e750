"""Requests that an engine holds, with asynchronous scheduling, which vLLM has off on CPUs."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.config.choices import DType
from hybridrl.models.vocabulary import stop_token_ids
from hybridrl.rollout.engine import EnginePart
from hybridrl.rollout.sampler import Sampler
from hybridrl.rollout.vllm.engine import VLLMEngine, prepare
from tests.support.held_requests import in_parts, joined
from tests.support.launch import run_on_ranks
from tests.support.reshard_cases import Case, prompts, rollout_config, write_folders

KEPT: list[VLLMEngine] = []


def look(folder: Path) -> dict[str, Any]:
    """Responses at once and in parts, and the number of steps that vLLM queues."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    prepare("cpu", enforce_eager=True)
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config

    def asynchronous(vllm_config: Any) -> None:
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    config = rollout_config(Case("qwen2", DType.float32, tp=1), folder)
    with patch.object(CpuPlatform, "check_and_update_config", staticmethod(asynchronous)):
        engine = VLLMEngine(config, folder, stop_token_ids(folder), "cpu")
    KEPT.append(engine)
    for part in EnginePart:
        engine.wake(part)
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    engine._model.load_weights(weights.items())
    core = engine._core
    queue, scheduler = core.engine_core.batch_queue, core.engine_core.scheduler
    found = in_parts(engine) | {"queued": queue.maxlen}
    Sampler(engine, config).generate(replace(prompts(), token_budget=2.5), 0)
    knows = [scheduler.has_requests()]
    engine._steps.forget_ended()
    return found | {"knows_aborted": [*knows, scheduler.has_requests()], "left": len(queue)}


@pytest.mark.slow
def test_the_token_of_a_queued_step_is_neither_lost_nor_sampled_again(tmp_path):
    write_folders(tmp_path, ["qwen2"])
    (seen,) = run_on_ranks(look, 1, tmp_path / "qwen2" / "A")
    assert seen["queued"] == 2
    # Before its KV cache may be freed, vLLM must have forgotten aborted requests.
    assert seen["knows_aborted"] == [True, False] and seen["left"] == 0
    # With a budget of 2.5 tokens each, the third is sampled, and the fourth is queued.
    assert seen["parts"][0][1].responses.lengths.tolist() == [4, 4, 4]
    for field in ("responses", "rollout_log_probs"):
        rows = vars(seen["whole"])[field].rows()
        for row, other in zip(joined(seen["parts"], field), rows, strict=True):
            torch.testing.assert_close(row, other, rtol=0, atol=1e-5)
