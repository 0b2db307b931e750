"""hybridrl export: folders that transformers loads, with the very weights that were trained."""

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, TaskType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridrl.checkpoint.verification import VerifiedCheckpoint
from hybridrl.commands.export import export
from hybridrl.commands.running import checkpoint_at
from hybridrl.config.choices import DType, Init
from hybridrl.config.errors import ConfigError
from hybridrl.distributed.storage.export import AdapterFiles, write_model
from tests.support.export_cases import STEP, Trained, checkpoint
from tests.support.role_configs import lora_config
from tests.support.tiny_hf import tiny_folder
from tests.support.whole_weights import InMemory

IDS = torch.arange(24).reshape(2, 12)


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> Iterator[dict[str, Trained]]:
    """Checkpoints of models with tied and untied heads, of adapters, and of random weights."""
    folder = tmp_path_factory.mktemp("export")
    llama = tiny_folder("llama", folder / "llama")
    qwen2 = tiny_folder("qwen2", folder / "qwen2")
    experts = tiny_folder("qwen3_moe", folder / "qwen3_moe")
    attention = lora_config(4, target_modules=["q_proj", "o_proj"])
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        yield {
            "untied": checkpoint(folder / "untied", llama),
            "tied": checkpoint(folder / "tied", qwen2),
            "adapted": checkpoint(folder / "adapted", qwen2, lora=lora_config(4)),
            "drawn": checkpoint(folder / "drawn", llama, lora=lora_config(4), init=Init.random),
            "experts": checkpoint(folder / "experts", experts),
            "adapted_experts": checkpoint(folder / "adapted_experts", experts, lora=attention),
        }
    finally:
        dist.destroy_process_group()


def exported(case: Trained, target: Path, dtype: DType = DType.float32) -> Path:
    export(case.run_dir, target, dtype, None)
    return target


@pytest.mark.parametrize("name", ["untied", "tied", "adapted", "drawn"])
def test_transformers_loads_the_trained_bits(cases, name, tmp_path, capsys):
    case = cases[name]
    folder = exported(case, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    found = dict(model.named_parameters())
    assert found.keys() == case.weights.keys()
    for weight, expected in case.weights.items():
        torch.testing.assert_close(found[weight].detach(), expected, rtol=0, atol=0)
    said = capsys.readouterr().out
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert f"step {STEP}, {len(found)} tensors as float32, {size / 1e6:,.1f} MB" in said


@pytest.mark.parametrize("name", ["experts", "adapted_experts"])
def test_each_expert_is_exported_under_its_own_names(cases, name, tmp_path):
    case = cases[name]
    folder = exported(case, tmp_path / "model")
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == case.weights.keys()
    for weight, expected in case.weights.items():
        assert torch.equal(saved[weight], expected), weight
    fused = AutoModelForCausalLM.from_pretrained(folder).model.layers[1].mlp.experts
    for part, found in zip(("gate", "up"), fused.gate_up_proj[5].chunk(2), strict=True):
        assert torch.equal(found, saved[f"model.layers.1.mlp.experts.5.{part}_proj.weight"])
    assert torch.equal(fused.down_proj[5], saved["model.layers.1.mlp.experts.5.down_proj.weight"])


def test_logits_are_those_of_the_trained_model(cases, tmp_path):
    case = cases["tied"]
    folder = exported(case, tmp_path / "model")
    trained = AutoModelForCausalLM.from_pretrained(tiny_folder("qwen2", tmp_path / "base"))
    before = trained(IDS).logits
    trained.load_state_dict(case.weights, strict=False)
    logits = AutoModelForCausalLM.from_pretrained(folder)(IDS).logits
    assert (logits == trained(IDS).logits).all()
    assert not torch.allclose(logits, before)


def test_what_stands_around_the_weights_is_the_models(cases, tmp_path):
    folder = exported(cases["untied"], tmp_path / "model")
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "hybridrl_export.json",
        "model.safetensors",
        "tokenizer.json",
    }
    record = json.loads((folder / "hybridrl_export.json").read_text())
    assert record["step"] == STEP
    assert record["checkpoint"] == str(cases["untied"].folder)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 1


def test_a_model_without_a_generation_config_gets_the_one_of_its_config(tmp_path):
    source = tiny_folder("llama", tmp_path / "llama")
    (source / "generation_config.json").unlink()
    weights = AutoModelForCausalLM.from_pretrained(source).state_dict()
    write_model(InMemory(weights), source, tmp_path / "model")
    written = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    config = json.loads((source / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (1, 2)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_adapters_stand_beside_it_as_peft_reads_them(cases, tmp_path):

    case = cases["adapted"]
    folder = exported(case, tmp_path / "model")
    written = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert written.keys() == case.adapters.keys()
    assert all((written[name] == case.adapters[name]).all() for name in written)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    adapted = PeftModel.from_pretrained(base, folder / "adapter")(IDS).logits
    merged = AutoModelForCausalLM.from_pretrained(folder)(IDS).logits
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)


def test_peft_reads_an_adapters_config(tmp_path):
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    written = []
    for number, order in enumerate((names, names[::-1])):
        folder = tmp_path / str(number)
        lora = lora_config(8, target_modules=order)
        AdapterFiles({}, lora, "base").write(folder)
        read = LoraConfig.from_pretrained(str(folder))
        assert (read.r, read.lora_alpha, read.target_modules) == (8, lora.alpha, set(names))
        assert (read.task_type, read.base_model_name_or_path) == (TaskType.CAUSAL_LM, "base")
        written.append((folder / "adapter_config.json").read_bytes())
    assert written[0] == written[1]


def test_bfloat16_is_rounded_from_the_trained_bits(cases, tmp_path):
    case = cases["untied"]
    folder = exported(case, tmp_path / "model", DType.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    for name, weight in load_file(folder / "model.safetensors").items():
        assert (weight == case.weights[name].bfloat16()).all()


def test_large_models_are_written_in_several_shards(cases, tmp_path):
    weights, source = cases["untied"].weights, tmp_path / "source"
    tiny_folder("llama", source)
    write_model(InMemory(weights), source, tmp_path / "model", shard_bytes=20_000)
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 21_500 for path in shards)  # with their headers
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all((found[name] == weight).all() for name, weight in weights.items())


def test_folder_in_use_is_refused_but_an_earlier_export_replaced(cases, tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    exported(cases["adapted"], target)
    assert (target / "adapter").is_dir()
    exported(cases["untied"], target)
    assert not (target / "adapter").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (target / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"more than an earlier export: notes\.txt,"):
        exported(cases["tied"], target)
    (target / "hybridrl_export.json").unlink()
    with pytest.raises(ConfigError, match=r"not empty(.|\n)*Use another folder\.$"):
        exported(cases["untied"], target)


def test_neither_the_trained_model_nor_checkpoints_are_written_over(cases, tmp_path):
    case, base = cases["untied"], tmp_path / "base"
    exported(case, base)
    with pytest.raises(ConfigError, match="contains the base model"):
        export(case.run_dir, base, DType.float32, str(base))
    with pytest.raises(ConfigError, match="lies among a run's checkpoints"):
        exported(case, case.run_dir / "checkpoints" / "model")
    with pytest.raises(ConfigError, match="lies among a run's checkpoints"):
        exported(case, tmp_path / "other" / "step_00000040" / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_checkpoint_that_goes_while_it_is_exported_is_told_so(cases, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    shutil.copytree(cases["tied"].run_dir, run_dir)

    def pruned_then_found(path: Path) -> VerifiedCheckpoint:
        found = checkpoint_at(path)
        shutil.rmtree(found.folder)
        return found

    monkeypatch.setattr("hybridrl.commands.export.checkpoint_at", pruned_then_found)
    with pytest.raises(ConfigError, match=r"was removed meanwhile \(checkpoint\.keep_last\)"):
        export(run_dir, tmp_path / "model", DType.float32, None)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_failed_read_is_not_called_a_failed_write(cases, tmp_path, capsys):
    base = tmp_path / "base"
    exported(cases["untied"], base)
    (base / "special_tokens_map.json").symlink_to("/proc/self/mem")  # a file that gives an EIO
    with pytest.raises(SystemExit, match="1"):
        export(cases["untied"].run_dir, tmp_path / "model", DType.float32, str(base))
    said = capsys.readouterr().err
    assert "could not be read" in said and "written, and was removed" not in said


def test_damaged_file_is_named_and_nothing_is_written(cases, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(cases["tied"].run_dir, run_dir)
    (shard,) = run_dir.glob("checkpoints/*/state/*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ConfigError, match=f"state/{shard.name} has the sha256"):
        export(shard.parents[1], tmp_path / "model", DType.float32, None)
    with pytest.raises(ConfigError, match=f"state/{shard.name} has the sha256"):
        export(run_dir, tmp_path / "model", DType.float32, None)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_another_model_than_was_trained_is_refused(cases, tmp_path):
    with pytest.raises(ConfigError, match=r"has besides(.|\n)*--model PATH"):
        other = str(tiny_folder("llama", tmp_path / "llama"))
        export(cases["tied"].run_dir, tmp_path / "model", DType.float32, other)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_disk_that_takes_no_more_leaves_the_earlier_export(cases, tmp_path, capsys):
    target = exported(cases["tied"], tmp_path / "model")
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit, match="1"), files_of_at_most(10_000):
        exported(cases["untied"], target)
    assert "could not be written" in capsys.readouterr().err
    assert (target / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
