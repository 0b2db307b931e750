"""Checkpoints in every form that transformers loads give the same parts to the bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybridrl.config.errors import ConfigError
from hybridrl.distributed.weights import empty_model, stored_weights
from tests.support.tiny_hf import tiny_folder

FORMS = {
    "float32": "llama",
    "bfloat16": "llama",
    "float16": "qwen3",
    "several files": "qwen3",
    "pickled": "llama",
    "pickled in several files": "llama",
    "pickled before torch 1.6": "llama",
    "backbone": "qwen2",
    "tied, under the head's name": "qwen2",
    "beside images": "qwen3_5",
}


def in_form(form: str, folder: Path) -> Path:
    """The folder of a tiny model whose weights are stored in this form."""
    tiny_folder(FORMS[form], folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    file.unlink()
    if form in ("bfloat16", "float16"):
        weights = {name: weight.to(getattr(torch, form)) for name, weight in weights.items()}
    if form == "backbone":
        weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    if form == "beside images":
        names = {name: name.replace("model.", "model.language_model.", 1) for name in weights}
        weights = {names[name]: weight for name, weight in weights.items()}
    if form.startswith("tied"):
        weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    ending = "bin" if form.startswith("pickled") else "safetensors"
    stem = "pytorch_model" if ending == "bin" else "model"
    files = {f"{stem}.{ending}": list(weights)}
    if form.endswith("several files"):
        names = sorted(weights)
        files = {f"{stem}-1.{ending}": names[::2], f"{stem}-2.{ending}": names[1::2]}
        places = {name: file for file, names in files.items() for name in names}
        index = json.dumps({"metadata": {}, "weight_map": places})
        (folder / f"{stem}.{ending}.index.json").write_text(index)
    for name, held in files.items():
        tensors = {key: weights[key] for key in held}
        if ending == "bin":
            zipped = "1.6" not in form
            torch.save(tensors, folder / name, _use_new_zipfile_serialization=zipped)
        else:
            save_file(tensors, folder / name, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_parts_are_those_of_what_transformers_loads(form, tmp_path):
    folder = in_form(form, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = dict(model.named_parameters())
    shapes = {name: param.shape for name, param in expected.items()}
    weights = stored_weights(folder, model, shapes, tied=model.config.tie_word_embeddings)
    for name, param in expected.items():
        whole = (slice(None),) * (param.ndim - 1)
        rows = [weights[name][(slice(*part), *whole)] for part in _cuts(param, 0)]
        assert torch.equal(torch.cat(rows).float(), param), name
        if param.ndim == 2:
            cuts = [(slice(None), slice(*part)) for part in _cuts(param, 1)]
            columns = [weights[name][cut] for cut in cuts]
            assert torch.equal(torch.cat(columns, 1).float(), param), name


def _cuts(param: torch.Tensor, dim: int) -> list[tuple[int, int]]:
    """In three, of which the middle one is empty."""
    size = param.shape[dim]
    return [(0, size // 3), (size // 3, size // 3), (size // 3, size)]


def test_weights_that_a_folder_lacks_or_has_in_another_shape_are_named(tmp_path):
    folder = tiny_folder("llama", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(5)
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    empty = empty_model(AutoModelForCausalLM, folder)
    shapes = {name: param.shape for name, param in empty.named_parameters()}
    with pytest.raises(ConfigError, match=r"lacks 2 of its weights: lm_head\.weight, model\.norm"):
        stored_weights(folder, empty, shapes, tied=False)
