"""Code that a checkpoint's config names: ours is run, that of others only when asked to."""

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.config.foreign_code import foreign_code, refuse_foreign_code
from hybridrl.trainer.manifest import plain
from tests.run_configs import run_config

FOREIGN = [
    ("reward", {"function": "os.system", "args": {}}, "reward.function = os.system"),
    (
        "reward",
        {"function": "hybridrl.x", "args": {"parts": {"a": {"function": "b.c"}}}},
        "reward.args.parts.a.function = b.c",
    ),
    ("rollout", {"worker": "evil.Worker"}, "rollout.worker = evil.Worker"),
    ("algorithm", {"advantage": "mine.advantage"}, "algorithm.advantage = mine.advantage"),
    ("algorithm", {"loss": {"function": "mine.loss"}}, "algorithm.loss.function = mine.loss"),
    ("eval", {"rules": {"x": {"function": "hybridrlx.y"}}}, "eval.rules.x.function = hybridrlx.y"),
]


@pytest.mark.parametrize(("section", "content", "named"), FOREIGN)
def test_code_of_others_is_refused_by_key_and_path(section, content, named):
    with pytest.raises(ConfigError, match="--run-code") as caught:
        refuse_foreign_code({section: content, "model": {"path": "a.b"}}, "somewhere")
    assert str(caught.value).count(" = ") == 1
    assert named in str(caught.value)


@pytest.mark.parametrize("override", ["reward=weighted", "environment=calculator", "seed=2"])
def test_a_run_of_ours_names_no_code_of_others(override):
    assert list(foreign_code(plain(run_config(override)))) == []


@pytest.mark.parametrize("override", ["reward.function=mine.score", "reward=gsm8k"])
def test_what_the_command_line_names_is_trusted(override):
    refuse_foreign_code({"reward": {"function": "mine.score"}}, "somewhere", [override])
