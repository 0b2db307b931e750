"""Trial of an agent's program before a run: what fails at once is a problem of the config."""

import json
import re
import socket
import sys
import time
from pathlib import Path

import pytest

from hybridrl.agents.training.trial import trial_problems
from hybridrl.config.schema import RunConfig
from hybridrl.data.sources.prompts import Prompt
from tests.support.run_configs import run_config

MESSAGES = [{"role": "user", "content": "3 + 4?"}]
PROGRAM = """
import asyncio

async def run(task, client):
    ask = client.chat.completions.create
    match task.example["kind"]:
        case "asks":
            await ask(model="policy", messages=task.messages)
            raise AssertionError("answered before a run")
        case "key":
            print("I look for the solution")
            return task.example["solution"]
        case "temperature":
            await ask(model="policy", messages=task.messages, temperature=0.3)
        case "tools":
            tool = {"type": "function", "function": {"name": "add"}}
            await ask(model="policy", messages=task.messages, tools=[tool])
        case "retries":
            for number in range(3):
                try:
                    await ask(model="policy", messages=task.messages, temperature=0.3)
                except Exception:
                    await ask(model="policy", messages=task.messages)
        case "path":
            await client.get("/v1/models", cast_to=object)
        case "exit":
            raise SystemExit(3)
    return 0.5
"""


def config_of(*overrides: str) -> RunConfig:
    config = run_config("algorithm=grpo", "model=embedded", *overrides)
    config.model.path = str(Path(__file__).parents[2] / "hybridrl" / "models" / "tiny")
    return config


def prompt(kind: str) -> Prompt:
    return Prompt(1, [1], "3 + 4?", "3 + 4?", {"kind": kind, "answer": "7"}, {}, messages=MESSAGES)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("asks", ""),
        ("nothing", ""),
        ("retries", ""),
        ("key", r"KeyError: 'solution' \(File \".*agent.py\", line 12, in run\)"),
        ("temperature", "temperature = 0.3.*cannot be trained"),
        ("tools", "chat template leaves tools out"),
        ("path", "404.*OpenAI's clients take the base URL"),
        ("exit", "SystemExit: 3"),
    ],
)
def test_what_fails_before_its_first_prompt_is_a_problem_of_the_config(tmp_path, kind, why):
    (tmp_path / "agent.py").write_text(PROGRAM)
    own = ["environment=agent", f"agent.function={tmp_path}/agent.py:run"]
    problems = trial_problems(config_of(*own, "agent.tool_parser=hermes"), prompt(kind))
    assert len(problems) == bool(why)
    for problem in problems:
        assert problem.startswith(f"agent.function = {tmp_path}/agent.py:run, but its trial on the")
        assert re.search(why, problem), problem


def test_an_address_that_another_program_has_is_left_to_the_run(tmp_path):
    (tmp_path / "agent.py").write_text(PROGRAM)
    own = ["environment=agent", f"agent.function={tmp_path}/agent.py:run"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = config_of(*own, f"agent.port={other.getsockname()[1]}")
        assert trial_problems(config, prompt("key")) == []
    assert trial_problems(config, prompt("key"))  # at the same port, twice
    assert trial_problems(config, prompt("key"))


def test_a_command_is_tried_and_ended_at_its_first_prompt(tmp_path):
    asks = """
import json, os, pathlib, time, urllib.request
pathlib.Path({pid!r}).write_text(str(os.getpid()))
body = json.dumps(dict(messages=json.loads(os.environ["HYBRIDRL_TASK"])["messages"])).encode()
headers = dict(Authorization="Bearer " + os.environ["OPENAI_API_KEY"])
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers))
"""
    pid = tmp_path / "pid"
    (tmp_path / "asks.py").write_text(asks.format(pid=str(pid)))
    (tmp_path / "fails.py").write_text("print('no tool'); raise SystemExit(4)")

    def problems(name: str) -> list[str]:
        command = json.dumps([sys.executable, f"{tmp_path}/{name}.py"])
        own = ["environment=agent_command", f"agent.args.command={command}"]
        return trial_problems(config_of(*own), prompt(""))

    begun = time.monotonic()
    assert problems("asks") == [] and time.monotonic() - begun < 30
    assert not Path("/proc", pid.read_text()).exists()
    (problem,) = problems("fails")
    assert "exit code 4, no tool" in problem
