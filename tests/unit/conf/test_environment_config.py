"""environment: choices compose, mistakes get what to type, idle keys are refused."""

import re
import shlex
from typing import Any

import pytest

from hybridrl.data.sources.tokenizer import decoder, load_tokenizer
from hybridrl.environments.base import EnvironmentPool, StepRequest
from hybridrl.trainer.episodes.conversations import stop_problems, turn_tokens
from tests.support.composing import REPO, examined, made, mistakes, named, only, problems
from tests.support.role_configs import model_config

CALCULATOR = ["hardware=cpu", "environment=calculator"]


def test_there_is_none_unless_it_is_asked_for():
    assert examined(["hardware=cpu"]).config.environment is None
    assert examined(["hardware=cpu", "environment=none"]).config.environment is None


def test_the_calculator():
    result = examined(CALCULATOR)
    assert result.report.problems == []
    environment = result.config.environment
    assert environment.function == "hybridrl.environments.calculator.Calculator"
    assert (environment.args, environment.max_turns) == ({"mode": "strict"}, 6)
    assert (environment.stop, environment.role) == (["="], "user")


MISTAKES = """
range environment.max_turns environment.max_turns=0
type environment.max_turns environment.max_turns=often
role environment.role environment.role='' | it is empty
no_such_name environment.function environment.function=hybridrl.environments.calculator.Calculater
import environment.function environment.function=no_such_module.Thing | Modules are searched in
function environment.function environment.function=hybridrl.environments.calculator.MARKER
arguments environment.function +environment.args.mod=strict | Did you mean environment.args.mode?
arguments environment.function ~environment.args.mode | missing a required argument: 'mode'
unknown_key environment.max_turn +environment.max_turn=3 | Did you mean environment.max_turns?
no_effect reward.function reward.function=hybridrl.rewards.gsm8k.score | set environment=none
no_effect reward.args.mode reward.args.mode=flexible
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_a_mistake_gets_one_problem_that_says_what_to_do(mistake):
    assert made(mistake, *CALCULATOR) == [mistake]


def test_what_steps_and_failures_take_keeps_its_effect():
    settings = ["reward.timeout_s=1", "reward.num_processes=1", "reward.failed_score=-1"]
    assert problems(*CALCULATOR, *settings) == []


def test_a_stop_text_must_be_a_token_of_the_model():
    config = examined([*CALCULATOR, "environment.stop=['=','=>']"]).config.environment
    (problem,) = stop_problems(model_config("embedded"), config)
    assert "'=>', which is 2 tokens of this model" in str(problem)
    assert stop_problems(model_config("embedded"), examined(CALCULATOR).config.environment) == []


def test_the_tutorial_on_environments_says_what_works(tmp_path, monkeypatch):
    """Its class, its test and its command as written; the second attempt is worth half."""
    page = (REPO / "docs" / "tutorial_environment.md").read_text()
    code, test, command = re.findall(r"```(?:python)?\n(.*?)```", page, re.DOTALL)
    (tmp_path / "quiz.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    tests: dict[str, Any] = {}
    exec(test, tests)
    tests["test_the_second_attempt_is_worth_half"]()
    result = examined([*shlex.split(command.replace("\\\n", " "))[2:], "hardware=cpu"])
    assert result.report.problems == []
    config = result.config.environment
    with EnvironmentPool(config.function, config.args, timeout_s=5.0, num_processes=1) as pool:
        (opened,) = pool.open([{"answer": "#### 4"}])
        (first,) = pool.step([StepRequest(opened.state, "#### 5")])
        (second,) = pool.step([StepRequest(first.state, "#### 4")])
    assert (first.result.text, first.result.reward, first.result.done) == ("Wrong.", 0.0, False)
    assert (second.result.reward, second.result.done) == (0.5, True)
    tokenizer = load_tokenizer(model_config("embedded"))
    end = tokenizer.eos_token_id
    (ids,) = turn_tokens(model_config("embedded"), config).answers(["Then"], [end])
    assert tokenizer.decode(ids) == "<|user|>Then<|assistant|>"
    assert decoder(tokenizer)([[end]]) == [""]


AGENT = ["hardware=cpu", "environment=calculator_agent", "algorithm=grpo"]


def test_an_agent_and_its_command():
    agent = examined(AGENT).config.agent
    assert (agent.concurrency, agent.other_sampling, agent.host) == (None, "refuse", "127.0.0.1")
    result = examined([*AGENT, "environment=agent_command", "agent.args.command=[ls]"])
    assert result.report.problems == [] and result.config.environment is None
    assert result.config.agent.args == {
        "command": ["ls"],
        "memory_mb": 4096,
        "reward": {"function": None},
    }


AGENT_MISTAKES = """
range agent.concurrency agent.concurrency=0
type agent.other_sampling agent.other_sampling=allow | one of refuse, mask, ignore
no_such_name agent.function agent.function=hybridrl.environments.calculator_agent.go
arguments agent.function agent.function=hybridrl.environments.calculator.evaluate
coroutine agent.function agent.function=hybridrl.environments.calculator.Calculator \
    | `async def run(task, client)
arguments agent.function +agent.args.mod=strict | Did you mean agent.args.mode?
no_effect reward.function reward.function=hybridrl.rewards.gsm8k.score | set environment=none
no_effect reward.timeout_s reward.timeout_s=3
agent algorithm.max_sampling_rounds algorithm.max_sampling_rounds=3
agent algorithm.advantage algorithm=remax | Set algorithm=rloo
"""


@pytest.mark.parametrize("mistake", mistakes(AGENT_MISTAKES))
def test_a_mistake_of_an_agent_gets_one_problem(mistake):
    assert made(mistake, *AGENT) == [mistake]


def test_a_program_is_a_coroutine_and_a_command_is_a_list(tmp_path):
    (tmp_path / "agent.py").write_text("def run(task, client): return 1.0")
    assert only(*AGENT, f"agent.function={tmp_path}/agent.py:run").id == "coroutine"
    problem = only("hardware=cpu", "environment=agent_command", "algorithm=grpo")
    assert "agent.args.command = [], expected the texts" in str(problem)


@pytest.mark.parametrize(
    ("name", "ids"), [("score", []), ("scores", ["no_such_name"]), ("short", ["arguments"])]
)
def test_the_judge_of_a_command_takes_four_arguments(tmp_path, name, ids):
    file = tmp_path / "judge.py"
    file.write_text("def score(task, transcript, folder, output): ...\ndef short(task): ...\n")
    command = ["hardware=cpu", "environment=agent_command", "algorithm=grpo"]
    command += ["agent.args.command=[ls]", f"agent.args.reward.function={file}:{name}"]
    assert [id_ for id_, _ in named(*command)] == ids


def test_arguments_of_a_chat_template_are_its_own():
    found = named("hardware=cpu", "+data.chat_template_kwargs={tokenize: true, mood: 1}")
    assert found == [("template_argument", "data.chat_template_kwargs.tokenize")]
