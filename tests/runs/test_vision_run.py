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
