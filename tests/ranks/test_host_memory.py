"""No process ever holds a whole model: peaks of private memory at load, save, export and resume."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from hybridrl.checkpoint import commit
from hybridrl.checkpoint.manifest import Manifest
from hybridrl.commands.export import export
from hybridrl.config.choices import DType
from hybridrl.distributed.mesh import build_mesh
from hybridrl.distributed.weights import empty_model
from hybridrl.trainer.tracking.provenance import plain, versions
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.saver import SaverWorker
from tests.support.launch import run_on_ranks
from tests.support.peak_memory import peak_in, private_bytes
from tests.support.role_configs import actor_config, fsdp_config, model_config, saver_config

MIB, GIB = 2**20, 2**30
STEP, RANKS = 20, 2


class Case(NamedTuple):
    """A model, and what a process may hold beside its shards.

    Attributes:
        sizes: of its config.json.
        spare: bytes; of the small model beside what the process holds before.
        counts_process: whether what the process holds before counts, too.
    """

    sizes: dict[str, int]
    spare: int
    counts_process: bool


# 49 M parameters, 98 MB on disk; and 1.0e9, 2.0 GB on disk and 4.0 GB in float32.
SMALL = Case(
    {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 11, "vocab_size": 2048},
    64 * MIB,
    False,
)
LARGE = Case(
    {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 8192},
    GIB,
    True,
)


def random_model(case: Case, folder: Path) -> Path:
    """A random Llama in bfloat16, one file for each layer."""
    config = LlamaConfig(
        **case.sizes,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=128,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    shapes = {k: p.shape for k, p in empty_model(AutoModelForCausalLM, folder).named_parameters()}
    layers = {name: name.split(".")[2] if ".layers." in name else "rest" for name in shapes}
    index = {name: f"model-{layer}.safetensors" for name, layer in layers.items()}
    for file in sorted(set(index.values())):
        names = [name for name in shapes if index[name] == file]
        tensors = {name: torch.empty(shapes[name], dtype=torch.bfloat16) for name in names}
        for tensor in tensors.values():
            tensor.normal_(0.0, 0.02)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def load_and_save(model: Path, run_dir: Path) -> dict[str, Any]:
    """Peaks on this rank while an actor is loaded, written as a model, and checkpointed."""
    found: dict[str, Any] = {"before": private_bytes()}
    actor, saver = _built(model, found)
    with peak_in(found, "final"):
        assert actor.save(str(run_dir / "final")) is None
    partial = [str(commit.begin(run_dir, STEP)) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(partial)
    with peak_in(found, "checkpoint"):
        saver.begin_save(partial[0])
        result = saver.finish_save()
    assert result.error is None
    everyones: list[Any] = [None] * RANKS
    dist.all_gather_object(everyones, result.files)
    if dist.get_rank() == 0:
        config = {
            "run": {"name": "memory"},
            "hardware": {"accelerator": "cpu"},
            "model": plain(model_config(model)),
            "lora": None,
            "algorithm": {"loss": {"function": "ppo_clip"}},
        }
        now = datetime.now(UTC).isoformat(timespec="seconds")
        files = {name: record for each in everyones for name, record in each.items()}
        commit.commit(
            Path(partial[0]), Manifest(STEP, now, config, versions(), RANKS, {}, files, {})
        )
    return found


def resume(model: Path, checkpoint: Path) -> dict[str, Any]:
    """Peaks on this rank while an actor takes a checkpoint up."""
    found: dict[str, Any] = {"before": private_bytes()}
    _, saver = _built(model, found)
    with peak_in(found, "resume"):
        assert saver.load(str(checkpoint)) == []
    return found


def _built(model: Path, found: dict[str, Any]) -> tuple[ActorWorker, SaverWorker]:
    spec = fsdp_config(dp_shard=RANKS)
    mesh = build_mesh(spec, "cpu")
    with peak_in(found, "load"):
        actor = ActorWorker(actor_config(model, spec), mesh)
    saver = SaverWorker(saver_config(), mesh)
    saver.roles = {"actor": actor}
    found["shards"] = sum(param.to_local().numel() * 4 for param in actor.model.parameters())
    return actor, saver


def export_alone(run_dir: Path, target: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"before": private_bytes(), "shards": 0}
    with peak_in(found, "export"):
        export(run_dir, target, DType.float32, None)
    return found


@pytest.fixture(scope="module", params=[SMALL, pytest.param(LARGE, marks=pytest.mark.slow)])
def peaks(request, tmp_path_factory) -> Iterator[tuple[Case, list[dict[str, Any]]]]:
    case, folder = request.param, tmp_path_factory.mktemp("memory")
    model, run_dir = random_model(case, folder / "model"), folder / "run"
    run_dir.mkdir()
    ranks = run_on_ranks(load_and_save, RANKS, model, run_dir, time_limit_s=400)
    checkpoint = run_dir / "checkpoints" / f"step_{STEP:08d}"
    ranks += run_on_ranks(resume, RANKS, model, checkpoint, time_limit_s=200)
    ranks += run_on_ranks(export_alone, 1, run_dir, folder / "exported", time_limit_s=200)
    yield case, ranks


@pytest.mark.parametrize("phase", ["load", "final", "checkpoint", "resume", "export"])
def test_a_process_holds_its_shards_and_little_more(peaks, phase):
    """A checkpoint is written from a copy of the shards, which a GPU's host has in their place."""
    case, ranks = peaks
    seen = [found for found in ranks if phase in found]
    assert seen
    for found in seen:
        copies = 2 if phase == "checkpoint" else 1
        before = 0 if case.counts_process else found["before"]
        beside = found[phase] - before - copies * found["shards"]
        told = {name: f"{value / MIB:.0f} MiB" for name, value in found.items()}
        print(f"{phase}: {beside / MIB:.0f} MiB beside the shards; {told}")
        assert beside <= case.spare, told
