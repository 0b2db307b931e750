"""Modules of the user's that end, kill or hang whoever imports them: problems of the config."""

import time
from pathlib import Path

import psutil
import pytest

from hybridrl.config.schema import EnvironmentConfig
from hybridrl.config.user_code import importing
from hybridrl.environments.base import trial_problems
from tests.support.composing import examined, only

TIMEOUT_S = 2.0
PPO = ["+recipe=gsm8k_ppo", "hardware=cpu"]
REWARD = "reward.function={}.score"
KEYS = [
    REWARD,
    "eval.rules.flexible.function={}.score",
    "algorithm.advantage={}.estimate",
    "algorithm.loss.function={}.loss",
    "actor.worker={}.MyActor",
    "+environment={{function: {}.Talk, args: {{}}, max_turns: 2, stop: [], role: user}}",
]
HANGS = """
import signal, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
Path(__file__).with_suffix(".pid").write_text(str(child.pid))
signal.pthread_sigmask(signal.SIG_BLOCK, list(signal.Signals))
time.sleep(600)
"""
FORKS = """
import os, time
if os.fork():
    time.sleep(0.5)
else:
    raise ValueError("in the copy")
"""


@pytest.fixture
def module(tmp_path, monkeypatch, request) -> Path:
    """A file that can be imported, under a name of its own."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / f"own_{abs(hash(request.node.nodeid))}.py"


@pytest.mark.parametrize("setting", KEYS, ids=lambda text: text.partition("=")[0])
def test_one_that_exits_is_named_whatever_it_is_for(module, setting):
    module.write_text("import sys; sys.exit(0)")
    problem = only(*PPO, setting.format(module.stem))
    key = setting.partition("=")[0].lstrip("+")
    assert problem.id == "import" and problem.key.startswith(key)
    assert problem.why == f"importing {module.stem} failed: SystemExit: 0 ({module}, line 1)"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os; os._exit(0)", "its process ended, exit code 0"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by signal 11"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class Odd(Exception): pass\nraise Odd('caf\\ud800')", r"Odd: caf\ud800"),
    ],
)
def test_one_that_ends_its_process_is_named(module, source, says):
    module.write_text(source)
    problem = only(*PPO, REWARD.format(module.stem))
    assert problem.id == "import" and says in problem.why


def test_one_that_hangs_is_waited_for_once_and_leaves_nothing(module, monkeypatch):
    monkeypatch.setattr(importing, "TRIAL_TIMEOUT_S", TIMEOUT_S)
    module.write_text(HANGS)
    start = time.monotonic()
    settings = [key.format(module.stem) for key in KEYS[:2]]
    found = examined([*PPO, *settings]).report.problems
    assert time.monotonic() - start < 2 * TIMEOUT_S
    assert [problem.id for problem in found] == ["import", "import"]
    assert all("it did not end within 2 s" in problem.why for problem in found)
    assert not psutil.pid_exists(int(module.with_suffix(".pid").read_text()))


def test_a_copy_that_one_forks_says_nothing(module):
    module.write_text(FORKS)
    importing.check_import("reward.function", f"{module.stem}.score")


CHECK = """
import sys, time
class Own:
    def __call__(self, *given, mode=None): return 1.0
    def problems(self, key, args):
        {}
score = Own()
"""


@pytest.mark.parametrize("key", ["reward", "environment"])
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sys.exit(0)", "its check `problems` failed: SystemExit: 0 ({}, line 6)"),
        ("time.sleep(600)", "its check `problems` failed: it did not end within 2 s"),
        ("return [f'{key}: {args}']", "{{'mode': {{1: 2.5}}}}"),
    ],
    ids=["exits", "hangs", "returns"],
)
def test_a_check_of_the_users_is_asked_in_another_process(module, monkeypatch, key, line, says):
    monkeypatch.setattr(importing, "TRIAL_TIMEOUT_S", TIMEOUT_S)
    module.write_text(CHECK.format(line))
    setting = f"{{function: {module.stem}.score, args: {{mode: {{1: 2.5}}}}}}"
    if key == "environment":
        setting = setting[:-1] + ", max_turns: 2, stop: [], role: user}"
    problem = only(*PPO, f"++{key}={setting}")
    assert problem.id == ("text" if line.startswith("return") else "trial")
    assert key in problem.key and says.format(module) in str(problem)


TRIED = """
from hybridrl.environments.base import StepResult
def estimate(rewards):
    return rewards.view(7, 1000)
class Talk:
    def __init__(self, example): self.answer = example["answer"]
    def reset(self): return ""
    def step(self, text): return StepResult(text, text[0] == self.answer, False)
"""


def test_an_estimator_that_raises_in_its_trial_is_named_with_its_line(module):
    module.write_text(TRIED)
    setting = f"algorithm.advantage={module.stem}.estimate"
    problem = only("+recipe=gsm8k_grpo", "hardware=cpu", setting)
    assert (problem.id, problem.key) == ("trial", "algorithm.advantage")
    assert problem.why.startswith("its trial on a small batch")
    assert "failed: RuntimeError: shape '[7, 1000]' is invalid" in problem.why
    assert f"({module}, line 4)" in problem.why


def test_an_environment_that_cannot_answer_an_empty_turn_is_named_with_its_line(module):
    module.write_text(TRIED)
    given = {"function": f"{module.stem}.Talk", "args": {}, "max_turns": 2, "stop": []}
    (problem,) = trial_problems(EnvironmentConfig(**given, role="user"), {"answer": "4"})
    assert problem.why.startswith("its trial on the first row of the data failed: IndexError")
    assert problem.id == "trial" and f"({module}, line 8)" in problem.why
