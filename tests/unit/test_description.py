"""What is derived of a config.json's model: facts of each family, refusals, and the cache."""

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner import description
from hybridrl.config.planner.description import described
from hybridrl.config.planner.families import ON_CPUS, ON_GPUS
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.distributed.description import describe
from hybridrl.distributed.forward.token_models import divisor_and_cap
from tests.support.composing import TINY, examined
from tests.support.tiny_hf import ALL, GRANITE
from tests.support.tiny_vision import VISION
from tools.models_table import CHECKS, cases, table
from tools.shapes import shapes

REPO = Path(__file__).resolve().parents[2]


def config_of(name):
    return json.loads(ALL[name].to_json_string())


# Heads of keys and their size, tied, window and layers with it.
FACTS = {
    "llama": (2, 8, False, None, 0),
    "qwen2": (2, 8, True, None, 0),
    "qwen3": (2, 16, False, None, 0),
    "mistral": (2, 8, False, 4, 2),
    "mistral_tied": (2, 16, True, None, 0),
    "phi3": (2, 8, False, 4, 2),
    "phi3_tied": (2, 8, True, None, 0),
    "olmo3": (2, 8, False, 4, 1),
    "gemma3": (2, 16, True, 4, 1),
    "mixtral": (2, 8, False, None, 0),
    "gpt_oss": (2, 16, False, 4, 1),
    "gemma4": (2, 24, True, 4, 2),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_a_family_are_derived(name):
    shape = model_shape(config_of(name))
    heads, kv_heads, head_dim, window = shape.largest_attention
    assert (kv_heads, head_dim, shape.tied, window, shape.windowed) == FACTS[name] and heads == 4


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4", "qwen3_moe", "granite"])
def test_divisor_and_cap_of_logits_are_config_jsons_to_the_last_digit(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(ALL[name])
    divisors = {"granite": (GRANITE["logits_scaling"], None), "gemma4": (1.0, 2.0)}
    assert divisor_and_cap(model) == divisors.get(name, (1.0, None))


@pytest.mark.parametrize(("kind", "layers", "windowed"), [("olmo3", 8, 6), ("gemma3_text", 12, 10)])
def test_absent_windows_are_transformers_defaults(kind, layers, windowed):
    """Every fourth layer of OLMo 3 and every sixth of Gemma 3 sees all tokens."""
    model = TINY | {"model_type": kind, "num_hidden_layers": layers, "pad_token_id": 0}
    shape = model_shape(model)
    assert (shape.largest_attention.window, shape.windowed) == (4096, windowed)


REFUSED = {
    "llama4_text": "no decoder layers",
    "falcon_mamba": "A_log of FalconMambaMixer",
    "deepseek_v2": "choose and weigh",
    "phi4_multimodal": "embed_tokens_extend",
    "emu3": "of type emu3_text_model",
    "gemma2": "softcap",
    "bloom": "no decoder layers",
    "gpt2": "no decoder layers",
    "cohere2": "one token longer",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_known_is_refused_by_name(kind):
    more = {"num_hidden_layers": 4, "first_k_dense_replace": 0, "pad_token_id": 0}
    config = TINY | more | {"model_type": kind}
    with pytest.raises(ConfigError, match=f"type {kind}(.|\n)*{REFUSED[kind]}") as raised:
        model_shape(config)
    assert raised.value.problems[0].id == "family"


def test_a_chunked_mask_is_refused():
    with pytest.raises(ConfigError, match="attention_chunk_size"):
        model_shape(TINY | {"attention_chunk_size": 64})


def test_shapes_that_come_with_the_package_are_those_derived():
    """After a change `python tools/shapes.py` writes them."""
    assert json.loads(description.SHIPPED.read_bytes()) == shapes()


def test_the_table_of_families_is_that_of_the_tests():
    """docs/models.md: types, LoRA's default layers, and on what each ran."""
    page = (REPO / "docs" / "models.md").read_text()
    rows = re.findall(
        r"^\|(?! family)[^|]+\| `(\w+)` \|[^|]*\|[^|]*\| ([^|]+) \| ([^|]+) \|$", page, re.M
    )
    above, listed = "", {}
    for kind, layers, machines in rows:
        above = above if layers == "the same" else layers
        listed[kind] = above, machines
    ran = dict.fromkeys(ON_GPUS, "CPU, GPUs") | dict.fromkeys(ON_CPUS, "CPU")
    expected = {}
    for config in (*ALL.values(), *VISION.values()):
        linear = model_shape(json.loads(config.to_json_string())).linear_layers
        names = ", ".join(name.removesuffix("_proj") for name in linear)
        expected[config.model_type] = names, ran.get(config.model_type)
    assert listed == expected


def test_the_table_of_checks_counts_what_passed_and_names_what_failed(tmp_path):
    """Rows as pytest's --junitxml has them; a skipped case and other tests do not count."""
    names = [
        ("test_gradients", "test_gradient_of_every_family[gemma3-1]", ""),
        ("test_gradients", "test_gradient_of_every_family[gemma3_untied-4]", ""),
        ("test_gradients", "test_gradient_of_every_family[llama-1]", "<failure/>"),
        ("test_gradients", "test_gradient_of_every_family[llama-2]", ""),
        ("test_gradients", "test_another[qwen2]", ""),
        ("test_first_ratio_is_one", "test_every_family[qwen2]", "<skipped/>"),
        ("test_first_ratio_is_one", "test_every_family[qwen3]", ""),
    ]
    rows = [
        f'<testcase classname="tests.ranks.{file}" name="{name}">{result}</testcase>'
        for file, name, result in names
    ]
    file = tmp_path / "results.xml"
    file.write_text(f"<testsuites><testsuite>{''.join(rows)}</testsuite></testsuites>")
    cells = {
        row.split("|")[1].strip(" `"): row.split("|")[2:]
        for row in table(cases([file])).splitlines()
    }
    column = list(CHECKS).index
    assert cells["gemma3_text"][column("gradient")].strip() == "2"
    assert cells["llama"][column("gradient")].strip() == "1 of 2 failed"
    assert cells["qwen3"][column("first ratio")].strip() == "1"
    del cells["model_type"]
    filled = [cell for row in cells.values() for cell in row if re.search(r"\d", cell)]
    assert len(filled) == 3


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Folder of the cache, empty; nothing is remembered."""
    monkeypatch.setenv("HYBRIDRL_CACHE", str(tmp_path))
    description._described.cache_clear()
    yield tmp_path / "shapes"
    description._described.cache_clear()


@pytest.mark.full
def test_a_process_derives_the_same_and_the_next_reads_it(cached, monkeypatch):
    config = config_of("qwen3_moe")
    monkeypatch.setattr(description, "_can_derive", lambda: False)
    assert not description.is_described(config)
    shape = described(config)
    assert shape == replace(describe(config), max_positions=None)
    description._described.cache_clear()
    monkeypatch.setattr(subprocess, "run", None)
    assert description.is_described(config)
    assert described(config) == shape


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"kind": "llama"}'])
def test_a_broken_file_is_derived_again(cached, text):
    shape = described(config_of("llama"))
    (file,) = cached.iterdir()
    file.write_text(text)
    description._described.cache_clear()
    assert described(config_of("llama")) == shape
    assert json.loads(file.read_bytes()) == json.loads(json.dumps(asdict(shape)))


def test_a_folder_that_cannot_be_written_is_no_error(cached):
    cached.write_text("no folder")
    assert described(config_of("llama")).kind == "llama"


def test_other_problems_do_not_wait_for_a_derivation(cached, monkeypatch):
    monkeypatch.setattr(description, "_can_derive", lambda: False)
    monkeypatch.setattr(subprocess, "run", None)
    (problem,) = examined(["hardware=cpu", "trainer.profile_steps=[a]"], model=TINY).report.problems
    assert problem.key == "trainer.profile_steps"


def test_a_refusal_of_a_process_is_the_same(cached):
    with pytest.raises(ConfigError) as here:
        describe(TINY | {"model_type": "gemma2"})
    with pytest.raises(ConfigError) as there:
        description._in_a_process(json.dumps(TINY | {"model_type": "gemma2"}))
    assert there.value.problems == here.value.problems


def test_importing_it_imports_neither_torch_nor_transformers():
    code = (
        "import sys, hybridrl.config.planner.model_shape; "
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
