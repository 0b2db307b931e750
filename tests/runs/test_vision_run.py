"""A run with images: what vLLM saw is what is trained, and pictures are in its records."""

import json

from tests.support.runs import SMALL, started

# The tower is trained as well: its states in vLLM belong to the weights of each step.
CHANGES = [
    "+recipe=shapes_vision",
    "actor.train_vision=true",
    "trainer.samples_every_steps=1",
    "tracking.report=true",
    "cluster.gpus_per_node=2",
]


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
