"""Own code by file, `/path/file.py:name`: what the config keeps, other processes, mistakes."""

import pickle
import subprocess
import sys

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import locate
from hybridrl.config.user_code.files import make_files_absolute, module_of
from hybridrl.config.user_code.importing import check_import
from tests.support.composing import examined, problems
from tests.support.run_configs import run_config
from tests.support.scorers import reward_scorer

CPU = "hardware=cpu"
REWARD = "def score(prompt, response, example): return 0.25\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, which is not on the Python path."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_config_keeps_absolute_files_wherever_code_is_named(folder):
    config = run_config()
    config.reward.function = "my.py:score"
    config.reward.args = {"parts": {"a": {"function": "../b.py:f", "args": {"text": "x.py:y"}}}}
    config.algorithm.advantage = "./sub/my.py:f"
    config.algorithm.loss.function = "ppo_clip"
    config.actor.worker = "/other/my.py:Actor"
    config.trainer.callbacks = ["my.py:Stop", "mine.Log"]
    make_files_absolute(config)
    assert config.trainer.callbacks == [f"{folder}/my.py:Stop", "mine.Log"]
    assert config.reward.function == f"{folder}/my.py:score"
    part = config.reward.args["parts"]["a"]
    assert part == {"function": f"{folder.parent}/b.py:f", "args": {"text": "x.py:y"}}
    assert config.actor.algorithm.advantage == f"{folder}/sub/my.py:f"
    assert config.algorithm.loss.function == "ppo_clip"
    assert config.critic.worker == "hybridrl.workers.critic.CriticWorker"
    assert config.actor.worker == "/other/my.py:Actor"


def test_rewards_rules_and_parts_of_a_sum_may_be_files(folder):
    (folder / "my.py").write_text(REWARD)
    part = "{function: my.py:score, args: {}, weight: 2}"
    rule = "+eval.rules.mine={function: my.py:score, args: {}}"
    given = [CPU, "reward=weighted", f"+reward.args.parts.mine={part}", rule]
    config = examined(given).config
    assert problems(*given) == []
    assert config.eval.rules["mine"].function == f"{folder}/my.py:score"
    scorer = {"timeout_s": 5.0, "num_processes": 1, "failed_score": -1.0}
    with reward_scorer(config.reward.function, config.reward.args, **scorer) as rewards:
        assert rewards.score([("", "none", {"answer": "1"})]).parts["mine"] == [0.25]


def test_a_files_classes_travel_to_processes_that_know_only_the_name(folder):
    code = "from beside import BASE\nclass Own:\n    def __init__(self, x): self.x = x + BASE\n"
    place = folder / "with. dots%2E"
    place.mkdir()
    (place / "own.py").write_text(code)
    (place / "beside.py").write_text("BASE = 40\n")
    content = pickle.dumps(locate("actor.worker", f"{place}/own.py:Own")(2))
    program = (
        "import pickle, sys, hybridrl.config.user_code.files; "
        "print(pickle.load(sys.stdin.buffer).x)"
    )
    given = {"input": content, "capture_output": True, "check": True}
    assert subprocess.run([sys.executable, "-c", program], **given).stdout == b"42\n"


def test_files_of_one_name_are_different_modules(folder):
    for name, value in (("a", 1), ("b", 2)):
        (folder / name).mkdir()
        (folder / name / "reward.py").write_text(f"VALUE = {value}\n")
    assert [locate("key", f"{name}/reward.py:VALUE") for name in ("a", "b")] == [1, 2]
    assert module_of("a/reward.py:VALUE") != module_of("b/reward.py:VALUE")


@pytest.mark.parametrize(
    ("path", "id_", "words"),
    [
        ("my.py", "no_name", "; it has score.\nSet reward.function=my.py:score"),
        ("{}/my.py", "no_name", "; it has score.\nSet reward.function={}/my.py:score"),
        ("none.py", "no_name", "nothing in it.\nSet reward.function=none.py:<name"),
        ("my.py:", "no_path", ""),
        ("my.py:scor", "no_such_name", "/my.py has no scor; it has score"),
        ("empty.py:score", "no_such_name", "it defines no function or class."),
        ("none.py:score", "import", "No such file or directory: '{}/none.py'"),
        ("broken.py:score", "import", "SyntaxError: invalid syntax ({}/broken.py, line 2)"),
        ("fails.py:score", "import", "'nothing' is not defined ({}/fails.py, line 1)"),
    ],
)
def test_a_mistake_is_named(folder, path, id_, words):
    (folder / "my.py").write_text(REWARD)
    (folder / "empty.py").write_text("VALUE = 1\n")
    (folder / "broken.py").write_text("x = 1\ndef = 3\n")
    (folder / "fails.py").write_text("nothing\n")
    with pytest.raises(ConfigError) as caught:
        check_import("reward.function", path.format(folder))
        locate("reward.function", path.format(folder))
    (problem,) = caught.value.problems
    assert problem.id == id_ and words.format(folder) in str(problem)
