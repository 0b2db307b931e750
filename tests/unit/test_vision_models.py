"""Models that take images: what is derived of them, and the names of their checkpoints."""

import json

import pytest
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.families import placeholder_ids
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.distributed.forward.attention import TOWER_ATTENTION
from hybridrl.distributed.forward.vision import decoder, vision_parts
from hybridrl.distributed.weights import checkpoint_sources, empty_model, stored_weights
from tests.support.tiny_vision import IDS, PAD, TEXT, VISION, tiny_vision_folder, tiny_vision_model


def config_of(name):
    return json.loads(VISION[name].to_json_string())


@pytest.fixture(scope="module", params=VISION)
def made(request, tmp_path_factory):
    return request.param, tiny_vision_folder(request.param, tmp_path_factory.mktemp("vision"))


@pytest.mark.parametrize("name", VISION)
def test_a_shape_has_the_sizes_of_the_language_model(name):
    shape = model_shape(config_of(name))
    assert shape.kind == name
    assert (shape.hidden, shape.vocab, shape.max_positions) == (128, 512, 512)
    assert shape.layers == (4 if name == "qwen3_5" else 2)
    model = tiny_vision_model(name)
    assert shape.parameters == sum(param.numel() for param in model.parameters())


def test_a_flat_config_json_of_qwen2_5_vl_is_read():
    nested = config_of("qwen2_5_vl")
    flat = {key: value for key, value in nested.items() if key != "text_config"}
    flat |= {k: v for k, v in nested["text_config"].items() if k != "model_type"}
    assert model_shape(flat) == model_shape(nested)


def test_wrong_sizes_of_the_language_model_are_named():
    config = config_of("qwen3_vl")
    config["text_config"] |= {"hidden_size": -1}
    with pytest.raises(ConfigError, match="hidden_size = -1"):
        model_shape(config)


def test_placeholders_are_the_tokens_of_images_and_videos():
    assert placeholder_ids(config_of("qwen3_vl")) == sorted(IDS.values())
    assert placeholder_ids(config_of("mistral3")) == [PAD]
    assert placeholder_ids({"model_type": "qwen3", "image_token_id": 7}) == []


def test_a_checkpoint_has_the_names_of_transformers_files(made):
    _, folder = made
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {part.name: tuple(part.shape) for part in checkpoint_sources(folder)} == stored


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel])
def test_a_folder_has_every_weight(made, auto):
    """Of a backbone, too, which has names of its own."""
    name, folder = made
    model = empty_model(auto, folder)
    prefix = "" if auto is AutoModelForCausalLM else "model."
    shapes = {f"{prefix}{name}": param.shape for name, param in model.named_parameters()}
    stored, expected = stored_weights(folder, model, shapes, tied=False), tiny_vision_model(name)
    whole = dict(expected.named_parameters())
    for name in shapes:
        assert stored[name][:].equal(whole[name].detach()), name


def test_parts_of_images_are_apart_from_the_text(made):
    name, folder = made
    model = empty_model(AutoModelForCausalLM, folder)
    text, others = decoder(model), vision_parts(model)
    assert len(text.layers) == (4 if name == "qwen3_5" else 2) and len(others) >= 1
    total = sum(p.numel() for part in [text, *others] for p in part.parameters())
    assert total == sum(p.numel() for p in model.base_model.parameters())
    config = model.config
    assert config.get_text_config()._attn_implementation == "hybridrl_packed"
    assert config.vision_config._attn_implementation == TOWER_ATTENTION
    assert all(
        module.config._attn_implementation == TOWER_ATTENTION
        for part in others
        for module in part.modules()
        if type(module).__name__.endswith("Attention")
    )
    assert config.get_text_config().vocab_size == TEXT["vocab_size"]
