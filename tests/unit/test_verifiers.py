"""environment=verifiers with the real package: tasks as data, episodes at the endpoint, faults."""

import re

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.environments.others.verifiers import rows, run
from hybridrl.rollout.vllm.text import Parsed
from tests.support.other_environments import played

pytest.importorskip("verifiers", reason="pip install 'hybridrl[verifiers]'")

TASKSET = """
import verifiers.v1 as vf

class Config(vf.TasksetConfig):
    first: int = 0

class Data(vf.TaskData):
    answer: str

class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task, trace):
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace):
        if trace.last_reply == "9 9":
            raise ValueError("no judgement")
        return float(len(trace.last_reply) < 6)

class Numbers(vf.Taskset[Task, Config]):
    INFINITE = ENDLESS

    def load(self):
        for number in range(self.config.first, 8):
            data = Data(prompt=f"{number} 7", answer=f"7 {number}", system_prompt="Reverse.")
            yield Task(data, self.config.task)

__all__ = ["Numbers"]
"""
# As with a model: the second seat guides the first, in turns.
PAIR = """
class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    guide: vf.AgentConfig = vf.AgentConfig()

class Pair(vf.Env[PairConfig]):
    async def setup(self, agents):
        agents.guide.trainable = GUIDED

    async def run(self, task, agents):
        async with agents.solver.interaction(task) as solver:
            said = await solver.turn()
            await solver.turn(f"Not {said.last_reply}.")
        if not GUIDED:
            await agents.guide.run(task)

__all__ = ["Numbers", "Pair"]
"""

# A server of tools is another process, which runs the module.
TOOLS = """
class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        return str(a + b)

class Adding(Task):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

class Sums(vf.Taskset[Adding, Config]):
    def load(self):
        yield Adding(Data(prompt="3 7", answer="10"), self.config.task)

__all__ = ["Sums"]
if __name__ == "__main__":
    Adder.run()
"""


@pytest.fixture
def args(tmp_path):
    def written(name: str, text: str = TASKSET, endless: str = "False", **more: object) -> dict:
        (file := tmp_path / f"{name}_{tmp_path.name}.py").write_text(
            text.replace("ENDLESS", endless)
        )
        return {"env": str(file), "config": {}, "eval_config": None, "num_tasks": None} | more

    return written


def say(prompt: str) -> str:
    asked = re.findall(r"user\|>(\d) 7", prompt)[0]
    if "Not " in prompt:
        return f"7 {asked}"
    return {"3": "seven three", "4": "9 9"}.get(asked, f"7 {asked}" if int(asked) % 2 else "no")


def test_its_tasks_are_the_data_and_are_played_beside_each_other(args):
    own = args("numbers_backwards")
    train = rows("train", **own)
    assert train[5]["question"] == [
        {"role": "system", "content": "Reverse."},
        {"role": "user", "content": "5 7"},
    ]
    assert rows("test", **own) is None
    held_out = rows("test", **own | {"eval_config": {"taskset": {"first": 6}}})
    assert [row["task"]["answer"] for row in held_out] == ["7 6", "7 7"]
    rewards, prompts = played(run, train, say, **own)
    totals = [getattr(reward, "total", str(reward)) for reward in rewards]
    assert totals[:4] + totals[5:] == [0.5, 1.5, 0.5, 0.0, 1.5, 0.5, 1.5]
    assert "no judgement" in totals[4]
    assert "<|system|>Reverse.<|user|>5 7<|assistant|>" in prompts


def test_an_environment_of_several_turns_and_seats(args):
    own = args("pairs", TASKSET + PAIR.replace("GUIDED", "True"))
    (reward,), prompts = played(run, rows("train", **own)[2:3], say, **own)
    assert reward.total == 1.5
    assert prompts[1].endswith("<|assistant|>no<|end|><|user|>Not no.<|assistant|>")
    own = args("fixed_guide", TASKSET + PAIR.replace("GUIDED", "False"))
    (failed,), _ = played(run, rows("train", **own)[2:3], say, **own)
    assert "agent.args.config.guide is not trained and has no model" in str(failed)


def test_a_task_may_have_tools(args):
    own = args("summing", TASKSET + TOOLS)

    def parse(text: str, tools: list) -> Parsed:
        call = (tools[0]["function"]["name"], '{"a": 3, "b": 7}')
        return Parsed("", [call]) if text == "add" else Parsed(text, [])

    def call_once(prompt: str) -> str:
        return re.findall(r"tool\|>(\d+)", prompt)[0] if "tool|>" in prompt else "add"

    (reward,), prompts = played(run, rows("train", **own), call_once, parse=parse, **own)
    assert reward.total == 1.5 and len(prompts) == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"env": "no-such-taskset"}, "agent.args.env = no-such-taskset.*'no_such_taskset'"),
        ({"env": "/no/file.py"}, "agent.args.env = /no/file.py"),
        ({"env": "/no/json.py"}, "its name is that of another module, .*json"),
        ({"config": {"taskset": {"fist": 1}}}, "agent.args.env = .*fist"),
        ({"config": {"agent": {"harness": {"id": "basch"}}}}, "built-in harnesses are: .*bash"),
    ],
)
def test_what_cannot_be_loaded_is_named(args, change, why):
    with pytest.raises(ConfigError, match=re.compile(why, re.DOTALL)):
        rows("train", **args("numbers_again") | change)


def test_endless_tasks_need_a_number(args):
    own = args("endless", endless="True")
    with pytest.raises(ConfigError, match=r"have no end.\n.*Set agent.args.num_tasks=1000"):
        rows("train", **own)
    assert len(rows("train", **own | {"num_tasks": 3})) == 3
