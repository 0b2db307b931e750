"""environment=openenv with a server of the real package: its own echo, and a calculator."""

import json
import re
import socket
import subprocess
import sys
import time
from urllib.request import urlopen

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.environments.others.openenv import rows, run
from tests.support.other_environments import played

# In an environment of its own, as it excludes packages of vLLM's.
pytest.importorskip("openenv", reason="pip install openenv")

CALCULATOR = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Expression(Action):
    text: str

class Value(Observation):
    shown: str

class Calculator(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, more=0):
        self.wanted = seed + more
        return Value(shown=f"make {self.wanted}")

    def step(self, action):
        if action.text == "fail":
            raise ValueError("no power")
        value = sum(map(int, action.text.split("+")))
        is_right = value == self.wanted
        return Value(shown=str(value), reward=1.0 if is_right else -0.5, done=is_right)

app = create_app(Calculator, Expression, Value, env_name="calculator", max_concurrent_envs=4)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""
ARGS = {"reset": {}, "num_tasks": 4, "max_turns": 3, "turn_rewards": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Start a server with a script; return its URL."""
    processes = []

    def serve(*command: str, folder=None) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        arguments = [part.format(port=port) for part in command]
        processes.append(subprocess.Popen([sys.executable, *arguments], cwd=folder))
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while time.monotonic() < end:
            try:
                urlopen(f"{url}/health", timeout=1).close()
                return url
            except OSError:
                time.sleep(0.2)
        raise TimeoutError(command)

    yield serve
    for process in processes:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def calculator(served, tmp_path_factory):
    (file := tmp_path_factory.mktemp("calculator") / "serve.py").write_text(CALCULATOR)
    return served(str(file), "{port}")


def say(prompt: str) -> str:
    wanted = int(re.findall(r"make (\d+)", prompt)[0])
    if wanted == 3:
        return "fail"
    return json.dumps({"text": f"{wanted}+0"}) if wanted == 1 else f"{prompt.count('user')}+0"


def test_seeds_are_the_data_and_actions_have_their_rewards(calculator):
    args = {**ARGS, "url": calculator}
    tasks = rows("train", **args)
    assert [task["seed"] for task in tasks] == [0, 1, 2, 3]
    assert rows("test", **args) is None
    (never, at_once, second, failed), prompts = played(run, tasks, say, **args)
    assert [*never.turns.values()] == [-0.5, -0.5, -0.5]
    assert [*at_once.turns.values()] == [1.0]
    assert [*second.turns.values()] == [-0.5, 1.0]
    assert str(failed) == "EXECUTION_ERROR: no power"
    assert "<|user|>make 2<|assistant|>1+0<|end|><|user|>1<|assistant|>" in prompts


def test_wrong_actions_are_the_policys_and_arguments_are_those_of_reset(calculator):
    args = {**ARGS, "url": calculator, "reset": {"more": 5}, "max_turns": 2}
    answers = iter(['{"txt": "1"}', "5+0"])
    (reward,), prompts = played(run, rows("train", **args)[:1], lambda _: next(answers), **args)
    assert [*reward.turns.values()] == [0.0, 1.0]
    assert "make 5" in prompts[0] and "Invalid message" in prompts[1]


def test_the_packages_own_echo(served, tmp_path):
    command = [sys.executable, "-m", "openenv.cli", "init", "echo_env"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    app = ["-m", "uvicorn", "server.app:app", "--port", "{port}", "--log-level", "error"]
    args = {**ARGS, "url": served(*app, folder=tmp_path / "echo_env"), "max_turns": 2}
    tasks = rows("train", **args)
    (reward,), prompts = played(run, tasks[:1], lambda _: "6 + 7", **args)
    assert [*reward.turns.values()] == [0.5, 0.5]
    assert '{"echoed_message": "6 + 7", "message_length": 5}' in prompts[1]
    # It has one session.
    rewards, _ = played(run, tasks[:2], lambda _: "6", **args)
    failed = next(reward for reward in rewards if isinstance(reward, Exception))
    assert "CAPACITY_REACHED" in str(failed) and "set agent.concurrency" in str(failed)


def test_a_dead_server_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"(?s)agent.args.url = .*:9, .*refused.*\n.*Start it, or set"
    ):
        rows("train", **ARGS, url="http://127.0.0.1:9")
