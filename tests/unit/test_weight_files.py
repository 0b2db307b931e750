"""Model folders that cannot be right, found by config.json and the headers of weights."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.models.resolve import EMBEDDED_FOLDER, read_model_config
from hybridrl.models.weight_files import INDEX, SINGLE, weight_problems

WHOLE = (EMBEDDED_FOLDER / SINGLE).read_bytes()
HEADER_BYTES = int.from_bytes(WHOLE[:8], "little")

Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(EMBEDDED_FOLDER, tmp_path / "model"))


def problems_of(folder: Path) -> list[str]:
    return list(weight_problems(folder, model_shape(read_model_config(str(folder)))))


def with_config(folder: Path, changes: dict[str, object]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def holding(content: bytes) -> Change:
    return lambda folder: (folder / SINGLE).write_bytes(content)


def indexed(index: object) -> Change:
    """Weights under another name, and an index."""

    def change(folder: Path) -> None:
        (folder / SINGLE).rename(folder / "1.safetensors")
        (folder / INDEX).write_text(json.dumps(index))

    return change


def pipe(folder: Path) -> None:
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)


@pytest.mark.parametrize(
    "change",
    [lambda folder: None, indexed({"weight_map": {"a": "1.safetensors"}})],
    ids=["one file", "an index"],
)
def test_whole_weights_are_no_problem(folder, change):
    change(folder)
    assert problems_of(folder) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / SINGLE).unlink(), "has no weights"),
        (
            lambda folder: (folder / SINGLE).rename(folder / "adapter_model.safetensors"),
            "no weights",
        ),
        (holding(b""), f"{SINGLE}: no safetensors file"),
        (holding(b"version https://git-lfs.github.com/spec/v1"), f"{SINGLE}: no safetensors file"),
        (holding(WHOLE[:-1]), f"cut off or overwritten: it has {len(WHOLE) - 1:,} of"),
        (holding(WHOLE + b"x"), "cut off or overwritten"),
        (holding(WHOLE[:20]), "cut off: it has 20 bytes"),
        (holding(WHOLE[:8] + b"x" * HEADER_BYTES + WHOLE[8 + HEADER_BYTES :]), "not JSON"),
        (holding((2).to_bytes(8, "little") + b"[]"), "no JSON object"),
        (holding((8).to_bytes(8, "little") + b'{"a": 3}'), "describes no tensors"),
        (pipe, "no plain file"),
        (
            indexed({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}),
            "2.safetensors: there",
        ),
        (indexed({"weight_map": [3]}), f"{INDEX}: no index of weights"),
        (indexed([]), f"{INDEX}: no index of weights"),
    ],
)
def test_damaged_and_missing_weights_are_named(folder, change, words):
    change(folder)
    (found,) = problems_of(folder)
    assert str(folder) in found and words in found, found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 650}, "model.embed_tokens.weight is [640, 128], expected [650, 128]"),
        ({"num_hidden_layers": 4}, "model.layers.3.self_attn.q_proj.weight is missing"),
        ({"num_hidden_layers": 2}, "model.layers.2.input_layernorm.weight is of no layer"),
    ],
)
def test_weights_of_another_model_are_told_by_their_shapes(folder, changes, words):
    with_config(folder, changes)
    (found,) = problems_of(folder)
    assert words in found, found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": -128}, "hidden_size = -128"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"hidden_size": "128"}, "hidden_size = '128'"),
        ({"hidden_size": True}, "hidden_size = true"),
        ({"vocab_size": 10**30}, "vocab_size = 1000"),
        ({"head_dim": "absent", "num_attention_heads": 3}, "num_attention_heads = 3"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"max_position_embeddings": -1}, "max_position_embeddings = -1"),
        ({"rms_norm_eps": "NaN"}, "rms_norm_eps = 'NaN', expected a number of at least 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1"),
        ({"vocab_size": "absent", "hidden_size": None}, "lacks hidden_size, vocab_size"),
    ],
)
def test_sizes_that_no_model_can_have_are_named(folder, changes, words):
    with_config(folder, changes)
    with pytest.raises(ConfigError) as raised:
        model_shape(read_model_config(str(folder)))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "more than 4,300 digits"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": "\xe9"}', "not UTF-8 text"),
    ],
)
def test_a_config_that_json_cannot_read_is_named(folder, content, words):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_model_config(str(folder))
    assert "config.json is not" in str(raised.value) and words in str(raised.value)
