"""Metrics reach metrics.jsonl and TensorBoard; no tracker's failure stops or delays a run."""

import io
import json
import logging
import math
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from hybridrl.app.observers import Start
from hybridrl.controller.calls import Span
from hybridrl.data.sources.prompts import Prompt, PromptSets
from hybridrl.health.measures import MarkedTokens
from hybridrl.health.observer import HealthChecks
from hybridrl.processes.messages import Failure, FailureKind
from hybridrl.trainer.record import Responses, RolloutRecord, RunResult, StepRecord, Trained
from hybridrl.trainer.rewarding import Rewarded
from hybridrl.trainer.timing.phases import Phases
from hybridrl.trainer.timing.timeline import Timeline
from hybridrl.trainer.tracking.console import RunConsole
from hybridrl.trainer.tracking.progress import Progress
from hybridrl.trainer.tracking.records import RecordBuilder, Records
from hybridrl.trainer.tracking.rollout_log import write_rollouts
from hybridrl.trainer.tracking.sinks import MAX_WAITING, BackgroundSink, close_all
from hybridrl.trainer.tracking.tracker import PROMISED, Tracker, read_metrics
from tests.support.batches import batch_of
from tests.support.run_configs import run_config

ROOT = Path(__file__).resolve().parents[2]


TIMELINE = Timeline(Span("step", 0.0, 1.0), [])


def records_of(config, run_dir, tracker) -> Records:
    """Records without a tokenizer."""
    build = RecordBuilder(config, str, str)
    return Records(config, run_dir, build, None, str, RunConsole(1), tracker)


class Memory:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[int, dict]] = []
        self.closed = False

    def log(self, step, metrics):
        self.got.append((step, dict(metrics)))

    def close(self):
        self.closed = True


def test_each_step_is_a_line_on_disk_at_once(tmp_path):
    tracker = Tracker(tmp_path, run_config("tracking.tensorboard=false"))
    tracker.log(0, {"eval/accuracy": 0.25})
    first = json.loads((tmp_path / "metrics.jsonl").read_text())
    tracker.log(1, {"reward/mean": 0.5, "other": math.nan, "more": math.inf})
    tracker.close()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert rows == tracker.rows == [first, rows[1]]
    assert (first["step"], first["eval/accuracy"], first["reward/mean"]) == (0, 0.25, None)
    assert (rows[1]["step"], rows[1]["reward/mean"]) == (1, 0.5)
    assert (rows[1]["other"], rows[1]["more"]) == (None, None)
    assert all(name in row for row in rows for name in PROMISED)


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "rew')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0}]


@pytest.mark.parametrize("broken", [b"\0" * 9, b'{"step": 1, "re\0\0', b"\xff\xfe", b"", b"[1]"])
def test_rows_end_before_a_line_that_a_power_cut_spoilt(tmp_path, caplog, broken):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + broken + b'\n{"step": 2}\n')
    assert read_metrics(path) == [{"step": 0}]
    (record,) = caplog.records
    assert f"{path}: line 2 of 3 is damaged" in record.getMessage()


def test_tensorboard_gets_the_finite_numbers(tmp_path):
    tracker = Tracker(tmp_path, run_config())
    for step in (0, 1, 2):
        tracker.log(step, {"reward/mean": step / 2, "bad": math.nan})
    tracker.close()
    assert tracker.failures() == []
    (path,) = (tmp_path / "tensorboard").glob("events*")
    scalars = [
        (event.step, value.tag, value.tensor.float_val[0])
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag != "config/text_summary"
    ]
    assert scalars == [(0, "reward/mean", 0.0), (1, "reward/mean", 0.5), (2, "reward/mean", 1.0)]


def tensorboard_steps(folder):
    """Steps with their rewards, as TensorBoard shows them."""
    shown = EventAccumulator(str(folder / "tensorboard"))
    shown.Reload()
    return [(event.step, event.value) for event in shown.Scalars("reward/mean")]


def test_tensorboard_shows_config_and_samples(tmp_path):
    config = run_config("trainer.samples_every_steps=2", "+reward.args.api_key=hunter22")
    tracker = Tracker(tmp_path, config)
    records = records_of(config, tmp_path, tracker)
    for step in (1, 2):
        prompt = Prompt(1, [1], "<user> 1+1?", "q", {"answer": "#### 2"}, {})
        records.scored(step, Responses([prompt], batch_of([2]), Rewarded(["a\n# b"], [0.5], [])))
        tracker.log(step, {"reward/mean": 0.5})
    tracker.close()
    assert tracker.failures() == []
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    ((config_step, config_text), (step, sample)) = [
        (event.step, event.tensor_proto.string_val[0].decode())
        for name in ("config", "samples")
        for event in shown.Tensors(f"{name}/text_summary")
    ]
    assert config_step == 0 and "      api_key: '***'\n" in config_text
    assert "    trainer:\n      total_steps: " in config_text
    assert step == 2 and "**score 0.5, 2 tokens, expected #### 2**" in sample
    for tag, value in (("rewards", 0.5), ("response_lengths", 2.0)):
        (histogram,) = shown.Histograms(tag)
        found = histogram.histogram_value
        assert (histogram.step, found.num, found.min, found.max) == (2, 1, value, value)
    assert "    <user> 1+1?\n" in sample and "    a\n    # b\n" in sample


def test_tensorboard_shows_each_step_of_a_run_that_goes_on_once(tmp_path, caplog):
    """The first start got to step 5 and kept 3 of it, the second to step 4."""
    rows = []
    for steps, factor in ((range(6), 1.0), (range(4, 5), 2.0), (range(4, 7), 3.0)):
        tracker = Tracker(tmp_path, run_config(), rows)
        for step in steps:
            tracker.log(step, {"reward/mean": step * factor})
        tracker.close()
        rows = tracker.rows[:4]
    assert caplog.messages == []
    assert tensorboard_steps(tmp_path) == [
        *((step, float(step)) for step in range(4)),
        *((step, step * 3.0) for step in range(4, 7)),
    ]


def test_tensorboard_gets_what_a_kill_took_from_it(tmp_path):
    """A kill can come after a step is in metrics.jsonl and before it is in the other file."""
    tracker = Tracker(tmp_path, run_config())
    for step in range(4):
        tracker.log(step, {"reward/mean": float(step)})
    tracker.close()
    (path,) = (tmp_path / "tensorboard").glob("events*")
    data = path.read_bytes()
    path.write_bytes(data[:-10])
    assert [step for step, _ in tensorboard_steps(tmp_path)] == [0, 1, 2]
    tracker = Tracker(tmp_path, run_config(), tracker.rows)
    tracker.log(4, {"reward/mean": 4.0})
    tracker.close()
    assert tensorboard_steps(tmp_path) == [(step, float(step)) for step in range(5)]


def test_tensorboard_forgets_a_run_that_began_anew_in_its_directory(tmp_path):
    for factor in (1.0, 2.0):
        tracker = Tracker(tmp_path, run_config())
        for step in range(3):
            tracker.log(step, {"reward/mean": step * factor})
        tracker.close()
    assert tensorboard_steps(tmp_path) == [(0, 0.0), (1, 2.0), (2, 4.0)]


def test_missing_packages_are_counted_and_said_once(tmp_path, caplog, monkeypatch):
    """wandb and mlflow are extras; None in sys.modules makes their import fail anywhere."""
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    monkeypatch.setitem(__import__("sys").modules, "mlflow.tracking", None)
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    config = run_config(
        "tracking.tensorboard=false", "tracking.wandb_project=p", "tracking.mlflow_uri=sqlite://"
    )
    tracker = Tracker(tmp_path, config)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            tracker.log(step, {"reward/mean": 1.0})
        tracker.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    wandb, mlflow = tracker.failures()
    # Three steps and the closing.
    assert wandb.startswith("W&B failed 4 times: ModuleNotFoundError")
    assert mlflow.startswith("MLflow failed 4 times: ModuleNotFoundError")
    assert len(caplog.records) == 2


def test_sink_gets_everything_in_order_and_is_closed():
    memory = Memory()
    sink = BackgroundSink("memory", lambda: memory)
    for step in range(50):
        sink.log(step, {"x": float(step)})
    close_all([sink], timeout_s=10)
    assert memory.got == [(step, {"x": float(step)}) for step in range(50)]
    assert memory.closed
    assert sink.failures == 0


def test_one_failing_call_loses_only_its_step():
    class Moody(Memory):
        def log(self, step, metrics):
            if step == 1:
                raise ConnectionError("no route\nto host")
            super().log(step, metrics)

    memory = Moody()
    sink = BackgroundSink("moody", lambda: memory)
    for step in range(3):
        sink.log(step, {})
    close_all([sink], timeout_s=10)
    assert [step for step, _ in memory.got] == [0, 2]
    assert (sink.failures, sink.reason) == (1, "ConnectionError: no route")


def test_hanging_tracker_neither_delays_steps_nor_the_end(caplog):
    release = threading.Event()

    class Hanging(Memory):
        def log(self, step, metrics):
            release.wait(30)

    sink = BackgroundSink("hanging", Hanging)
    start = time.monotonic()
    for step in range(MAX_WAITING + 5):
        sink.log(step, {})
    close_all([sink], timeout_s=0.2)
    assert time.monotonic() - start < 5
    # Five steps found no room, and the end did not come in time.
    assert sink.failures == 6
    assert len(caplog.records) == 1
    release.set()


def test_rollouts_are_one_json_object_a_line(tmp_path):
    record = RolloutRecord(7, "<|user|>1+1?", "1+1?", "zwei, \u00e9", "2", 0.5, 4)
    path = write_rollouts(tmp_path, 3, [record, record])
    assert path == tmp_path / "rollouts" / "step_3.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0]) == {
        "prompt_id": 7,
        "prompt": "<|user|>1+1?",
        "question": "1+1?",
        "response": "zwei, \u00e9",
        "answer": "2",
        "score": 0.5,
        "length": 4,
        "failure": None,
        "truncated": False,
        "parts": {},
        "turns": None,
        "weight_version": 0,
    }


def test_kept_rollouts_tell_of_failed_rewards_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "xq7Zp0-unlikely")
    args = "+reward.args={api_key: hunter22, server: 'https://me:pw@host/x'}"
    config = run_config("tracking.tensorboard=false", "trainer.samples_every_steps=1", args)
    tracker = Tracker(tmp_path, config)
    reason = "ValueError: hunter22, xq7Zp0-unlikely, https://me:pw@host/x"
    rewarded = Rewarded(["r hunter22"], [0.0], [Failure(0, FailureKind.error, reason, "")])
    prompt = Prompt(1, [1], "p", "q", {"answer": "2"}, {})
    records = records_of(config, tmp_path, tracker)
    records.scored(1, Responses([prompt], batch_of([1]), rewarded))
    tracker.close()
    (kept,) = read_metrics(tmp_path / "rollouts" / "step_1.jsonl")
    assert kept["failure"] == "error: ValueError: ***, ***, https://***@host/x"
    assert kept["response"] == "r hunter22"  # what the model has sampled stays what it is


def test_each_problem_whose_rewards_fail_is_named_once_with_its_row(tmp_path):
    """Problem p stands in line p; its two responses fail where p is in `failing`."""
    nothing = torch.empty(0, dtype=torch.int64)
    tokens = MarkedTokens(nothing, nothing)
    start = Start(run_config(), tmp_path, [], PromptSets([], [], []), None, print)
    health = HealthChecks(start, tokens)
    health.begin(lambda batch: None, str)
    named = []
    for step, failing in enumerate([{1, 2}, {2, 3}, {4, 5, 6, 7}, {7}, {7}]):
        prompts = [
            Prompt(p, [1], "p", "q", {"answer": ""}, {}, where=f"a.jsonl:{p}") for p in range(8)
        ]
        prompts = [prompt for prompt in prompts for _ in range(2)]
        failures = [
            Failure(i, FailureKind.error, f"ValueError: no {prompt.prompt_id}", "")
            for i, prompt in enumerate(prompts)
            if prompt.prompt_id in failing
        ]
        rewarded = Rewarded(["r"] * 16, [0.0] * 16, failures)
        batch = batch_of([1] * 16)
        batch = batch.adding(old_log_probs=batch.rollout_log_probs)
        trained = Trained(batch, {}, Responses(prompts, batch, rewarded))
        metrics = {"reward/failed": float(len(failures))}
        warnings = health.after(StepRecord(step, metrics, trained, TIMELINE)).warnings
        named.append(re.findall(r"a\.jsonl:(\d): ValueError: no \1", "".join(warnings)))
    assert named == [["1", "2"], ["3"], ["4", "5", "6"], ["7"], []]


@pytest.mark.parametrize("failed", [0, 2])
def test_the_end_of_a_run_tells_of_checkpoints_that_were_lost(tmp_path, failed):
    """The last one is written after the last row."""
    config = run_config("tracking.tensorboard=false")
    tracker, file = Tracker(tmp_path, config), io.StringIO()
    console = RunConsole(1, Console(file=file))
    progress = Progress(config, console, tracker, list, lambda: failed)
    progress.after(StepRecord(1, {"checkpoint/failed": 0.0}, None, TIMELINE))
    progress.end(RunResult(0.0, tmp_path, 1, {}))
    tracker.close()
    told = re.search(r"checkpoints +(\d+) lost", file.getvalue())
    assert (told and int(told[1])) == (failed or None)


def test_phases_add_up_within_a_step_and_start_anew():
    entered = []
    phases = Phases(lambda: [], entered.append)
    with phases.step():
        for _ in range(2):
            with phases.section("rollout"):
                time.sleep(0.01)
        with phases.section("reward"):
            pass
    metrics = phases.metrics()
    assert entered == ["rollout", "rollout", "reward"]
    assert 0.02 <= metrics["time/rollout_s"] <= metrics["time/step_s"]
    with phases.step():
        pass
    assert phases.metrics().keys() == {"time/step_s"}
    assert phases.seconds("rollout") == 0.0


WITHOUT_EXTRAS = """
import logging, sys
from pathlib import Path
sys.modules.update(dict.fromkeys(["tensorboard", "peft", "math_verify"]))
import hybridrl.main
from hybridrl.config.checks.resources import package_problems
from hybridrl.distributed.storage import export
from hybridrl.trainer.tracking.tracker import Tracker
from tests.support.run_configs import run_config
logging.basicConfig(level=logging.INFO, format="%(message)s")
folder = Path(sys.argv[1])
config = run_config("tracking.tensorboard=false")
assert list(package_problems(config)) == []
tracker = Tracker(folder, config)
tracker.log(0, {"reward/mean": 1.0})
tracker.close()
print(*package_problems(run_config()))
"""


def test_a_run_needs_none_of_the_extras(tmp_path):
    """None in sys.modules makes an import fail as that of a package that is not installed."""
    command = [sys.executable, "-c", WITHOUT_EXTRAS, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    assert "set tracking.tensorboard=false" in done.stdout
    names = ["metrics.jsonl", "timeline.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
