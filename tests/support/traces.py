"""What the traces of a profiled step must hold."""

import gzip
import json

import pytest

from tests.support.runs import Run

# Of a run's last step, which ends with a checkpoint.
CALLS = {
    "rollout.reshard",
    "rollout.generate",
    "rollout.sleep",
    "actor.compute_log_probs",
    "critic.compute_values",
    "ref.compute_log_probs",
    "critic.update",
    "actor.update",
    "saver.note_generators",
    "saver.begin_save",
}


def assert_traces(run: Run, step: int, num_ranks: int) -> None:
    """Traces of the last step alone: rows for driver and ranks, calls as long as torch saw them."""
    names = {f"phases_step_{step}.json"}
    names |= {f"step_{step}_rank{rank}.json.gz" for rank in range(num_ranks)}
    folder = run.run_dir / "profile"
    assert {path.name for path in folder.iterdir()} == names
    events = json.loads((folder / f"phases_step_{step}.json").read_text())["traceEvents"]
    rows = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert rows == ["driver", *[f"rank {rank}" for rank in range(num_ranks)]]
    (whole,) = [e for e in events if e["name"] == "step"]
    row = run.metrics()[step]
    assert whole["dur"] / 1e6 == pytest.approx(row["time/step_s"])
    for rank in range(num_ranks):
        calls = [e for e in events if e["ph"] == "X" and e["tid"] == rank + 1]
        assert {call["name"] for call in calls} == CALLS
        assert all(e["ts"] >= 0 and e["ts"] + e["dur"] <= whole["dur"] + 1e4 for e in calls)
        busy = sum(call["dur"] for call in calls) / 1e6
        assert row[f"idle/rank{rank}_s"] == pytest.approx(row["time/step_s"] - busy)
        _assert_as_torch_saw_it(folder / f"step_{step}_rank{rank}.json.gz", calls)


def _assert_as_torch_saw_it(path, calls) -> None:
    with gzip.open(path) as file:
        seen = [e for e in json.load(file)["traceEvents"] if e.get("name") in CALLS]
    durations = {name: [] for name in CALLS}
    for event in seen:
        durations[event["name"]].append(event["dur"])
    for call in calls:
        nearest = min(abs(call["dur"] - other) for other in durations[call["name"]])
        assert nearest < 5e4, f"{call['name']}: {call['dur']} us, torch saw {durations}"
