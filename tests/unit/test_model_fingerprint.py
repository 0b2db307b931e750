"""Fingerprints of models' files: what shows in them, what does not, and what they cost."""

import json
import os
import shutil
from pathlib import Path

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ModelPathConfig, RewardModelConfig
from hybridrl.models.fingerprints import BLOCK, BLOCKS, base_models, fingerprint, other_files
from hybridrl.models.resolve import EMBEDDED_FOLDER
from tests.support.run_configs import run_config

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path) -> Path:
    """The embedded model in a folder of its own."""
    return Path(shutil.copytree(EMBEDDED_FOLDER, tmp_path / "model"))


def flip(path: Path, at: int) -> None:
    """Turn one bit of a file over."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def changed(model: Path) -> tuple[str, ...]:
    """The files by which a copy of the embedded model differs from it."""
    before = {"model.path": fingerprint(EMBEDDED_FOLDER)}
    return other_files(before, {"model.path": fingerprint(model)}).get("model.path", ())


def large(path: Path, size: int) -> Path:
    """A file of zeros that takes no room."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_the_same_files_elsewhere_are_the_same(model):
    (model / "README.md").write_text("mine")
    (model / "pytorch_model.bin").write_bytes(b"the same weights in another format")
    for path in model.iterdir():
        os.utime(path, (1, 1))
    assert changed(model) == ()
    assert sorted(fingerprint(model)) == sorted(path.name for path in EMBEDDED_FOLDER.iterdir())


@pytest.mark.parametrize("name", sorted(path.name for path in EMBEDDED_FOLDER.iterdir()))
def test_a_bit_of_any_small_file_shows_under_its_name(model, name):
    flip(model / name, (model / name).stat().st_size - 2)
    assert changed(model) == (name,)


def test_what_nobody_reads_and_who_has_written_it_do_not_count(model):
    for name in ("hybridrl_export.json", "eval_results.json", "trainer_state.json", "notes.txt"):
        (model / name).write_text("{}")
    for name in ("config.json", "generation_config.json"):
        content = json.loads((model / name).read_text()) | {"transformers_version": "5.16.1"}
        (model / name).write_text(json.dumps(content))
    assert changed(model) == ()
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    assert changed(model) == ("config.json",)


def test_files_that_came_or_went_show(model):
    (model / "generation_config.json").rename(model / "chat_template.jinja")
    assert changed(model) == ("chat_template.jinja", "generation_config.json")


def test_weights_in_the_older_format_count_where_there_are_no_others(model):
    (model / WEIGHTS).rename(model / "pytorch_model.bin")
    assert changed(model) == (WEIGHTS, "pytorch_model.bin")


@pytest.mark.parametrize("at", [0.0, 0.3, 0.7, 1.0])
def test_large_weights_show_a_change_of_a_fiftieth_of_them_anywhere(tmp_path, at):
    size = 64 * 2**20 + 12345
    file = large(tmp_path / WEIGHTS, size)
    before = fingerprint(tmp_path)
    with file.open("r+b") as stream:
        stream.seek(round(at * (size - size // 50)))
        stream.write(b"\1" * (size // 50))
    assert fingerprint(tmp_path) != before


@pytest.mark.parametrize("at", [0, -1])
def test_large_weights_show_their_first_and_last_byte_and_their_size(tmp_path, at):
    size = 64 * 2**20 + 12345
    file = large(tmp_path / WEIGHTS, size)
    before = fingerprint(tmp_path)
    flip(file, at % size)
    assert fingerprint(tmp_path) != before
    large(file, size)
    assert fingerprint(tmp_path) == before
    large(file, size + 1)
    assert fingerprint(tmp_path) != before


def test_of_large_weights_little_is_read(tmp_path):
    large(tmp_path / "model-00001-of-00002.safetensors", 5 * 2**30)
    large(tmp_path / "model-00002-of-00002.safetensors", 3 * 2**30)
    read = lambda: int(Path("/proc/self/io").read_text().split()[1])  # noqa: E731
    before = read()
    assert len(fingerprint(tmp_path)) == 2
    assert read() - before < 2.1 * BLOCKS * BLOCK


def test_a_run_has_a_fingerprint_of_each_model_by_its_key(model):
    config = run_config(f"model.path={model}")
    config.reward_model = RewardModelConfig(
        worker="", model=ModelPathConfig(path="embedded"), fsdp=config.fsdp, weight=1.0
    )
    flip(model / WEIGHTS, 2000)
    found = base_models(config)
    assert found == {
        "model.path": fingerprint(model),
        "reward_model.model.path": fingerprint(EMBEDDED_FOLDER),
    }
    assert other_files(found, base_models(run_config())) == {"model.path": (WEIGHTS,)}


def test_random_weights_are_not_of_the_files(model):
    config = run_config(f"model.path={model}", "model.init=random")
    before = base_models(config)
    (model / WEIGHTS).unlink()
    assert base_models(config) == before
    flip(model / "config.json", 400)
    assert other_files(before, base_models(config)) == {"model.path": ("config.json",)}


def test_a_file_that_cannot_be_read_is_told_with_the_models_key(model):
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to(model / "gone")
    says = rf"model\.path = {model}: a file of it cannot be read: .*tokenizer\.json"
    with pytest.raises(ConfigError, match=says):
        base_models(run_config(f"model.path={model}"))
