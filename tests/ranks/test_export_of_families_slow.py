"""Exports of families whose layers differ most, loaded by transformers and by vLLM's own loader."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridrl.commands.export import export
from hybridrl.config.choices import DType
from hybridrl.rollout.trace import live_tensors
from tests.support.export_cases import checkpoint
from tests.support.launch import run_on_ranks
from tests.support.reshard_cases import (
    Actor,
    Case,
    build_worker,
    differences,
    forget_tensor_parallel_groups,
    loaded_by_vllm,
    log_prob_errors,
    prompts,
    set_rank_environment,
    write_folders,
)

FAMILIES = (
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "nemotron_h"),
    *("gpt_oss", "gemma4", "gemma4_untied", "gemma4_moe", "deepseek_v3"),
)


def exported(name, root):
    """Trained weights, what transformers loads of their export, and how vLLM differs with it.

    In bfloat16, too: it rounds what vLLM would round, no more.
    """
    case, base = Case(name, DType.float32, tp=1), root / name / "A"
    trained, folder = checkpoint(root / name / "run", base), root / name / "export"
    export(trained.run_dir, folder, DType.float32, None)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model.save_pretrained(root / name / "again")
    worker = build_worker(case, root / name, "cpu")
    actor = Actor(folder, case.spec(), worker.mesh)
    worker.connect({"actor": actor})
    worker.reshard(1)
    live = live_tensors(worker.engine._model)
    loaded = loaded_by_vllm(worker.config, folder)
    held = {key: tensor for key, tensor in live.items() if key in loaded}
    differing = differences(held, loaded)
    errors = log_prob_errors(worker.generate(prompts()), folder)
    export(trained.run_dir, root / name / "rounded", DType.bfloat16, None)
    config = replace(worker.config, dtype=DType.bfloat16)
    rounded = (loaded_by_vllm(config, path) for path in (folder, root / name / "rounded"))
    differing += differences(*rounded)
    return trained.weights, loading, differing, errors


def all_exported(names, root):
    set_rank_environment()
    results = {}
    for name in names:
        if results:
            forget_tensor_parallel_groups()
        results[name] = exported(name, root)
    return results


@pytest.fixture(scope="module")
def loaded(request, tmp_path_factory):
    """Folder and results of the families that are asked for."""
    items = request.session.items
    asked = {item.callspec.params.get("name") for item in items if "name" in item.fixturenames}
    names, root = [name for name in FAMILIES if name in asked], tmp_path_factory.mktemp("models")
    write_folders(root, names)
    return root, run_on_ranks(all_exported, 1, names, root, time_limit_s=560)[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_and_vllm_load_what_was_trained(loaded, name):
    root, results = loaded
    weights, loading, differing, errors = results[name]
    assert not any(loading.values()), loading
    again = load_file(root / name / "again" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[key], weight) for key, weight in weights.items())
    base = load_file(root / name / "A" / "model.safetensors")
    assert sum(not torch.equal(base[key], weight) for key, weight in weights.items()) > 5
    assert differing == []
    assert errors.max() < 1e-4
