"""What is downloaded is read, never run: models, tokenizers, chat templates, and our own source."""

import ast
import pickle
from pathlib import Path

import jinja2
import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.data.sources.tokenizer import Renderer, decoder, load_tokenizer, token_ids
from hybridrl.distributed.storage.export import write_model
from hybridrl.distributed.weights import empty_model, stored_weights
from hybridrl.models.resolve import read_model_config
from tests.support.code_in_checkpoints import bring_code, bring_tokenizer
from tests.support.role_configs import model_config
from tests.support.tiny_hf import tiny_folder, tiny_model
from tests.support.tokenizer_folders import model_folder
from tests.support.whole_weights import InMemory

pytestmark = pytest.mark.full

SOURCE = Path(__file__).resolve().parents[2] / "hybridrl"
# Modules whose data makes Python call what it names, and where else they may be: processes of
# ours that speak with each other, and torch's own flight recorder.
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
MAY_PICKLE = {
    "controller/watch/flight_recorder.py",
    "doctor/joined.py",
    "environments/base.py",
    "processes/process.py",
}
# Code of the policy, in a jail; a program of an installed package, verifiers'.
MAY_EXECUTE = {"rewards/sandbox/jail.py", "environments/others/verifiers_chat.py"}
# `trusts`: model.trust_remote_code is set.
MAY_TRUST = {("data/sources/tokenizer.py", "AutoTokenizer.from_pretrained", "trusts")}


def test_a_models_code_is_not_run_and_a_supported_architecture_is_loaded_without_it(tmp_path):
    folder = tiny_folder("llama", tmp_path / "llama")
    marker = bring_code(folder)
    assert type(empty_model(AutoModelForCausalLM, folder)).__name__ == "LlamaForCausalLM"
    assert not marker.exists()


def test_an_architecture_that_is_code_is_refused_and_the_message_says_that_it_never_runs(tmp_path):
    folder = tiny_folder("llama", tmp_path / "new")
    marker = bring_code(folder, model_type="brand_new")
    with pytest.raises(ConfigError, match=r"brand_new(.|\n)*never run"):
        model_shape(read_model_config(str(folder)))
    assert not marker.exists()


def test_a_tokenizer_that_is_code_is_refused_and_the_message_names_the_key(tmp_path):
    folder = model_folder(tmp_path / "new", ["a b"])
    marker = bring_code(folder, tokenizer_class="Tokenizer")
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code=true"):
        load_tokenizer(model_config(folder))
    assert not marker.exists()


def test_a_trusted_tokenizers_code_is_run_also_from_an_export_and_no_code_of_the_model(
    tmp_path, monkeypatch
):
    cache = tmp_path / "modules"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
    monkeypatch.syspath_prepend(cache)
    folder = tiny_folder("llama", tmp_path / "llama")
    marker = bring_tokenizer(folder)
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code=true"):
        load_tokenizer(model_config(folder))
    write_model(InMemory(tiny_model("llama").state_dict()), folder, tmp_path / "export")
    for source in (folder, tmp_path / "export"):
        tokenizer = load_tokenizer(model_config(source, trusted=True))
        assert type(tokenizer).__name__ == "Words"
        assert token_ids(tokenizer, ["of the words"], special=False) == [[2, 0, 3]]
        assert decoder(tokenizer)([[0, 3]]) == ["the words"]
    assert not marker.exists() and not list(cache.rglob("brought.py"))


def test_a_tokenizer_that_does_not_need_the_code_is_loaded_without_it(tmp_path):
    folder = model_folder(tmp_path / "usual", ["a b"])
    marker = bring_code(folder)
    assert load_tokenizer(model_config(folder)).encode("a b")
    assert not marker.exists()


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_weights_are_read_as_tensors_alone(tmp_path):
    """A .bin checkpoint with ordinary tensors loads; one that would call something does not."""
    marker = tmp_path / "code_has_run"
    folder = tiny_folder("llama", tmp_path / "llama")
    (folder / "model.safetensors").unlink()
    lm = tiny_model("llama")
    weights = lm.state_dict()
    torch.save(weights, folder / "pytorch_model.bin")
    shapes = {name: weight.shape for name, weight in weights.items()}
    stored_weights(folder, lm, shapes, tied=False)
    torch.save(weights | {"lm_head.weight": Payload(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError):
        stored_weights(folder, lm, shapes, tied=False)
    assert not marker.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['os'].system('true') }}",
    ],
)
def test_a_chat_template_reaches_nothing_of_python(tmp_path, template):
    folder = model_folder(tmp_path / "m", ["a b"], template=template)
    renderer = Renderer(load_tokenizer(model_config(folder)))
    with pytest.raises((jinja2.exceptions.SecurityError, jinja2.exceptions.UndefinedError)):
        renderer.render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "answer",
    [
        r"\boxed{__import__('pathlib').Path('MARKER').touch()}",
        "The final answer is __import__('pathlib').Path('MARKER').touch()",
        "The final answer is 3*(4).__class__.__base__.__subclasses__()",
        r"$\text{open('MARKER', 'w')}$",
    ],
)
def test_an_answer_in_mathematics_is_read_and_not_run(tmp_path, answer):
    """math-verify gives Python's parser digits and operators alone."""
    score = pytest.importorskip("hybridrl.rewards.math_answer").score
    pytest.importorskip("math_verify")
    marker = tmp_path / "code_has_run"
    response = answer.replace("MARKER", str(marker))
    assert score("", response, {"answer": "7"}, mode="flexible") == 0.0
    assert not marker.exists()


def modules() -> list[tuple[str, ast.Module]]:
    paths = sorted(SOURCE.rglob("*.py"))
    assert len(paths) > 200
    return [(path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text())) for path in paths]


def unsafe(name: str, tree: ast.Module) -> list[str]:
    """What a module does that could run what it reads."""
    found = []
    for node in ast.walk(tree):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom) and name not in MAY_PICKLE:
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{where} {n}" for n in names if n.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.Call):
            found += [f"{where} {what}" for what in _unsafe_call(name, node)]
    return found


def _unsafe_call(name: str, call: ast.Call) -> list[str]:
    keywords = {k.arg: k.value for k in call.keywords}
    values = {k: v.value for k, v in keywords.items() if isinstance(v, ast.Constant)}
    text = ast.unparse(call.func)
    wrong = []
    if text in ("eval", "exec") and name not in MAY_EXECUTE:
        wrong.append(text)
    if text == "torch.load" and values.get("weights_only") is not True:
        wrong.append("torch.load without weights_only=True")
    if text in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
        wrong.append(text)
    if values.get("allow_pickle"):
        wrong.append("allow_pickle")
    trusts = "trust_remote_code" in keywords and ast.unparse(keywords["trust_remote_code"])
    if trusts not in (False, "False") and (name, text, trusts) not in MAY_TRUST:
        wrong.append("trust_remote_code")
    loads_auto = text.startswith(("Auto", "auto.", "PreTrainedTokenizer")) and text.endswith(
        ("from_pretrained", "from_config")
    )
    if loads_auto and "trust_remote_code" not in keywords:
        wrong.append(f"{text} without trust_remote_code=False")
    return wrong


def test_no_source_of_ours_could_run_what_it_reads():
    assert [found for name, tree in modules() for found in unsafe(name, tree)] == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "AutoModel.from_pretrained(folder)",
        "AutoConfig.from_pretrained(folder, trust_remote_code=flag)",
        "LLM(model=m, trust_remote_code=True)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "eval(text)",
    ],
)
def test_the_scan_sees_what_it_looks_for(code):
    assert len(unsafe("data/sources/files.py", ast.parse(code))) == 1
