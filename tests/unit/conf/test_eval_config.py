"""The config of an evaluation: the run's own, the machine's devices, then what was typed."""

from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.checkpoint.manifest import Manifest
from hybridrl.checkpoint.verification import VerifiedCheckpoint
from hybridrl.commands.evaluation.session import Evaluation
from hybridrl.commands.evaluation.subject import Subject, evaluation_config
from hybridrl.config.choices import DType, Init
from hybridrl.config.command.command_line import parse_argv
from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.machine import Machine
from hybridrl.config.schema import RunConfig
from hybridrl.trainer.tracking.provenance import plain
from tests.support.composing import GPU_NODE, LAPTOP, examined

HUB = Subject("embedded", model="embedded")


def checkpoint_of(*overrides: str) -> Subject:
    """The checkpoint of a run with these overrides."""
    result = examined(["hardware=cpu", *overrides])
    assert result.report.problems == []
    manifest = Manifest(20, "", plain(result.config), {}, 1, {}, {}, {})
    return Subject("run_step_20", checkpoint=VerifiedCheckpoint(Path("step_00000020"), manifest))


def config_of(
    subject: Subject, *overrides: str, machine: Machine = LAPTOP, runs_code: bool = False
) -> RunConfig:
    line = parse_argv(overrides)
    return evaluation_config(line, subject, machine, runs_code=runs_code).config


def problems_of(subject: Subject, *overrides: str, runs_code: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as error:
        config_of(subject, *overrides, runs_code=runs_code)
    return error.value.texts


RUN = checkpoint_of(
    "run.name=mine",
    "seed=7",
    "model.init=random",
    "data=embedded_mixture",
    "data.num_eval_problems=20",
    "reward=math",
    "rollout.temperature=0.5",
    "rollout.max_response_tokens=40",
    "rollout.max_num_seqs=17",
    "lora=default",
)


def test_a_checkpoint_is_evaluated_with_its_runs_own_settings():
    config = config_of(RUN)
    run = RUN.checkpoint.manifest.config
    for section in ("seed", "model", "lora", "data", "reward", "environment", "rollout", "eval"):
        assert plain(vars(config)[section], section) == run[section], section
    assert (config.run.name, config.model.init) == ("mine", Init.random)


def test_what_is_typed_comes_on_top():
    config = config_of(RUN, "rollout.temperature=0.9", "seed=8", "data.num_eval_problems=5")
    assert (config.rollout.temperature, config.rollout.max_response_tokens) == (0.9, 40)
    assert (config.seed, config.rollout.seed) == (8, 8)
    assert config.data.num_eval_problems == 5
    assert set(config.data.mixture) == set(RUN.checkpoint.manifest.config["data"]["mixture"])


def test_a_group_takes_the_place_of_the_runs_whole_section():
    config = config_of(RUN, "data=embedded", "reward=gsm8k")
    assert config.data.mixture == {} and config.data.num_eval_problems is None
    assert config.reward.args == {"mode": "strict"}
    assert config.rollout.temperature == 0.5


def test_keys_that_only_the_run_has_can_be_set():
    run = checkpoint_of("environment=calculator")
    config = config_of(run, "environment.max_turns=3")
    assert config.environment is not None and config.environment.max_turns == 3
    (problem,) = problems_of(run, "environment.max_turn=3")
    assert "Did you mean environment.max_turns?" in problem


def test_another_kind_of_device_keeps_its_own_precision_and_memory():
    config = config_of(RUN, machine=GPU_NODE)
    assert (config.rollout.dtype, config.rollout.kv_cache_mb) == (DType.bfloat16, None)
    assert (config.cluster.gpus_per_node, config.fsdp.dp_shard) == (8, 8)
    assert (config.rollout.temperature, config.rollout.max_response_tokens) == (0.5, 40)


def test_what_only_training_needs_is_not_asked_for():
    """Three engines share neither 64 prompts nor mini-batches evenly, and need not."""
    assert config_of(RUN, "cluster.gpus_per_node=3").fsdp.dp_shard == 3


def test_a_model_is_evaluated_with_the_defaults():
    config = config_of(HUB, "+recipe=gsm8k_ppo", "reward=math")
    assert (config.model.path, config.model.init) == ("embedded", Init.pretrained)
    assert config.lora is None and config.data.name == "embedded"


@pytest.mark.parametrize(
    ("subject", "override", "says"),
    [
        (RUN, "actor.optim.lr=1", "has no effect on an evaluation"),
        (RUN, "algorithm=grpo", "has no effect on an evaluation"),
        (RUN, "lora.rank=4", "has no effect on an evaluation"),
        (RUN, "eval.every_steps=1", "has no effect on an evaluation"),
        (RUN, "rollout.responses_per_prompt=4", "Type --samples N"),
        (RUN, "hydra.run.dir=x", "Type --output DIR"),
        (RUN, "+recipe=gsm8k_ppo", "its run's own config"),
        (HUB, "model.path=x", "the model is embedded"),
        (HUB, "data=nothing", "data has no nothing"),
        (RUN, "rollout.temprature=1", "Did you mean rollout.temperature?"),
        (RUN, "data.train_files=none.jsonl", "none.jsonl"),
        (RUN, "rollout.tensor_parallel_size=3", "expected a divisor of"),
    ],
)
def test_a_mistake_says_what_to_do(subject, override, says):
    assert any(says in problem for problem in problems_of(subject, override))


def test_secrets_that_the_checkpoint_hides_are_asked_for():
    key, url = "+reward.args.api_key", "reward.args.url"
    function = "reward.function=tests.unit.conf.test_eval_config.reward_with_key"
    run = checkpoint_of("reward=none", function, f"{key}=k", "+reward.args.url=http://me:x@host")
    problems = problems_of(run, runs_code=True)
    assert any("reward.args.api_key = ***" in p and "=<the secret>" in p for p in problems)
    assert any(f"{url} = http://***@host" in problem for problem in problems)
    config = config_of(run, "reward.args.api_key=k", f"{url}=http://me:x@host", runs_code=True)
    assert config.reward.args == {"api_key": "k", "url": "http://me:x@host"}


def reward_with_key(prompt, response, example, *, api_key, url):
    return 1.0


def test_code_that_a_checkpoint_names_is_run_only_when_asked_to(tmp_path, monkeypatch):
    (tmp_path / "reward_of_a_stranger.py").write_text(
        "def score(prompt, response, example):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    subject = checkpoint_of("reward.function=reward_of_a_stranger.score", "~reward.args.mode")
    (problem,) = problems_of(subject)
    assert "reward.function = reward_of_a_stranger.score" in problem and "add --run-code" in problem
    assert config_of(subject, runs_code=True).reward.function == "reward_of_a_stranger.score"
    assert config_of(subject, "reward.function=reward_of_a_stranger.score").reward.function
    assert config_of(subject, "reward=gsm8k").reward.function == "hybridrl.rewards.gsm8k.score"


def test_a_checkpoints_reward_over_http_gets_no_secret_unless_asked_to(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret-of-mine")
    url, token = "reward.args.url=http://127.0.0.1:1/x", "reward.args.token_env=MY_TOKEN"
    subject = checkpoint_of("reward=http", url, token)
    (problem,) = problems_of(subject)
    assert "reward.args.url = http" in problem and "reward.args.token_env = MY_TOKEN" in problem
    (problem,) = problems_of(subject, url)
    assert "reward.args.url" not in problem and "reward.args.token_env = MY_TOKEN" in problem
    assert config_of(subject, runs_code=True).reward.args["token_env"] == "MY_TOKEN"
    assert config_of(subject, url, token).reward.args["token_env"] == "MY_TOKEN"
    assert config_of(subject, "reward=gsm8k").reward.args == {"mode": "strict"}


@pytest.mark.parametrize("trusted", [False, True])
def test_a_checkpoints_config_cannot_look_up_environment_variables(trusted):
    subject = checkpoint_of("reward=http")
    subject.checkpoint.manifest.config["reward"]["args"]["url"] = "http:${oc.env:HF_TOKEN}"
    (problem,) = problems_of(subject, runs_code=trusted)
    assert "a value with ${...}" in problem and "HF_TOKEN" not in problem


@pytest.mark.parametrize(
    ("overrides", "top_p"),
    [
        ([], 0.7),
        (["rollout.top_p=0.9"], 0.9),
        (["eval.top_p=0.8"], 0.8),
        (["eval.top_p=0.8", "rollout.top_p=0.9"], 0.8),
    ],
)
def test_a_nucleus_is_that_of_evaluations_or_of_the_run(overrides, top_p):
    """Also on CPUs, where training has none; the engines record no tokens."""
    subject = checkpoint_of("+recipe=gsm8k_sft", "rollout.top_p=0.7")
    config = config_of(subject, *overrides)
    asked = Evaluation(subject, config, [], Path(), samples=1)
    assert asked.sampling == {"temperature": 1.0, "top_p": top_p, "top_k": None}
    assert replace(asked, greedy=True).sampling["top_p"] == 1.0
