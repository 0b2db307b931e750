"""What vLLM gives back of a GPU's memory in each sleep mode, and what it samples right after.

Each case starts a process of its own, because vLLM's sleeping memory allows one engine per process.
"""

import gc
import os
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.config.checks.installation import OLDEST_CURRENT, is_current
from hybridrl.config.choices import DType, SleepMode
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.requests import Requests
from hybridrl.rollout.engine import EnginePart
from hybridrl.rollout.sampler import Sampler
from hybridrl.rollout.vllm.engine import VLLMEngine
from tests.support.launch import run_on_ranks
from tests.support.reshard_cases import Case, error_of, prompts, rollout_config
from tests.support.scheduler_runs import assert_same, both_ways

MIB = 2**20
KV_CACHE_MB = 1024
# 131,072 x 512 elements of the tied embedding alone, in bfloat16.
WEIGHTS_MB = 128
# An engine that is collected takes the process group with it.
KEPT: list[VLLMEngine] = []

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def free_mb() -> float:
    """Free memory of the device, once torch has returned what it caches."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / MIB


def nap(folder: Path, mode: SleepMode, enforce_eager: bool) -> dict[str, Any]:
    """Memory and samples around a sleep."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    case = Case("qwen2", DType.bfloat16, tp=1, enforce_eager=enforce_eager)
    config = rollout_config(case, folder, sleep=mode, kv_cache_mb=KV_CACHE_MB)
    engine = VLLMEngine(config, folder, [], "cuda")
    KEPT.append(engine)
    generate = partial(Sampler(engine, config).generate, version=0)
    seen: dict[str, Any] = {"built": engine.awake, "built_mb": free_mb()}
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    wake(engine, weights)
    seen["before"] = generate(prompts(temperature=0.0))
    seen["schedulers"] = both_ways(engine, generate)
    awake_mb = free_mb()
    places = {name: tensor.data_ptr() for name, tensor in engine.tensors().items()}
    seen["naps"] = []
    for _ in range(3):
        generate(replace(prompts(), token_budget=2.5))  # leaves aborted requests
        engine.sleep()
        asleep_mb = free_mb()
        kept = EnginePart.WEIGHTS in engine.awake
        error = error_of(lambda: generate(prompts()))
        wake(engine, {} if kept else weights)
        seen["naps"].append(
            {
                "given_back_mb": asleep_mb - awake_mb,
                "taken_again_mb": asleep_mb - free_mb(),
                "error": error,
                "after": generate(prompts(temperature=0.0)),
            }
        )
    seen["kept_mb"], seen["short_mb"] = kept_beside_a_waking_engine(engine)
    seen["moved"] = [n for n, t in engine.tensors().items() if t.data_ptr() != places[n]]
    seen["awake_mb"] = awake_mb
    return seen


def in_several_steps(folder: Path) -> dict[str, Any]:
    """Responses that end at tokens of others, with eight steps of a submission and with one.

    Sampled at another temperature, with other weights, and after a sleep.
    """
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    case = Case("qwen2", DType.bfloat16, tp=1, enforce_eager=False)
    changes = {"max_response_tokens": 60, "num_scheduler_steps": 8, "sleep": SleepMode.all}
    config = rollout_config(case, folder, kv_cache_mb=KV_CACHE_MB, **changes)
    engine = VLLMEngine(config, folder, [], "cuda")
    KEPT.append(engine)
    generate = partial(Sampler(engine, config).generate, version=0)
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    wake(engine, weights)
    rows = [[k + 5, 9, *range(k)] for k in range(20)]
    most = [60 - k % 3 for k in range(len(rows))]
    whole = generate(prompts(rows=rows, each=1, max_tokens=60))
    stop = tuple(int(row[3 * k]) for k, row in enumerate(whole.responses.rows()[:12]))
    batch = prompts(rows=rows, each=1, max_tokens=most, stop=stop)
    graphs = engine._steps._multi_step.graphs
    replays = [graphs.replays] if graphs else []
    seen: dict[str, Any] = {"stop": stop, "most": most, "replays": replays}

    def both(batch: Requests = batch) -> tuple[RolloutBatch, RolloutBatch]:
        generate(batch)  # captures graphs
        several = generate(batch)
        replays.extend([graphs.replays] if graphs else [])
        with patch.object(engine, "_most_steps", 1):
            return several, generate(batch)

    seen["first"] = both()
    seen["colder"] = both(prompts(0.7, rows=rows, each=1, max_tokens=most, stop=stop))
    engine._model.load_weights((name, 1.5 * tensor) for name, tensor in weights.items())
    engine.sync()
    seen["changed"] = both()
    engine.sleep()
    wake(engine, weights)
    seen["slept"] = both()
    return seen


def kept_beside_a_waking_engine(engine: VLLMEngine) -> tuple[float, float]:
    """MiB that torch keeps cached over a wake where there is room for both, and where not."""
    kept = []
    for cached_mb in (1024, int(free_mb()) - 512):
        engine.sleep()
        before = torch.cuda.memory_reserved()
        cached = torch.empty(cached_mb * MIB, dtype=torch.uint8, device="cuda")
        del cached
        wake(engine, {})
        kept.append((torch.cuda.memory_reserved() - before) / MIB)
    return kept[0], kept[1]


def wake(engine: VLLMEngine, weights: dict[str, torch.Tensor]) -> None:
    """As a reshard does it: weights first, written before the KV cache is there."""
    engine.wake(EnginePart.WEIGHTS)
    engine._model.load_weights(weights.items())
    engine.wake(EnginePart.KV_CACHE)
    engine.sync()


def equal(one: RolloutBatch, other: RolloutBatch) -> bool:
    return torch.equal(one.responses.values, other.responses.values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=131072,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def test_several_steps_at_once_sample_what_single_ones_do(folder):
    """Responses that have ended stay in the batch for some steps, whose rounding may differ.

    The second and further steps are graphs, which see weights that change in place.
    """
    (seen,) = run_on_ranks(in_several_steps, 1, folder, device_type="cuda", time_limit_s=380)
    if is_current():
        replays = seen["replays"]
        assert replays[0] > 20 and all(b - a > 30 for a, b in pairwise(replays)), replays
    for name in ("first", "colder", "changed", "slept"):
        several, single = seen[name]
        for row, most in zip(several.responses.rows(), seen["most"], strict=True):
            tokens = row.tolist()
            assert not {*tokens[:-1]} & {*seen["stop"]}
            assert tokens[-1] in seen["stop"] or len(tokens) == most
        assert share_of_same(several, single) >= 0.7, name
    assert len({*seen["first"][0].responses.lengths.tolist()}) > 5
    assert share_of_same(seen["slept"][0], seen["first"][0]) >= 0.6
    assert not equal(seen["changed"][0], seen["first"][0])


def share_of_same(one: RolloutBatch, other: RolloutBatch) -> float:
    """Share of responses with the same tokens; compares log-probs up to the first other token."""
    same = 0
    for index, (row, more) in enumerate(
        zip(one.responses.rows(), other.responses.rows(), strict=True)
    ):
        pairs = zip(row.tolist(), more.tolist(), strict=False)
        count = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(row), len(more)))
        log_probs = [batch.rollout_log_probs.rows()[index][:count] for batch in (one, other)]
        torch.testing.assert_close(*log_probs, rtol=0, atol=0.05)
        same += row.tolist() == more.tolist()
    return same / len(one.responses)


@pytest.mark.parametrize(
    ("mode", "enforce_eager", "gives_mb"),
    [
        (SleepMode.none, True, (0, 16)),
        (SleepMode.kv_cache, True, (0.98 * KV_CACHE_MB, KV_CACHE_MB + 64)),
        (SleepMode.kv_cache, False, (0.98 * KV_CACHE_MB, KV_CACHE_MB + 64)),
        (SleepMode.all, False, (0.98 * KV_CACHE_MB + WEIGHTS_MB, KV_CACHE_MB + WEIGHTS_MB + 128)),
    ],
)
def test_sleep(mode, enforce_eager, gives_mb, folder):
    if (
        mode is SleepMode.kv_cache
        and tuple(map(int, version("vllm").split(".")[:2])) < OLDEST_CURRENT
    ):
        pytest.skip("this vLLM frees weights and KV cache together")
    (seen,) = run_on_ranks(
        nap, 1, folder, mode, enforce_eager, device_type="cuda", time_limit_s=380
    )
    low, high = gives_mb
    for one in seen["naps"]:
        assert low <= one["given_back_mb"] <= high
        assert abs(one["given_back_mb"] - one["taken_again_mb"]) < 32
        assert ("asleep" in one["error"]) == (mode is not SleepMode.none)
        assert equal(one["after"], seen["before"])
    assert seen["moved"] == []
    assert_same(seen["schedulers"])
    assert seen["kept_mb"] >= 1024
    assert mode is SleepMode.none or seen["short_mb"] < 512
    sleeps_when_built = seen["built_mb"] - seen["awake_mb"]
    assert low - 32 <= sleeps_when_built
    assert seen["before"].responses.values.unique().numel() > 1, "a model that says something"
