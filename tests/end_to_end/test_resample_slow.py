"""A recorded response is sampled again from its checkpoint, in a run of two engines."""

import json

import pytest
from pyarrow import parquet

from tests.end_to_end.runs import SMALL, launched, started

pytestmark = pytest.mark.slow

KEPT = ["checkpoint.every_steps=1", "trainer.samples_every_steps=1", "eval.greedy=false"]


def replayed(run_dir, response: int, code: int) -> str:
    """What `hybridrl replay` of a response of step 2 prints; it ends with the code."""
    arguments = ["replay", str(run_dir), "--step", "2", "--response", str(response)]
    with launched(run_dir, "hybridrl.cli", *arguments) as run:
        output = run.output()
    assert run.process.returncode == code, output
    return " ".join(output.split())


@pytest.mark.timeout(900)
def test_a_response_is_the_same_to_the_bit(tmp_path):
    run_dir = tmp_path / "run"
    two = ["cluster.gpus_per_node=2", "fsdp.dp_shard=2"]
    with started(run_dir, *SMALL, *two, *KEPT) as run:
        output = run.output()
        assert run.process.returncode == 0, output
    tokens = parquet.read_table(run_dir / "tokens" / "step_2.parquet")
    recorded = tokens["response"].unique().to_pylist()
    for response in recorded[:2]:
        assert "log-probs are the same to the bit" in replayed(run_dir, response, 0)
    other = next(k for k in range(32) if k not in recorded)
    lines = (run_dir / "rollouts" / "step_2.jsonl").read_text().splitlines()
    length = json.loads(lines[other])["length"]
    assert f"the same text of {length} tokens" in replayed(run_dir, other, 0)
