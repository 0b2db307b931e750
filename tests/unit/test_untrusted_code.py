"""Code that a checkpoint's config names: ours is run, that of others only when asked to."""

import pytest
from omegaconf import OmegaConf

from hybridrl.config.errors import ConfigError
from hybridrl.config.keys import leaves
from hybridrl.config.user_code.files import names_code
from hybridrl.config.user_code.untrusted_code import (
    ALLOWED,
    needs_trust,
    refuse_untrusted_code,
)
from hybridrl.trainer.tracking.provenance import plain
from tests.support.deploy_stubs import REPO
from tests.support.run_configs import run_config

FOREIGN = [
    ("reward", {"function": "os.system", "args": {}}, "reward.function = os.system"),
    (
        "reward",
        {
            "function": "hybridrl.rewards.weighted.score",
            "args": {"parts": {"a": {"function": "b.c"}}},
        },
        "reward.args.parts.a.function = b.c",
    ),
    (
        "reward",
        {"function": "hybridrl.rewards.sandbox.programs.io.FileIO"},
        "= hybridrl.rewards.sandbox.programs.io.FileIO",
    ),
    ("reward", {"function": "/tmp/evil.py:score"}, "reward.function = /tmp/evil.py:score"),
    (
        "reward",
        {"function": ["hybridrl.rewards.gsm8k.score", "/tmp/evil.py:score"]},
        "reward.function.1 = /tmp/evil.py:score",
    ),
    ("algorithm", {"advantage": "evil.py:f"}, "algorithm.advantage = evil.py:f"),
    ("trainer", {"callbacks": ["evil.Stop"]}, "trainer.callbacks.0 = evil.Stop"),
    ("rollout", {"worker": "evil.Worker"}, "rollout.worker = evil.Worker"),
    ("algorithm", {"advantage": "mine.advantage"}, "algorithm.advantage = mine.advantage"),
    ("algorithm", {"loss": {"function": "mine.loss"}}, "algorithm.loss.function = mine.loss"),
    ("model", {"trust_remote_code": True, "path": "a.b"}, "model.trust_remote_code = True"),
    ("eval", {"rules": {"x": {"function": "hybridrlx.y"}}}, "eval.rules.x.function = hybridrlx.y"),
]


@pytest.mark.parametrize(("section", "content", "named"), FOREIGN)
def test_code_of_others_is_refused_by_key_and_path(section, content, named):
    with pytest.raises(ConfigError, match="--run-code") as caught:
        config = {"model": {"path": "a.b", "trust_remote_code": False}, section: content}
        refuse_untrusted_code(config, "somewhere")
    assert str(caught.value).count(" = ") == 1
    assert named in str(caught.value)


def test_what_conf_names_is_ours():
    named = {
        value
        for path in (REPO / "conf").rglob("*.yaml")
        for key, value in leaves(OmegaConf.to_container(OmegaConf.load(path))).items()
        if names_code(key) and "." in (value or "")
    }
    others = "hybridrl.environments.others"
    of_others = {f"{others}.{name}" for name in ("verifiers", "openenv", "gymnasium")}
    run_others = {f"{name}.{function}" for name in of_others for function in ("rows", "run")}
    run_others.add("hybridrl.environments.commands.command")
    assert named - run_others == ALLOWED and not run_others & ALLOWED
    assert all(needs_trust({"agent": {"function": name}}) for name in run_others)


@pytest.mark.parametrize("override", ["reward=gsm8k_form", "environment=calculator", "seed=2"])
def test_a_run_of_ours_needs_no_trust(override):
    assert not needs_trust(plain(run_config(override)))


@pytest.mark.parametrize("override", ["reward.function=mine.score", "reward=gsm8k"])
def test_what_the_command_line_names_is_trusted(override):
    refuse_untrusted_code({"reward": {"function": "mine.score"}}, "somewhere", [override])


def test_a_mapping_on_the_command_line_hides_no_code_that_it_leaves():
    with pytest.raises(ConfigError, match=r"reward\.function = mine\.score"):
        refuse_untrusted_code(
            {"reward": {"function": "mine.score"}}, "x", ["reward={timeout_s: 1}"]
        )


URL = {"url": "http://evil/x"}
OUTWARD = [
    ({"reward": {"args": URL}}, "reward.args.url = http://evil/x"),
    ({"reward": {"args": {"token_env": "NOT_SET"}}}, "reward.args.token_env = NOT_SET"),
    ({"reward": {"args": {"mode": "A_TOKEN"}}}, "reward.args.mode = A_TOKEN"),
    ({"reward": {"args": {"parts": {"a": {"args": URL}}}}}, "reward.args.parts.a.args.url ="),
    ({"reward": {"args": {"names": ["x", "A_TOKEN"]}}}, "reward.args.names.1 = A_TOKEN"),
    ({"eval": {"rules": {"a": {"args": URL}}}}, "eval.rules.a.args.url = http://evil/x"),
    ({"environment": {"args": {"key": "A_TOKEN"}}}, "environment.args.key = A_TOKEN"),
]


@pytest.mark.parametrize(("config", "named"), OUTWARD)
def test_arguments_that_could_send_a_secret_are_refused_where_judges_run(
    config, named, monkeypatch
):
    monkeypatch.setenv("A_TOKEN", "secret-of-mine")
    with pytest.raises(ConfigError, match="--run-code") as caught:
        refuse_untrusted_code(config, "somewhere", runs_rewards=True)
    assert (
        needs_trust(config)
        and named in str(caught.value)
        and "secret-of-mine" not in str(caught.value)
    )
    refuse_untrusted_code(config, "somewhere")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"reward": {"args": {"isolation": "none"}}}, "reward.args.isolation = none"),
        (
            {"eval": {"rules": {"a": {"args": {"isolation": "none"}}}}},
            "eval.rules.a.args.isolation",
        ),
    ],
)
def test_a_sandbox_that_is_switched_off_is_refused_where_judges_run(config, named):
    with pytest.raises(ConfigError, match="--run-code") as caught:
        refuse_untrusted_code(config, "somewhere", runs_rewards=True)
    assert needs_trust(config) and named in str(caught.value)
    refuse_untrusted_code(config, "somewhere")
    refuse_untrusted_code(config, "x", [f"{named.split(' ')[0]}=none"], runs_rewards=True)


@pytest.mark.parametrize(
    ("override", "is_enough"),
    [
        ("reward.args.url=http://mine", True),
        ("reward=http", True),
        ("~reward.args", True),
        ("reward.args.retries=1", False),
        ("reward.args={retries: 1}", False),
        ("reward={args: {retries: 1}}", False),
    ],
)
def test_only_an_override_of_the_very_argument_takes_its_place(override, is_enough):
    config = {"reward": {"args": URL}}
    if is_enough:
        refuse_untrusted_code(config, "somewhere", [override], runs_rewards=True)
    else:
        with pytest.raises(ConfigError, match=r"reward\.args\.url"):
            refuse_untrusted_code(config, "somewhere", [override], runs_rewards=True)


@pytest.mark.parametrize("override", ["reward=gsm8k_form", "reward=code", "environment=calculator"])
def test_a_run_that_calls_nobody_is_let_through(override):
    refuse_untrusted_code(plain(run_config(override)), "somewhere", runs_rewards=True)
