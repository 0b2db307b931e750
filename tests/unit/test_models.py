"""The embedded model and its tokenizer; model.path resolved, and the errors when it cannot be."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.config.choices import Init
from hybridrl.config.errors import ConfigError
from hybridrl.data.sources.problems import held_out_problems, train_problems
from hybridrl.models import smollm2
from hybridrl.models.resolve import (
    EMBEDDED_FOLDER,
    model_folder,
    read_model_config,
    resolve_model,
)
from tests.support.role_configs import model_config
from tests.support.tiny_accuracy import accuracy

pytestmark = pytest.mark.full

PROBLEMS = train_problems(2000) + held_out_problems()
# Words, digits and signs, each with the space before it.
PIECE = re.compile(r" ?(?:[A-Za-z]+|[0-9]|[^A-Za-z0-9 ])")
WAYS_OUT = ("model.path=/path", "cache", "model=embedded")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED_FOLDER)


def in_a_process(code: str, **environment: str) -> str:
    """What `code` prints, run with further environment variables."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# The embedded model


def test_embedded_model_is_small_and_float32():
    assert sum(file.stat().st_size for file in EMBEDDED_FOLDER.iterdir()) <= 4 * 2**20
    with safe_open(EMBEDDED_FOLDER / "model.safetensors", framework="pt") as weights:
        tensors = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 no mapping
        assert {tensor.get_dtype() for tensor in tensors} == {"F32"}
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER)
    assert 0.5e6 <= model.num_parameters() <= 1.0e6
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4])
def test_embedded_model_divides_over_tensor_parallel_ranks(tensor_parallel_size):
    config = read_model_config("embedded")
    assert config["num_attention_heads"] % tensor_parallel_size == 0
    assert config["intermediate_size"] % tensor_parallel_size == 0
    # With more ranks than KV heads each KV head is on several ranks.
    num_kv_heads = config["num_key_value_heads"]
    assert num_kv_heads % tensor_parallel_size == 0 or tensor_parallel_size % num_kv_heads == 0


def test_warm_starts_likely_answers_are_wrong_and_right_ones_are_among_its_samples():
    greedy = accuracy(EMBEDDED_FOLDER, temperature=0)
    assert 0.2 <= greedy.strict <= 0.3
    # 640 responses: a standard error of 0.02.
    sampled = accuracy(EMBEDDED_FOLDER, samples_per_problem=2)
    assert 0.3 <= sampled.strict <= 0.44
    assert sampled.strict < sampled.flexible < 0.5
    assert sampled.strict_unseen > 0.2
    assert sampled.solved > 0.5


# Its tokenizer


def test_problems_survive_encoding_and_decoding(tokenizer):
    for problem in PROBLEMS:
        for text in (problem["question"], problem["answer"]):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text", ["#### 42", "#### -5", "#### 3.50", "#### 1,234", "#### $7", "####9"]
)
def test_answers_of_every_form_survive(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_digits_are_tokens_of_their_own(tokenizer):
    assert len(tokenizer.encode("#### 427")) == 4


@pytest.mark.parametrize(
    "text",
    [
        "Write a story about a whale, please.",
        "caf\u00e9 \u4f60\u597d \U0001f600\t x\r\n\x00  9\ufeff",
        "def f(x):\n    return x**2  # <|reserved|>",
    ],
)
def test_any_text_survives(tokenizer, text):
    assert tokenizer.unk_token_id is None
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_of_the_problems_are_whole_tokens(tokenizer):
    for problem in PROBLEMS:
        assert len(tokenizer.encode(problem["question"])) <= len(PIECE.findall(problem["question"]))


def test_chat_template_renders_system_user_and_generation_prompt(tokenizer):
    chat = [{"role": "system", "content": "How"}, {"role": "user", "content": "What"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>How<|user|>What<|assistant|>"
    answered = [*chat, {"role": "assistant", "content": "4"}]
    text = tokenizer.apply_chat_template(answered, tokenize=False)
    assert text == "<|system|>How<|user|>What<|assistant|>4<|end|>"
    ids = tokenizer.apply_chat_template(answered, tokenize=True, return_dict=False)
    # A role is one token, whatever stands beside it.
    assert len(ids) == 7
    assert ids[-1] == tokenizer.eos_token_id


def test_special_tokens_are_those_of_the_model(tokenizer):
    config = read_model_config("embedded")
    assert tokenizer.eos_token_id == config["eos_token_id"]
    assert tokenizer.pad_token_id == config["pad_token_id"] != tokenizer.eos_token_id
    assert len(tokenizer) == config["vocab_size"]


def test_prompts_and_solutions_fit_the_default_limits(tokenizer):
    for problem in PROBLEMS:
        chat = [{"role": "user", "content": problem["question"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert len(ids) <= 48
        assert len(tokenizer.encode(problem["answer"])) + 1 <= 48


# model.path


def test_reading_a_config_does_not_import_torch():
    code = (
        "import sys; from hybridrl.models.resolve import read_model_config;"
        "print(read_model_config('embedded')['model_type'], 'torch' in sys.modules)"
    )
    assert in_a_process(code) == "llama False"


def test_local_folder_is_used_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()
    assert read_model_config(str(tmp_path)) == {"hidden_size": 8}


@pytest.mark.parametrize("read", [resolve_model, read_model_config])
def test_missing_local_folder_names_the_ways_out(tmp_path, read):
    with pytest.raises(ConfigError, match="does not exist") as raised:
        read(str(tmp_path / "nowhere"))
    assert all(way in str(raised.value) for way in WAYS_OUT)


def test_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json") as raised:
        resolve_model(str(tmp_path))
    assert all(way in str(raised.value) for way in WAYS_OUT)


@pytest.mark.parametrize("text", ["{not json", "[1, 2]"])
def test_broken_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is not"):
        read_model_config(str(tmp_path))


@pytest.mark.parametrize("function", ["resolve_model", "read_model_config"])
@pytest.mark.parametrize(
    "hub",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}],
    ids=["offline", "unreachable"],
)
def test_missing_hub_names_the_ways_out(tmp_path, function, hub):
    code = (
        f"from hybridrl.models.resolve import {function}\n"
        "from hybridrl.config.errors import ConfigError\n"
        f"try: {function}('somebody/some-model')\n"
        "except ConfigError as error: print(error)"
    )
    printed = in_a_process(code, HF_HOME=str(tmp_path), **hub)
    assert "model.path = somebody/some-model" in printed
    assert all(way in printed for way in WAYS_OUT)


def cached_model(hf_home: Path, files: dict[str, str]) -> Path:
    """A snapshot of somebody/some-model in the cache of `hf_home`, as the hub's client lays it."""
    folder = hf_home / "hub" / "models--somebody--some-model"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    for name, text in files.items():
        (snapshot / name).write_text(text)
    return snapshot


def test_cached_hub_model_needs_no_hub(tmp_path):
    snapshot = cached_model(tmp_path, {"config.json": "{}", "model.safetensors": ""})
    code = (
        "from hybridrl.models.resolve import resolve_model;"
        "print(resolve_model('somebody/some-model'))"
    )
    hub = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert Path(in_a_process(code, HF_HOME=str(tmp_path), **hub)) == snapshot


def test_cached_config_without_weights_is_no_model(tmp_path):
    index = json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    cached_model(
        tmp_path,
        {"config.json": "{}", "model.safetensors.index.json": index, "1.safetensors": ""},
    )
    code = (
        "from hybridrl.models.resolve import read_model_config, resolve_model\n"
        "from hybridrl.config.errors import ConfigError\n"
        "print(read_model_config('somebody/some-model'))\n"
        "try: resolve_model('somebody/some-model')\n"
        "except ConfigError as error: print('refused')"
    )
    assert in_a_process(code, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1") == "{}\nrefused"


@pytest.mark.parametrize(("file", "found"), [("tokenizer.json", True), ("x.json", False)])
def test_random_weights_need_config_and_tokenizer_alone(tmp_path, file, found):
    snapshot = cached_model(tmp_path, {"config.json": "{}", file: "{}"})
    code = (
        "from hybridrl.config.errors import ConfigError\n"
        "from hybridrl.config.choices import Init\n"
        "from hybridrl.config.schema import ModelConfig\n"
        "from hybridrl.models.resolve import model_folder\n"
        "model = ModelConfig(\n"
        "    path='somebody/some-model', init=Init.random, seed=1, trust_remote_code=False\n"
        ")\n"
        "try: print(model_folder(model))\n"
        "except ConfigError as error: print('refused')"
    )
    printed = in_a_process(code, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert printed == (str(snapshot) if found else "refused")


def test_a_folder_without_weights_is_refused_unless_they_are_random(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    model = model_config(tmp_path)
    with pytest.raises(ConfigError, match=r"has no weights[^$]*model\.init=random"):
        model_folder(model)
    assert model_folder(replace(model, init=Init.random)) == tmp_path.resolve()
    (tmp_path / "model.safetensors").write_text("")
    assert model_folder(model) == tmp_path.resolve()


def test_smollm2_without_its_package_says_what_to_type(monkeypatch):
    monkeypatch.setattr(smollm2, "_PACKAGE", "no-such-package")
    with pytest.raises(ConfigError, match="pip install") as raised:
        resolve_model("smollm2_135m")
    assert "model=embedded" in str(raised.value)
