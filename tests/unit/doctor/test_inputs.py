"""The stage of models, data and caches: real folders, mounts and rewards, right and wrong."""

import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.config.planner.model_shape import model_shape
from hybridrl.controller.ray.node_probes import ProbeResult
from hybridrl.doctor import inputs
from hybridrl.doctor.findings import CHECKS, Verdict
from hybridrl.doctor.inputs import check_data, check_reward, check_run_directory, check_tokenizer
from hybridrl.doctor.models import (
    folder_facts,
    hub_cache_facts,
    judge_cache,
    judge_cached,
    judge_model,
    model_facts,
)
from hybridrl.models.resolve import EMBEDDED_FOLDER, read_model_config
from tests.support.data_configs import jsonl, sums
from tests.support.host_cases import (
    HUB_MODEL,
    assert_finds,
    case,
    hub_cache,
    of,
    probe,
    probe_mounted,
    the,
)
from tests.support.input_rewards import hangs, raises_on_nothing, shrugs
from tests.support.role_configs import model_config
from tests.support.run_configs import run_config
from tests.support.tokenizer_folders import model_folder

pytestmark = pytest.mark.full

FACTS = "hybridrl.doctor.models"
FOLDERS = "hybridrl.doctor.models"
HUB_CACHE = f"hub_cache_facts({{{HUB_MODEL!r}: ('model', True)}})"


@pytest.fixture(scope="module")
def config():
    return run_config()


@pytest.fixture(scope="module")
def shape():
    """The embedded model's own."""
    return model_shape(read_model_config("embedded"))


@pytest.fixture(scope="module")
def prompts(config):
    return check_data("a", config)[1]


@pytest.fixture
def model(tmp_path):
    """A copy of the embedded model."""
    return Path(shutil.copytree(EMBEDDED_FOLDER, tmp_path / "model"))


def cached(**homes: Path) -> dict:
    """What nodes with these HF_HOMEs have of the model."""
    expression = f"model_facts({HUB_MODEL!r}, True)"
    return {node: probe(FACTS, expression, HF_HOME=str(home)) for node, home in homes.items()}


def test_the_recipe_passes_whole_on_this_machine(config, shape):
    findings = inputs.check(dataclasses.replace(case(config=config), shape=shape))
    assert {f.check for f in findings} == {c for c in CHECKS if c.startswith("inputs.")}
    assert {f.verdict for f in findings} == {Verdict.ok, Verdict.skipped}
    assert "reference answers score 1 on average, empty responses 0" in str(findings)


def test_quick_looks_at_caches_alone(config):
    findings = inputs.check(case(config=config, quick=True))
    assert {finding.check for finding in findings} == {"inputs.cache"}


def test_a_cache_that_cannot_be_written_fails_unless_all_is_there(tmp_path):
    mounts = f"mount --bind {tmp_path} {tmp_path}; mount -o remount,bind,ro {tmp_path}"
    found = probe_mounted(FOLDERS, HUB_CACHE, mounts, HF_HOME=str(tmp_path))
    (finding,) = judge_cache({"b": found}, found)
    assert_finds(
        finding, "inputs.cache", Verdict.fail, f"{tmp_path}: Read-only file system", "HF_HOME"
    )
    assert f"{HUB_MODEL} must be downloaded" in finding.evidence
    hub_cache(tmp_path)
    found = probe_mounted(FOLDERS, HUB_CACHE, mounts, HF_HOME=str(tmp_path))
    (finding,) = judge_cache({"b": found}, found)
    assert_finds(finding, "inputs.cache", Verdict.warn, "all files that it needs exist", "HF_HOME")


def test_what_a_cached_config_alone_lacks_are_the_weights(tmp_path):
    """As `hf download NAME config.json` leaves it, which makes refs/ as well."""
    snapshot = hub_cache(tmp_path)
    (snapshot / "model.safetensors").unlink()
    weightless = HUB_CACHE.replace("True", "False")
    assert probe(FOLDERS, HUB_CACHE, HF_HOME=str(tmp_path)).lacking == (HUB_MODEL,)
    assert probe(FOLDERS, weightless, HF_HOME=str(tmp_path)).lacking == ()


def test_hybridrls_own_cache_that_cannot_be_written_warns(tmp_path):
    mounts = f"mount -t tmpfs -o ro tmpfs {tmp_path}"
    found = probe_mounted(FOLDERS, "own_cache_facts()", mounts, HYBRIDRL_CACHE=f"{tmp_path}/own")
    (finding,) = judge_cache({"b": found})
    assert_finds(
        finding,
        "inputs.cache",
        Verdict.warn,
        "Read-only file system; compiled",
        "set HYBRIDRL_CACHE",
    )


def test_a_cache_whose_locks_cannot_be_written_fails(tmp_path):
    locks = tmp_path / "hub/.locks"
    locks.mkdir(parents=True)
    mounts = f"mount --bind {locks} {locks}; mount -o remount,bind,ro {locks}"
    found = probe_mounted(FOLDERS, HUB_CACHE, mounts, HF_HOME=str(tmp_path))
    (finding,) = judge_cache({"b": found}, found)
    assert_finds(finding, "inputs.cache", Verdict.fail, f"{locks}: Read-only", "chown -R")


def test_the_owner_of_a_cache_is_named(tmp_path):
    hub = tmp_path / "hub"
    hub.mkdir()
    found = probe(FOLDERS, HUB_CACHE, before=f"chown 54321 {hub}", HF_HOME=str(tmp_path))
    (finding,) = judge_cache({"b": found}, found)
    assert finding.check == "inputs.cache" and "(owner uid 54321)" in finding.evidence


def test_workers_that_see_another_cache_than_the_driver_are_named(tmp_path):
    found = probe(FOLDERS, HUB_CACHE, HF_HOME=str(tmp_path))
    (finding,) = judge_cache({"b": found}, hub_cache_facts({}))
    assert_finds(finding, "inputs.cache", Verdict.warn, f"{tmp_path}/hub", "export HF_HOME=")
    assert "; the driver uses /" in finding.evidence


def test_equal_caches_pass(tmp_path):
    for node in "ab":
        hub_cache(tmp_path / node)
    facts = cached(a=tmp_path / "a", b=tmp_path / "b")
    assert {f.verdict for f in judge_cached(HUB_MODEL, facts)} == {Verdict.ok}


def test_a_cache_with_other_contents_fails_and_is_named(tmp_path):
    for node in "ab":
        snapshot = hub_cache(tmp_path / node)
    (snapshot / "tokenizer.json").write_text("{}")
    (snapshot / "generation_config.json").unlink()
    _, finding = judge_cached(HUB_MODEL, cached(a=tmp_path / "a", b=tmp_path / "b"))
    assert finding.node == "b"
    assert_finds(
        finding,
        "inputs.cache_contents",
        Verdict.fail,
        "tokenizer.json has 2 bytes here",
        f"hf download {HUB_MODEL}",
    )
    assert "generation_config.json is missing here" in finding.evidence


def test_a_cache_at_another_commit_fails(tmp_path):
    hub_cache(tmp_path / "a")
    hub_cache(tmp_path / "b", "2" * 40)
    _, finding = judge_cached(HUB_MODEL, cached(a=tmp_path / "a", b=tmp_path / "b"))
    assert_finds(
        finding,
        "inputs.cache_contents",
        Verdict.fail,
        "at commit 22222222, on a at 11111111",
        "the same commit",
    )


@pytest.mark.parametrize(
    ("offline", "verdict", "evidence"),
    [("0", Verdict.warn, "would download it first"), ("1", Verdict.fail, "HF_HUB_OFFLINE forbids")],
)
def test_a_model_that_is_not_cached_is_named(tmp_path, offline, verdict, evidence):
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": offline}
    facts = probe(FACTS, f"model_facts({HUB_MODEL!r}, True)", **environment)
    (finding,) = judge_cached(HUB_MODEL, {"a": facts})
    assert_finds(finding, "inputs.cache_contents", verdict, evidence, "hf download")


def test_other_weights_of_the_same_size_are_told(model, tmp_path):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1000] ^= 1
    weights.write_bytes(content)
    facts = {"a": model_facts(str(model), True), "b": model_facts(str(other), True)}
    first, second = judge_model("mine", facts)
    assert first.verdict is Verdict.ok
    assert_finds(
        second, "inputs.model", Verdict.fail, "model.safetensors has other contents", "rsync -a"
    )


def torn(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def pointer(model):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 2742776\n"
    (model / "model.safetensors").write_text(text)


def sharded(model):
    (model / "model.safetensors").unlink()
    index = {"weight_map": {"a.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "evidence"),
    [
        (torn, "model.safetensors is cut off or overwritten: it has 2,987,552 of 2,988,552 bytes"),
        (pointer, "model.safetensors is a Git LFS pointer"),
        (sharded, "model-00001-of-00002.safetensors, which model.safetensors.index.json names"),
        (lambda model: (model / "model.safetensors").unlink(), "there are no weights"),
        (lambda model: (model / "config.json").write_text(""), "config.json is empty"),
        (lambda model: (model / "x").symlink_to("y"), "x is a link to nothing"),
    ],
)
def test_a_model_that_is_not_whole_fails(model, damage, evidence):
    damage(model)
    (finding,) = judge_model("mine", {"a": folder_facts(model, needs_weights=True)})
    assert_finds(finding, "inputs.model", Verdict.fail, evidence, "rsync -a")


def test_random_weights_need_no_files(model):
    (model / "model.safetensors").unlink()
    facts = folder_facts(model, needs_weights=False)
    assert judge_model("mine", {"a": facts})[0].verdict is Verdict.ok


def test_a_model_that_a_node_lacks_or_has_otherwise_is_named(model, tmp_path):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    (other / "config.json").write_text("{ }")
    facts = {
        "a": model_facts(str(model), True),
        "b": model_facts(str(other), True),
        "c": model_facts(str(tmp_path / "nowhere"), True),
    }
    first, second, third = judge_model("mine", facts)
    assert first.verdict is Verdict.ok
    assert_finds(
        second, "inputs.model", Verdict.fail, "config.json has 3 bytes here, 718 there", "rsync -a"
    )
    assert_finds(third, "inputs.model", Verdict.fail, "nowhere does not exist", f"{model}/")


def test_a_tokenizer_of_another_model_fails(tmp_path, shape):
    folder = model_folder(tmp_path, [" ".join(f"word{index}" for index in range(2000))])
    (finding,) = check_tokenizer("a", model_config(folder), shape)
    assert_finds(
        finding, "inputs.tokenizer", Verdict.fail, "is none of the model's", "tokenizer.json"
    )


def test_a_torn_tokenizer_fails(model, shape):
    (model / "tokenizer.json").write_text('{"version": "1.0"')
    (finding,) = check_tokenizer("a", model_config(model), shape)
    assert_finds(
        finding, "inputs.tokenizer", Verdict.fail, "tokenizer cannot be loaded", "tokenizer.json"
    )


def test_a_template_that_refuses_questions_fails(tmp_path, shape):
    folder = model_folder(tmp_path, ["a"], template="{{ raise_exception('no users') }}")
    (finding,) = check_tokenizer("a", model_config(folder), shape)
    assert_finds(
        finding, "inputs.tokenizer", Verdict.fail, "refuses a user's question: no users", "Copy"
    )


def test_no_template_and_unended_responses_warn(tmp_path, shape):
    folder = model_folder(tmp_path, ["a"], template=None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template, end = check_tokenizer("a", model_config(folder), shape)
    assert_finds(
        template, "inputs.tokenizer", Verdict.warn, "no chat template", "chat_template.jinja"
    )
    assert_finds(end, "inputs.tokenizer", Verdict.warn, "no token ends a response", "eos_token")


def test_a_data_file_that_is_missing_fails(tmp_path):
    config = run_config(f"data.train_files={tmp_path}/gone.jsonl")
    (finding,), prompts = check_data("a", config)
    assert_finds(finding, "inputs.data", Verdict.fail, "gone.jsonl: there is no such file", "data.")
    assert prompts == []
    assert check_reward("a", config, prompts)[0].verdict is Verdict.skipped


def test_data_files_are_named_with_their_sizes(tmp_path):
    train = jsonl(tmp_path / "train.jsonl", sums(range(100)))
    (finding,), prompts = check_data("a", run_config(f"data.train_files={train}"))
    assert (finding.verdict, len(prompts)) == (Verdict.ok, 8)
    assert f"90 training and 10 held-out prompts: {train} (0 MiB)" in finding.evidence


def reward_finding(config, prompts, monkeypatch, function):
    monkeypatch.setattr(config.reward, "function", f"{function.__module__}.{function.__name__}")
    monkeypatch.setattr(config.reward, "args", {})
    monkeypatch.setattr(config.reward, "timeout_s", 0.5)
    monkeypatch.setattr(config.eval, "rules", {})
    return check_reward("a", config, prompts)[0]


@pytest.mark.parametrize(
    ("function", "verdict", "evidence", "advice"),
    [
        (raises_on_nothing, Verdict.fail, "IndexError: list index out of range", "by hand"),
        (hangs, Verdict.fail, "timeout", "by hand"),
        (shrugs, Verdict.warn, "answers score 0.5 on average, empty responses 0.5", "answer_key"),
    ],
)
def test_a_reward_that_would_fail_is_named(
    config, prompts, monkeypatch, function, verdict, evidence, advice
):
    finding = reward_finding(config, prompts, monkeypatch, function)
    assert_finds(finding, "inputs.reward", verdict, evidence, advice)
    assert function.__name__ in finding.evidence


def test_a_reward_without_reference_answers_is_tried_on_empty_responses(
    config, prompts, monkeypatch
):
    bare = [replace(prompt, example={"question": prompt.question}) for prompt in prompts]
    finding = reward_finding(config, bare, monkeypatch, shrugs)
    assert_finds(finding, "inputs.reward", Verdict.ok, "8 rows: empty responses score 0.5", "")


def test_a_reward_that_is_not_there_fails(config, prompts, monkeypatch):
    monkeypatch.setattr(config.reward, "function", "nowhere.score")
    finding = check_reward("a", config, prompts)[0]
    assert_finds(finding, "inputs.reward", Verdict.fail, "nowhere", "Correct reward.*")


def test_an_environment_answers_or_is_named(prompts):
    config = run_config("environment=calculator")
    config.eval.rules = {}
    findings = check_reward("a", config, prompts)
    assert "answers 16 turns of 8 rows" in findings[0].evidence
    config.environment.function, config.environment.args = "tests.support.input_rewards.Refuses", {}
    finding = check_reward("a", config, prompts)[0]
    assert_finds(finding, "inputs.reward", Verdict.fail, "error in step", "by hand")


def test_a_run_directory_that_cannot_be_written_fails(tmp_path):
    class ReadOnly:
        """This machine, with that folder mounted read-only."""

        nodes = ("a",)

        resources = None

        def call_each(self, function, arguments, timeout_s):
            mounts = f"mount -t tmpfs -o ro tmpfs {tmp_path}"
            expression = f"{function.__name__}(*{arguments.get('a', ('',))!r})"
            return {"a": ProbeResult(probe_mounted("hybridrl.doctor.inputs", expression, mounts))}

    finding = the(check_run_directory(ReadOnly(), f"{tmp_path}/run"), "inputs.run_directory")
    assert_finds(
        finding,
        "inputs.run_directory",
        Verdict.fail,
        f"{tmp_path}: Read-only file system",
        "hydra.run.dir=",
    )


def two_nodes(mounts: str):
    class TwoNodes:
        """This machine and one that has `mounts` of its own; each runs functions for real."""

        nodes = ("a", "b")

        resources = None

        def call_each(self, function, arguments, timeout_s):
            answers = {}
            for node, values in arguments.items():
                expression = f"{function.__name__}(*{values!r})"
                own = mounts if node == "b" else "true"
                answers[node] = ProbeResult(
                    probe_mounted("hybridrl.doctor.inputs", expression, own)
                )
            return answers

    return TwoNodes()


def test_a_run_directory_that_is_not_shared_warns(tmp_path):
    nodes = two_nodes(f"mount -t tmpfs tmpfs {tmp_path}")
    finding = the(check_run_directory(nodes, f"{tmp_path}/run"), "inputs.run_directory")
    assert finding.node == "b"
    assert_finds(
        finding, "inputs.run_directory", Verdict.warn, "does not see files that a writes", "NFS"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_shared_run_directory_passes(tmp_path):
    finding = the(check_run_directory(two_nodes("true"), str(tmp_path)), "inputs.run_directory")
    assert finding.verdict is Verdict.ok and "shared by all nodes" in finding.evidence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "folder"),
    [
        ("hydra.run.dir=/shared/x", "/shared/x"),
        ("hydra.run.dir=/shared/${run.name}/${now:%Y}", "/shared"),
        ("seed=1", f"{Path.cwd()}/outputs/gsm8k_ppo"),
    ],
)
def test_the_run_directory_is_the_one_of_the_run(config, override, folder):
    given = dataclasses.replace(case(config=config), overrides=[override])
    assert inputs.run_folder(given) == folder


def test_hub_names_are_those_of_models_and_data(config):
    found = case("model=qwen2_5_0_5b", "data=gsm8k", quick=True)
    assert of(inputs.check(found), "inputs.cache")[-1].evidence.startswith("Hugging Face cache")
