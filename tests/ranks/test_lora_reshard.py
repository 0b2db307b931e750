"""Adapters in vLLM and on disk: A and B beside weights that are moved once, adapters for peft.

Real processes, real FSDP2 shards, a real vLLM. W + alpha / r * B A of its tensors is compared with
what it loads from the merged checkpoint, its log-probs with the trainer's, and theirs with peft's.
"""

import json
import re
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridrl.config.choices import DType, RolloutWeights
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.distributed.forward.log_probs import Entropy
from hybridrl.distributed.forward.packing import pack
from hybridrl.rollout.trace import live_tensors
from hybridrl.workers.actor import ActorWorker
from tests.support.launch import run_on_ranks
from tests.support.lora_cases import move_away
from tests.support.reshard_cases import (
    BY_COLUMNS,
    CONFIGS,
    Case,
    build_worker,
    differences,
    error_of,
    forget_tensor_parallel_groups,
    loaded_by_vllm,
    prompts,
    set_rank_environment,
    write_folders,
)
from tests.support.role_configs import actor_config, lora_config
from tests.support.tiny_hf import AFTER_DENSE
from tests.support.training_batches import training_batch

RANK, TARGETS = 4, ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
# Families with recurrent layers, all of whose linear layers are adapted.
WITH_DEFAULTS = ("qwen3_next", "lfm2", "nemotron_h")


class Looked(NamedTuple):
    """What a rank saw of a case."""

    columns: list
    full: dict
    adapted: dict
    base: list
    errors: dict
    difference: float
    flipped: str
    log_probs: torch.Tensor


CASES = {
    "tp 2": (
        2,
        [
            Case("llama", DType.bfloat16, tp=2),
            Case("qwen2", DType.bfloat16, tp=2, weights=RolloutWeights.fp8),
        ],
    ),
    "one rank": (1, [Case("qwen2", DType.float32, tp=1)]),
    "tp 1, several": (2, [Case("qwen3", DType.float32, tp=1), Case("qwen2", DType.bfloat16, tp=2)]),
    "families": (
        2,
        [
            Case("phi3", DType.float32, tp=2),  # layers that are fused in the checkpoint, too
            Case("gemma3", DType.float32, tp=2),
            Case("olmo2", DType.float32, tp=2),
            Case("smollm3", DType.float32, tp=1),
            Case("granite", DType.float32, tp=1),
            Case("qwen3_moe", DType.float32, tp=2),
            Case("glm4", DType.float32, tp=2),
            Case("nemotron", DType.float32, tp=2),
            Case("gpt_oss", DType.float32, tp=2),
            Case("gemma4_untied", DType.float32, tp=2),  # layers with other heads
        ],
    ),
    "latent": (2, [Case(name, DType.float32, tp=2) for name in AFTER_DENSE]),
    "recurrent": (2, [Case(name, DType.float32, tp=2) for name in WITH_DEFAULTS]),
    "replicas": (4, [Case("qwen3", DType.bfloat16, tp=2, dp_replicate=2)]),
}


def look_at_all(cases, root):
    set_rank_environment()
    seen, workers = [], []
    for case in cases:
        if workers:
            forget_tensor_parallel_groups()
        lora = lora_config(RANK, target_modules=targets_of(case))
        workers.append(build_worker(case, root / case.model, "cpu", lora=lora))
        seen.append(look(case, workers[-1], root / case.model))
    return seen


def targets_of(case):
    if case.model in (*WITH_DEFAULTS, *AFTER_DENSE):
        return list(model_shape(CONFIGS[case.model].to_dict()).linear_layers)
    if case.model in BY_COLUMNS:  # experts have no adapters
        return TARGETS[:3]
    if case.model == "gemma4_untied":  # values are keys in one of its layers
        return [name for name in TARGETS if name != "v_proj"]
    if case.model == "glm4":  # of these, gate and up are fused
        return ["q_proj", "o_proj", "gate_up_proj", "down_proj"]
    return FUSED if case.model.startswith("phi3") else TARGETS


def look(case, worker, folder):
    spec = replace(case.spec(), columns=worker.columns(case.spec()))
    config = actor_config(folder / "A", spec, lora=worker.config.lora, temperature=1.0)
    actor = ActorWorker(config, worker.mesh)
    worker.connect({"actor": actor})
    full = worker.reshard(1)
    worker.generate(prompts())
    worker.sleep()
    move_away(actor)
    adapted = worker.reshard(2)
    actor.save(str(folder / "final"))
    dist.barrier()  # rank 0 writes
    live = worker.engine.tensors()
    held = live_tensors(worker.engine._model)
    loaded = loaded_by_vllm(worker.config, folder / "A")
    base = differences({n: t.clone() for n, t in held.items() if n in loaded}, loaded)
    errors = merged_errors(live, loaded_by_vllm(worker.config, folder / "final"))
    batch = worker.generate(prompts())
    with torch.no_grad():
        sampled = actor.model(pack(batch, actor.device), 1.0, Entropy.omit).log_probs
        packed = pack(training_batch(), actor.device)
        log_probs = actor.model(packed, 1.0, Entropy.omit).log_probs
    difference = float((sampled - batch.rollout_log_probs.values).abs().mean())
    return Looked(spec.columns, full, adapted, base, errors, difference, flip(worker), log_probs)


def merged_errors(live, merged):
    """By adapted weight: largest error of W + alpha / r * B A, in units of the dtype's rounding."""
    errors = {}
    for name in live:
        if name.endswith(".lora_A"):
            layer = name.removesuffix("lora_A")
            weight = f"{layer}weight"
            factors = live[f"{layer}lora_B"].double().abs(), live[name].double().abs()
            update = live[f"{layer}lora_B"].double() @ live[name].double()
            own, other, dtype = live[weight].double(), merged[weight].double(), live[name].dtype
            if f"{weight}_scale" in live:
                dtype = torch.float8_e4m3fn
                own = live[weight].view(dtype).double() * live[f"{weight}_scale"]
                other = other.t() * merged[f"{weight}_scale"]
            error = (own + 8 / 4 * update - other).abs()
            largest = own.abs() + 8 / 4 * factors[0] @ factors[1]
            if f"{weight}_scale" in live:  # small numbers are rounded as the smallest normal one
                largest = largest.maximum(live[f"{weight}_scale"].double() / 64)
            errors[weight] = float((error / largest).max() / torch.finfo(dtype).eps)
    return errors


def flip(worker):
    """What is said of one bit of the embedding, which the last reshard did not move."""
    tensors = worker.engine.tensors()
    (name,) = {"model.embed_tokens.weight", "model.embedding.weight"} & tensors.keys()
    byte = tensors[name][0].view(torch.uint8)[:1]
    byte ^= 1
    message = error_of(lambda: worker.resharder.verify(3))
    byte ^= 1
    return message


# Layers of a checkpoint that are parts of one of vLLM's.
FUSED_BY_VLLM = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | {
    "gate_up_proj": "up_proj",
    "kv_a_proj_with_mqa": "q_a_proj",
    "w3": "w1",
}


def adapted_layers(case):
    """Each adapted linear layer: decoder layer, its kind, name, (outputs, inputs)."""
    shape, targets = model_shape(CONFIGS[case.model].to_dict()), targets_of(case)
    kinds = [(index, shape.kinds[kind]) for index, kind in enumerate(shape.order)]
    layers = [(i, kind, *item) for i, kind in kinds for item in kind.linear_layers.items()]
    return [layer for layer in layers if layer[2] in targets]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in list(CASES)[1:]]


@pytest.fixture(scope="module", params=["tp 2", *SLOW])
def looked(request, tmp_path_factory):
    """(case, folder, what each rank saw), for all cases of a number of ranks."""
    ranks, cases = CASES[request.param]
    root = tmp_path_factory.mktemp("models")
    write_folders(root, [case.model for case in cases])
    by_rank = run_on_ranks(look_at_all, ranks, cases, root, time_limit_s=280)
    return [
        (case, root / case.model, [seen[index] for seen in by_rank])
        for index, case in enumerate(cases)
    ]


def test_vllm_holds_the_base_and_factors_of_what_it_loads_from_the_merged_folder(looked):
    """Each of W, A, B and the merged weight is rounded once: 4 halves of an eps, and 1 to spare."""
    for case, _, by_rank in looked:
        for seen in by_rank:
            assert seen.base == [], case
            layers = {(index, FUSED_BY_VLLM.get(n, n)) for index, _, n, _ in adapted_layers(case)}
            assert len(seen.errors) == len(layers)
            assert max(seen.errors.values()) < 3, (case, seen.errors)


def test_vllm_samples_with_the_adapters(looked):
    for case, _, by_rank in looked:
        for seen in by_rank:
            limit = 1e-5 if case.dtype is DType.float32 else 0.05
            limit = case.rounding if case.is_fp8 else limit  # without adapters it is 0.9
            assert seen.difference < limit, case


def test_shards_of_both_kinds_of_cut_were_moved(looked):
    for case, _, by_rank in looked:
        assert bool(by_rank[0].columns) == (case.tp == 2)


def test_only_adapters_are_written_again(looked):
    """A and B of two layers; a rank has its columns of A or rows of B, at least one key head's."""
    for case, _, by_rank in looked:
        elements = 0
        for _, kind, name, (outputs, inputs) in adapted_layers(case):
            head = kind.attention.head_dim if kind.attention else 0
            if name in ("o_proj", "out_proj", "down_proj", "w2"):
                elements += RANK * (inputs // case.tp + outputs)
            elif name in ("q_a_proj", "kv_a_proj_with_mqa"):  # each rank has all of them
                elements += RANK * (inputs + outputs)
            else:
                elements += RANK * (inputs + max(outputs // case.tp, head))
        size = 4 if case.dtype is DType.float32 else 2
        for seen in by_rank:
            assert seen.adapted["written_bytes"] == elements * size
            assert seen.full["written_bytes"] > 10 * seen.adapted["written_bytes"]
            assert seen.adapted["received_bytes"] <= seen.full["received_bytes"]


def test_a_flipped_bit_of_what_was_not_moved_is_found(looked):
    for _, _, by_rank in looked:
        for seen in by_rank:
            assert re.search(r"\n  model.embed\w+.weight on ranks \[0", seen.flipped)
            assert seen.flipped.count("\n") == 1


def test_peft_loads_the_adapter_and_transformers_the_merged_folder(looked):
    """Both give the trained model's log-probs, but for how its forward in float32 rounds.

    Theirs are computed in float64: in float32 two forwards may each be off by the bound.
    """
    for case, folder, by_rank in looked:
        # Grouped products of experts have no float64.
        is_mixture = case.model in (*BY_COLUMNS, "qwen3_next")
        eager = {"experts_implementation": "eager"} if is_mixture else {}
        base = AutoModelForCausalLM.from_pretrained(folder / "A", dtype=torch.float32, **eager)
        adapter = folder / "final" / "adapter"
        assert sorted(path.name for path in adapter.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        assert json.loads((adapter / "adapter_config.json").read_text())[
            "base_model_name_or_path"
        ] == str(folder / "A")
        adapted = PeftModel.from_pretrained(base, adapter).eval()
        final = folder / "final"
        merged = AutoModelForCausalLM.from_pretrained(final, dtype="auto", **eager).eval()
        for model in (adapted, merged):
            assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
            exact = log_probs_of(model.double()).double()  # Nemotron-H's logits are float32
            torch.testing.assert_close(by_rank[0].log_probs.double(), exact, rtol=0, atol=1e-5)
        plain = AutoModelForCausalLM.from_pretrained(folder / "A", dtype=torch.float32).eval()
        assert (log_probs_of(plain) - by_rank[0].log_probs).abs().max() > 1e-2


def test_the_merged_folder_is_the_base_and_the_adapter(looked):
    """W + alpha / r * B A in float64 out of the files, to the rounding of float32."""
    for case, folder, _ in looked:
        base = load_file(folder / "A" / "model.safetensors")
        merged = load_file(folder / "final" / "model.safetensors")
        adapter = load_file(folder / "final" / "adapter" / "adapter_model.safetensors")
        assert len(adapter) == 2 * len(adapted_layers(case))
        assert merged.keys() == base.keys()
        for name, weight in merged.items():
            module = name.removesuffix(".weight").replace("backbone.", "model.")  # Nemotron-H
            factors = f"base_model.model.{module}.lora_"
            if f"{factors}A.weight" not in adapter:
                assert torch.equal(weight, base[name]), name
                continue
            a, b = (adapter[f"{factors}{which}.weight"].double() for which in "AB")
            expected = base[name].double() + 8 / 4 * b @ a
            torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-7)


@torch.no_grad()
def log_probs_of(model):
    batch, found = training_batch(), []
    for prompt, response in zip(batch.prompts.rows(), batch.responses.rows(), strict=True):
        logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0]
        log_p = logits[len(prompt) - 1 : -1].log_softmax(-1)
        found.append(log_p.gather(-1, response[:, None])[:, 0])
    return torch.cat(found)
