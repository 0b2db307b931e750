"""A run with images: what vLLM saw is what is trained, and pictures are in its records."""

import json

import pytest

from tests.support.runs import SMALL, started

# The tower is trained as well: its states in vLLM belong to the weights of each step.
CHANGES = [
    "+recipe=shapes_vision",
    "actor.train_vision=true",
    "trainer.samples_every_steps=1",
    "tracking.report=true",
    "cluster.gpus_per_node=2",
]
# Counts shapes of the task's picture, then of another; what cannot be read is refused by name.
PROGRAM = """
import base64, openai
from hybridrl.data.sources.shapes import shape_problem

async def run(task, client):
    create, messages = client.chat.completions.create, list(task.messages)
    kinds = [part["type"] for one in messages for part in one["content"] if len(part) > 1]
    assert kinds == ["image_url", "text"], kinds
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    try:
        await create(model="policy", messages=[*messages, {"role": "user", "content": [broken]}])
        raise AssertionError("a broken image was read")
    except openai.BadRequestError as error:
        assert "is of no format that Pillow reads" in str(error), error
    answer = await create(model="policy", messages=messages, max_tokens=8)
    other = shape_problem("others", len(answer.id) + len(task.messages))
    data = base64.b64encode(other["images"][0]["bytes"]).decode()
    parts = [{"type": "text", "text": "And here?"}, {"type": "image_url", "image_url": {
        "url": f"data:image/png;base64,{data}"}}]
    messages += [answer.choices[0].message, {"role": "user", "content": parts}]
    answer = await create(model="policy", messages=messages, max_tokens=8)
    return float(len(answer.choices[0].message.content) % 2)
"""


# Answers with another picture; after a third of the second turns with a placeholder as text.
ENVIRONMENT = """
import base64
from hybridrl.data.sources.shapes import shape_problem
from hybridrl.environments.base import StepResult

class Asks:
    def __init__(self, example):
        self.turn, self.number = 0, len(str(example))

    def reset(self):
        return ""

    def step(self, text):
        self.turn += 1
        if self.turn == 3:
            return StepResult("", float(len(text) % 2), True)
        if self.turn == 2 and len(text) % 3 == 0:
            return StepResult("And <|image_pad|>?", 0.0, False)
        data = shape_problem("others", self.number + self.turn + len(text))["images"][0]["bytes"]
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        picture = {"type": "image_url", "image_url": {"url": url}}
        return StepResult([{"type": "text", "text": "And here?"}, picture], 0.25, False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "partial"])
def test_an_environment_answers_with_pictures(tmp_path, schedule):
    """What vLLM saw is trained; an answer with a placeholder as text fails alone."""
    (tmp_path / "asks.py").write_text(ENVIRONMENT)
    own = ["environment=custom", f"environment.function={tmp_path / 'asks.py'}:Asks"]
    own += ["rollout.max_response_tokens=160", f"rollout.schedule={schedule}"]
    own += ["checkpoint.every_steps=1", "trainer.samples_every_steps=1"]
    with started(tmp_path / "run", *SMALL[1:], "+recipe=shapes_vision", *own) as run:
        output = run.ended(timeout=250)
        rows = run.metrics()
    assert len(rows) == 3, output
    for row in rows[1:]:
        assert row["rollout/turns_mean"] > 1.5, output
        assert row["actor/first_log_ratio_max"] == 0.0
    # With partial all tokens of step 2 may be of the weights before.
    compared = [row for row in rows[1:] if row["rollout/log_prob_diff_max"] is not None]
    for row in compared:
        assert row["rollout/log_prob_diff_mean"] < 1e-6
        assert row["rollout/log_prob_diff_max"] < 5e-5
    assert compared and any(row["reward/failed"] > 0.0 for row in rows[1:])


@pytest.mark.slow
def test_a_program_sends_pictures_in_two_turns(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    own = ["environment=agent", f"agent.function={tmp_path / 'program.py'}:run"]
    own += ["trainer.samples_every_steps=1"]
    with started(tmp_path / "run", *SMALL[1:], "+recipe=shapes_vision", *own) as run:
        output = run.ended(timeout=250)
        rows = run.metrics()
    assert len(rows) == 3, output
    for row in rows[1:]:
        assert row["reward/failed"] == 0.0, output
        assert row["agent/branches"] == 0.0, output
        assert row["actor/first_log_ratio_max"] == 0.0
        assert row["rollout/log_prob_diff_mean"] < 1e-6
        assert row["rollout/log_prob_diff_max"] < 5e-5


def test_two_steps_of_two_ranks_see_what_vllm_saw(tmp_path):
    with started(tmp_path / "run", *SMALL[1:], *CHANGES) as run:
        output = run.ended(timeout=200)
        rows = run.metrics()
    assert len(rows) == 3, output
    for row in rows[1:]:
        assert row["actor/first_log_ratio_max"] == 0.0
        assert row["rollout/log_prob_diff_max"] < 1e-3
    files = {path.name for path in (run.run_dir / "images").iterdir()}
    lines = (run.run_dir / "rollouts" / "step_2.jsonl").read_text().splitlines()
    shown = [json.loads(line)["images"] for line in lines]
    assert len({name for (name,) in shown}) == 8
    assert {name for (name,) in shown} <= files
    assert "image of the prompt, scaled down" in (run.run_dir / "report.html").read_text()
