"""environment=agent as shipped: two steps of the recipe, of branching programs, of a command."""

import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import openai
import pytest

from hybridrl.checkpoint.files import DRIVER
from tests.support.metric_names import unexplained
from tests.support.runs import ROOT, SMALL, started

RECIPE = ["+recipe=calculator_agent", *SMALL[1:], "eval.greedy=false"]
WATCHED = ["trainer.samples_every_steps=1"]
TWO = "cluster.gpus_per_node=2"

# Asks twice for each answer, the second time with another history; fails for some tasks.
BRANCHING = """
import asyncio

async def run(task, client):
    question = task.messages
    asked = [dict(model="policy", messages=question, n=2), dict(model="policy", messages=question)]
    answers = await asyncio.gather(*(client.chat.completions.create(**one) for one in asked))
    first = answers[0].choices[0].message
    edited = {"role": "assistant", "content": "No: " + (first.content or "")}
    more = {"role": "user", "content": "And?"}
    await client.chat.completions.create(model="policy", messages=[*question, first, more])
    await client.chat.completions.create(model="policy", messages=[*question, edited, more])
    if len(question[0]["content"]) % 3 == 0:
        raise ValueError("the tool broke")
    return float(sum(first.content.encode()) % 2)
"""
COMMAND = """
import json, os, urllib.request
task = json.loads(os.environ["HYBRIDRL_TASK"])
body = json.dumps({"model": "policy", "messages": task["messages"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
answer = json.load(urllib.request.urlopen(request))
said = answer["choices"][0]["message"]["content"]
open("said.txt", "w").write(said)
print(json.dumps({"reward": len(said) % 2}))
"""
JUDGE = """
def score(task, transcript, folder, output):
    (conversation,) = transcript
    question, answer = conversation
    assert question == task.messages[0] and answer["role"] == "assistant"
    assert answer["content"] == (folder / "said.txt").read_text()
    return 2.0 + len(answer["content"]) % 2
"""
CONSTRAINED = """
import json

SCHEMA = {
    "type": "object",
    "properties": {"is_sure": {"type": "boolean"}},
    "required": ["is_sure"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

async def run(task, client):
    create, messages = client.chat.completions.create, list(task.messages)
    answer = await create(model="policy", messages=messages)
    messages += [answer.choices[0].message, {"role": "user", "content": "Sure?"}]
    answer = await create(model="policy", messages=messages, response_format=FORM)
    return float(json.loads(answer.choices[0].message.content)["is_sure"])
"""
# The first turn is worth a half or 0, the whole 1 or 0, by the parity of the text's bytes.
TURNS = """
async def run(task, client):
    messages, turns = list(task.messages), {}
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message
        parity = sum(said.content.encode()) % 2
        turns[answer.id] = 0.0 if turns else 0.5 * parity
        messages += [said, {"role": "user", "content": "And?"}]
    return {"reward": parity, "turns": turns}
"""
# The calculator's program; it notes its begin, by the text of its problem, in a file.
NOTING = """
from pathlib import Path
from hybridrl.environments import calculator_agent

async def run(task, client):
    with (Path(__file__).parent / "begun.txt").open("a") as begun:
        begun.write(repr(task.prompt) + "\\n")
    return await calculator_agent.run(task, client, mode="strict", max_turns=6)
"""


def assert_trained(rows: list[dict]) -> None:
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [name for name in unexplained(rows[1]) if not name.startswith("health/")] == []
    for row in rows[1:]:
        assert row["rollout/log_prob_diff_mean"] < 1e-4
        assert row["actor/first_log_ratio_max"] == 0.0
        assert all(value is None or math.isfinite(value) for value in row.values())


def trained(tmp_path: Path, program: str, *changes: str) -> tuple[Path, str, list[dict]]:
    """The directory, output and metrics of two steps with a program, which have trained."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "agent.py").write_text(program)
    overrides = [*RECIPE, *WATCHED, "agent.function=agent.py:run", *changes]
    with started(run_dir, *overrides) as run:
        output = run.output()
        assert run.process.returncode == 0, output
        rows = run.metrics()
    assert_trained(rows)
    return run_dir, output, rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [[], [TWO, "rollout.tensor_parallel_size=2"], [TWO], ["algorithm=ppo"]],
    ids=["one", "tp2", "dp2", "critic"],
)
def test_two_steps_of_the_recipe(tmp_path, changes):
    with started(tmp_path / "run", *RECIPE, *WATCHED, *changes) as run:
        run.ended()
        rows = run.metrics()
    assert_trained(rows)
    if not changes:
        folder, command = tmp_path / "eval", [sys.executable, "-m", "hybridrl.cli", "eval"]
        own = ["hardware=cpu", "--problems=6", "--samples=2", f"--output={folder}"]
        command += [str(run.run_dir), *own]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        for row in rows[1:]:  # what the engine sampled does not count as outside
            tokens = row["rollout/tokens_per_second"] * row["time/rollout_s"]
            sampling_s = tokens / row["rollout/engine_tokens_per_second_max"]
            inside_s = row["time/step_s"] - row["time/outside_s"]
            assert inside_s > sampling_s > 0.0
            assert 0.0 < row["environment/seconds"] < row["time/rollout_s"] - sampling_s
        found = (folder / "completions.jsonl").read_text().splitlines()
        assert len(found) == 12 and "calculator_agent.run" in done.stdout
    for row in rows[1:]:
        assert row["agent/branches"] == row["reward/failed"] == 0.0
        assert 1.0 < row["rollout/turns_mean"] < row["rollout/turns_max"] <= 6.0


@pytest.mark.slow
@pytest.mark.parametrize("changes", [[], [TWO], ["algorithm=ppo"]], ids=["one", "dp2", "critic"])
def test_branches_and_failures_are_counted_by_episode(tmp_path, changes):
    run_dir, output, rows = trained(tmp_path, BRANCHING, "reward.failed_score=-1", *changes)
    for row in rows[1:]:
        # Three answers to the question, one of them continued, and the edited history.
        assert row["agent/branches"] == 3.0 and row["rollout/turns_mean"] == 5.0
        assert row["batch/responses"] == 4 * 32
        assert 0 < row["reward/failed"] < 32 and row["reward/failed"] % 4 == 0
    assert "the request has 'No: " in output and "the tool broke" in output
    lines = (run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()
    scores = {json.loads(line)["score"] for line in lines}
    assert scores == {-1.0, 0.0, 1.0} and len(lines) == 128


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_rewards_of_turns_train(tmp_path, algorithm):
    run_dir, _, rows = trained(tmp_path, TURNS, f"algorithm={algorithm}")
    assert rows[1]["reward/failed"] == 0.0 and 0.0 < rows[1]["reward/mean"] < 1.5
    lines = (run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()
    assert {json.loads(line)["score"] for line in lines} == {0.0, 0.5, 1.0, 1.5}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [[], [TWO, "rollout.tensor_parallel_size=2"]], ids=["one", "tp2"]
)
def test_constrained_turns_are_context(tmp_path, changes):
    """A free answer, then one of a schema: half of the turns are trained."""
    _, _, rows = trained(tmp_path, CONSTRAINED, "agent.other_sampling=mask", *changes)
    for row in rows[1:]:
        assert row["reward/failed"] == row["agent/branches"] == 0.0
        assert row["rollout/turns_mean"] == 2.0 and 0.0 < row["reward/mean"] < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("changes", [[], [TWO]], ids=["one", "dp2"])
def test_episodes_take_several_steps_and_begin_anew_in_a_resumed_run(tmp_path, changes):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "agent.py").write_text(NOTING)
    own = ["agent.function=agent.py:run", "rollout.schedule=partial", "rollout.max_versions=2"]
    own += ["checkpoint.every_steps=1", "resume=auto", *changes]
    command = [*RECIPE, *own, "eval.every_steps=2"]
    with started(run_dir, *command) as run:
        assert run.process.wait(240) == 0, run.output()
    state = json.loads((run_dir / "checkpoints" / "step_00000002" / DRIVER).read_text())
    kept: Counter[str] = Counter()
    for group in state["in_flight"]:
        (text,) = {text for one in group["responses"] for text in prompts_in(one)} or {""}
        kept[text] += sum(one["is_finished"] for one in group["responses"])
    begun = (run_dir / "begun.txt").read_text().splitlines()
    with started(run_dir, *command, "trainer.total_steps=4") as run:
        run.ended()
        rows = run.metrics()
    assert [row["actor/first_log_ratio_max"] for row in rows[1:]] == [0.0] * 4
    found = [row["rollout/log_prob_diff_mean"] for row in rows[1:]]  # null: no token is so young
    assert 0 < max(diff for diff in found if diff is not None) < 1e-4
    again = Counter((run_dir / "begun.txt").read_text().splitlines()[len(begun) :])
    assert len(kept) > 1 and sum(kept.values()) > 0
    for text, finished in kept.items():
        assert not text or again[text] == 4 - finished, text
    lags = [row["partial/version_lag_max"] for row in rows[1:]]
    assert max(lags) >= 1 and all(lag <= 2 for lag in lags)
    assert max(row["partial/continued_responses"] for row in rows[1:]) > 0


def prompts_in(response: dict) -> set[str]:
    """The problem of an ended episode, as the program notes it."""
    sequences = response["episode"]["sequences"] if response["is_finished"] else []
    return {repr(one["text"].partition("<|assistant|>")[0] + "<|assistant|>") for one in sequences}


@pytest.mark.slow
@pytest.mark.parametrize("judge", [None, "judge.py:score"])
def test_a_command_trains(tmp_path, judge):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "agent.py").write_text(COMMAND)
    (run_dir / "judge.py").write_text(JUDGE)
    own = ["environment=agent_command", f"agent.args.command=[{sys.executable},{run_dir}/agent.py]"]
    own += [f"agent.args.reward.function={judge}"] if judge else []
    with started(run_dir, *RECIPE, *own) as run:
        run.ended()
        rows = run.metrics()
    assert_trained(rows)
    assert rows[1]["reward/failed"] == 0.0 and rows[1]["rollout/turns_mean"] == 1.0
    least = 2.0 if judge else 0.0
    assert least < rows[1]["reward/mean"] < least + 1


def assert_served(*arguments: str) -> None:
    """Check that `hybridrl serve` answers, and refuses what training would refuse."""
    command = [sys.executable, "-m", "hybridrl.cli", "serve", *arguments, "hardware=cpu"]
    with subprocess.Popen([*command, "--key", "mine"], stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        line = next(line for line in served.stdout if "OPENAI_BASE_URL" in line)
        url = re.search(r"http://127.0.0.1:\d+/v1", line)[0]
        client = openai.OpenAI(base_url=url, api_key="mine", max_retries=0, timeout=60)
        asked = {"model": "policy", "messages": [{"role": "user", "content": "3 + 4?"}]}
        assert client.chat.completions.create(**asked, max_tokens=20).choices
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(**asked, temperature=0.3)
        served.terminate()
    assert served.returncode == 143


@pytest.mark.slow
def test_a_model_is_served_as_it_would_be_trained():
    assert_served("embedded")


@pytest.mark.slow
def test_the_page_on_agents_trains_as_written(tmp_path):
    page = (ROOT / "docs" / "agents.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    command = next(line for line in page.splitlines() if "environment=agent agent.function" in line)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "agent.py").write_text(code)
    overrides = command.split()[3:]
    with started(run_dir, *overrides, *SMALL[2:], "eval.greedy=false") as run:
        output = run.output()
        assert run.process.returncode == 0, output
        rows = run.metrics()
    assert_trained(rows)
    for row in rows[1:]:
        assert 1.0 < row["rollout/turns_mean"] < 2.0 and row["reward/std"] > 0.0
        assert row["agent/branches"] == row["reward/failed"] == 0.0
    assert_served(str(run_dir))  # without the program, of which nothing runs
