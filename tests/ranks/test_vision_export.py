"""Checkpoints and exports of models that take images: what was trained, and what was not."""

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from hybridrl.commands.export import export
from hybridrl.config.choices import DType, Init
from hybridrl.distributed.mesh import build_mesh
from hybridrl.distributed.storage.checkpoint import StoredState
from hybridrl.workers.reference import PolicyConfig, PolicyWorker
from tests.support.export_cases import checkpoint
from tests.support.role_configs import fsdp_config, lora_config, model_config
from tests.support.tiny_hf import packed_recurrences
from tests.support.tiny_vision import VISION, tiny_vision_folder, tiny_vision_model
from tests.support.whole_weights import full_state_dict

TOWER = ("visual.", "vision_tower.", "multi_modal_projector.")
CASES = {
    **{name: (name, {}) for name in VISION},
    "trained tower": ("qwen3_vl", {"train_vision": True}),
    "adapters": ("mistral3", {"lora": lora_config(4)}),
    "drawn": ("qwen2_5_vl", {"init": Init.random}),
    "drawn adapters": ("qwen3_vl", {"init": Init.random, "lora": lora_config(4)}),
}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = f"file://{tmp_path_factory.mktemp('vision')}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    with packed_recurrences(tiny_vision_model("qwen3_5")):
        yield
    dist.destroy_process_group()


def is_of_tower(name):
    return name.removeprefix("model.").startswith(TOWER)


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_was_trained_and_what_was_not(group, case, tmp_path):
    name, changes = CASES[case]
    base = tiny_vision_folder(name, tmp_path / "base")
    made = checkpoint(tmp_path / "run", base, **changes)
    stored = [
        key.removeprefix("actor.weights.") for key in StoredState(made.folder / "state").tensors
    ]
    assert any(map(is_of_tower, stored)) is ("train_vision" in changes)
    export(made.run_dir, tmp_path / "model", DType.float32, None)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    before = AutoModelForImageTextToText.from_pretrained(base)
    assert model.dtype == torch.float32
    trained = dict(model.named_parameters())
    for weight, first in before.named_parameters():
        kept = is_of_tower(weight) and not changes.keys() & {"train_vision", "init"}
        moves = "lora" not in changes or ".q_proj." in weight
        if kept or moves:
            assert trained[weight].equal(first) is kept, weight
    if "lora" in changes and "init" not in changes:
        adapted = PeftModel.from_pretrained(before, tmp_path / "model" / "adapter")
        assert not [
            key for key, _ in adapted.named_parameters() if "vision" in key and "lora_" in key
        ]
        merged = dict(adapted.merge_and_unload().named_parameters())
        for weight, value in trained.items():
            torch.testing.assert_close(merged[weight], value, rtol=0, atol=1e-6)
    for file in base.iterdir():
        assert (tmp_path / "model" / file.name).is_file(), file
    # A policy that is sampled has the same weights.
    spec = fsdp_config(dp_shard=1)
    config = PolicyConfig(
        model=model_config(base, init=changes.get("init", Init.pretrained)),
        fsdp=spec,
        lora=changes.get("lora"),
        checkpoint=str(made.folder),
    )
    worker = PolicyWorker(config, build_mesh(spec, "cpu"))
    whole = full_state_dict(worker.model)
    assert whole.keys() == made.weights.keys()
    assert all(torch.equal(whole[key], weight) for key, weight in made.weights.items())


def test_random_towers_are_drawn_as_transformers_draws_them(group, tmp_path):
    """Matrices of the given width; vectors as each module's own: ones in norms, zero biases."""
    base = tiny_vision_folder("qwen3_vl", tmp_path / "base")
    weights = checkpoint(tmp_path / "run", base, init=Init.random).weights
    assert weights["model.visual.blocks.0.norm1.weight"].eq(1).all()
    assert weights["model.visual.blocks.0.attn.qkv.bias"].eq(0).all()
    kernel = weights["model.visual.patch_embed.proj.weight"]
    assert abs(float(kernel.std()) / 0.02 - 1) < 0.05
