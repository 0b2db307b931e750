"""Report of runs without a browser: size, thinning, damaged files, overview, command."""

import base64
import gzip
import json
import math
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from hybridrl.app.observers import Start
from hybridrl.commands.report import report
from hybridrl.commands.running import UsageError
from hybridrl.data.sources.prompts import PromptSets
from hybridrl.health.checks import CHECKS
from hybridrl.health.measures import MarkedTokens
from hybridrl.health.observer import HealthChecks
from hybridrl.report.overview import LOG_LINES, _command, findings, overview
from hybridrl.report.page import find_folders, write_at_end, write_report
from hybridrl.report.read import MAX_POINTS, read_run, series, thinned
from hybridrl.trainer.record import StepRecord
from hybridrl.trainer.tracking.tracker import read_metrics
from tests.support.run_configs import run_config
from tests.support.run_folders import write_lines, write_run


def packed(page: Path, name: str) -> str:
    match = re.search(rf'id="{name}">([^<]*)<', page.read_text())
    assert match
    return gzip.decompress(base64.b64decode(match[1])).decode()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "run", 40, prompts=16)


def test_a_report_keeps_to_its_size_and_names_what_it_left_out(run, tmp_path):
    whole = write_report([run], tmp_path / "whole.html")
    size = whole.stat().st_size
    small = write_report([run], tmp_path / "small.html", size - 50_000)
    assert small.stat().st_size < size - 50_000
    [everything] = json.loads(packed(whole, "data"))["runs"]
    [thinned] = json.loads(packed(small, "data"))["runs"]
    assert everything["notes"] == []
    assert len(everything["responses"]) == 4 * (16 * 8 + 2 * 16)
    left = len(thinned["responses"])
    assert (
        left < 640 and f"Responses: {left} of 640; the folder has all of them." in small.read_text()
    )
    assert {record["step"] for record in thinned["responses"]} == {10, 20, 30, 40}
    assert packed(small, "plotly").lstrip().startswith("/**")
    assert "src=" not in re.sub(r">[^<]{9999,}<", "", small.read_text())


def test_images_of_prompts_are_shown_and_leave_with_them(tmp_path):
    run = write_run(tmp_path / "run", 10, prompts=4)
    path = run / "rollouts" / "step_10.jsonl"
    rows = read_metrics(path)
    shown = [row | {"images": [f"{row['prompt_id']}.jpg", "absent.jpg"]} for row in rows]
    write_lines(path, shown[:-1])
    (run / "images").mkdir()
    for row in rows:
        (run / "images" / f"{row['prompt_id']}.jpg").write_bytes(b"jpeg")
    [data] = json.loads(packed(write_report([run], tmp_path / "r.html"), "data"))["runs"]
    url = f"data:image/jpeg;base64,{base64.b64encode(b'jpeg').decode()}"
    with_images = {one["prompt"] for one in data["responses"] if one["kind"] == "training"}
    names = [data["prompts"][index]["images"] for index in with_images]
    assert all(data["images"][name] == url for one in names for name in one[:1])
    assert sum(len(one) == 2 and data["images"][one[1]] == "" for one in names) == 4


@pytest.mark.slow
def test_a_thousand_steps_of_a_large_run_take_eight_megabytes(tmp_path):
    run = write_run(tmp_path / "run", 1000, words=200, tokens=500, ranks=16, others=100)
    assert write_report([run], tmp_path / "r.html").stat().st_size < 8e6
    [data] = json.loads(packed(tmp_path / "r.html", "data"))["runs"]
    assert {record["step"] for record in data["responses"]} == {*range(10, 1001, 10)}
    assert len({one["step"] for one in data["tokens"]}) >= 20


def test_the_time_of_a_resumed_run_is_that_of_its_last_start(run, tmp_path):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"earlier_starts": [{}]}))
    assert dict(overview(folder, [])["facts"])["time"] == "0:00 in steps, last start 9:20"


def test_long_runs_keep_every_nth_step_and_all_evaluations():
    rows = [{"step": s, "time/step_s": 2.0, "eval/accuracy": None} for s in range(3 * MAX_POINTS)]
    rows[1]["eval/accuracy"], rows[4]["x"] = 0.5, math.nan
    notes: list[str] = []
    found = series(rows, MAX_POINTS, notes)
    assert found["step"][:4] == [0, 1, 3, 6] and found["step"][-1] == 3 * MAX_POINTS - 1
    assert found["wall"][:3] == [2.0, 4.0, 8.0] and found["eval/accuracy"][1] == 0.5
    assert len(notes) == 1 and series(rows[:5], MAX_POINTS, notes)["x"] == [None] * 5


def test_the_overview_names_settings_results_and_warnings(run):
    rows = read_run(run, 100_000)["rows"]
    found = overview(run, rows)
    facts = dict(found["facts"])
    assert facts["state"] == "finished, 40 of 40 steps"
    assert facts["time"] == "8:32 in steps, 9:20 from start to end"
    assert facts["accuracy"] == "0.227 +- 0.040, held out, sampled, step 40"
    assert facts["data"].endswith("400 training, 16 held out; left out: 2 longer than 192 tokens")
    assert facts["git commit"] == "0123456789abcdef, with changes"
    assert facts["command"] == "hybridrl train +recipe=gsm8k_grpo"
    recipe = ("recipe", "gsm8k_grpo", "command line")
    assert found["settings"] == [recipe, ("algorithm", "grpo", "recipe")]
    assert found["log"][-2:] == [
        "[2026-01-01 10:01:02,345][hybridrl.app.launch][WARNING] - The run starts anew",
        "from step 3: restart 1",
    ]
    assert found["findings"] is None  # a run of an earlier version
    assert found["accuracies"][0] == ("greedy", "0.200 +- 0.040", "0.227 +- 0.040", "+0.027")
    # Killed before the second evaluation: there is nothing to compare.
    killed = overview(run, rows[:9])
    assert killed["accuracies"] == [] and dict(killed["facts"])["accuracy"].endswith("step 0")


def test_the_end_of_a_long_log_is_shown(tmp_path):
    (tmp_path / "main.log").write_bytes(b"damaged \xff\n" + b"line\n" * 9999 + b"the last")
    log = overview(tmp_path, [])["log"]
    assert len(log) == LOG_LINES and log[-2:] == ["line", "the last"]


def ill_run(folder: Path, steps: range, rows: list[dict[str, float]]) -> list[str]:
    """Train steps of cut responses on data with an overlap; return the warnings."""
    warnings: list[str] = []
    prompts = PromptSets([], [], [], measures={"data/overlap_fraction": 0.05})
    start = Start(run_config(), folder, rows, prompts, None, warnings.append)
    checks = HealthChecks(start, MarkedTokens(*torch.empty(2, 0, dtype=torch.int64)))
    checks.begin(lambda batch: None, str)
    if not rows:
        rows.append({"step": 0.0} | checks.first)
    for step in steps:
        record = StepRecord(step, {"response/truncated_fraction": 0.92}, None, None)
        record = checks.after(record)
        rows.append(record.metrics | {"step": float(step)})
        warnings += record.warnings
    return warnings


def test_findings_are_read_with_their_first_step_and_their_count(tmp_path):
    """As the checks write them: before the first step, and at two of ten ill ones."""
    rows: list[dict[str, float]] = []
    assert findings(tmp_path, rows) is None
    warnings = ill_run(tmp_path, range(2, 12), rows)
    assert len(warnings) == 3
    [overlap, truncated] = overview(tmp_path, rows)["findings"]
    assert overlap[:2] == ("overlap", "before the first step")
    assert overlap[2] == "5.0% of the held-out prompts are training prompts, too."
    assert truncated[:2] == ("truncated", "step 2, found in 10 of 11 steps")
    assert truncated[2].startswith("92% of the responses were cut off")
    assert truncated[3] == CHECKS["truncated"].remedy


def test_a_resumed_run_goes_on_with_the_findings_of_its_steps(tmp_path):
    rows: list[dict[str, float]] = []
    ill_run(tmp_path, range(1, 12), rows)
    lines = read_metrics(tmp_path / "health.jsonl")
    assert [(line["step"], line["check"]) for line in lines] == [
        *((None, "overlap"), (1, "truncated"), (10, "truncated"))
    ]
    assert lines[2]["times"] == 10 and lines[2]["kind"] == "warning"
    assert lines[2]["values"]["response/truncated_fraction"] == 0.92 > lines[2]["values"]["limit"]
    assert ill_run(tmp_path, range(0), rows[:5]) == []
    assert read_metrics(tmp_path / "health.jsonl") == lines[:2]
    assert len(ill_run(tmp_path, range(0), [])) == 1  # a new run in the folder
    assert read_metrics(tmp_path / "health.jsonl") == lines[:1]


def test_every_file_may_be_missing_cut_off_or_of_an_older_version(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for file in sorted(path for path in run.rglob("*") if path.is_file()):
        broken = folder / file.relative_to(run)
        content = file.read_bytes()
        for cut in (content[: len(content) // 2], b"", None):
            broken.unlink() if cut is None else broken.write_bytes(cut)
            read = read_run(folder, 100_000)
            overview(folder, read["rows"])
            thinned(read, 0.1)
        broken.write_bytes(content)
    old = {"prompt_id": 1, "prompt": "p", "question": "q", "response": "r", "score": math.nan}
    write_lines(folder / "rollouts" / "step_10.jsonl", [old | {"length": 3}])
    responses = thinned(read_run(folder, 10**6), 1.0)["responses"]
    [record] = [r for r in responses if r["step"] == 10][:1]
    assert record["score"] is None and record["truncated"] is None and record["parts"] == {}


def test_the_end_of_a_run_writes_a_report_and_never_fails(run, tmp_path, caplog, monkeypatch):
    write_at_end(tmp_path)  # nothing was started
    assert [*tmp_path.iterdir()] == []
    folder = tmp_path / "sweep" / "0"
    shutil.copytree(run, folder)
    write_at_end(tmp_path / "sweep")
    assert (tmp_path / "sweep" / "report.html").stat().st_size > 1e6
    (folder / "manifest.json").write_text('{"config": 5}')
    write_at_end(folder)
    assert "report.html could not be written" in caplog.text
    monkeypatch.setitem(sys.modules, "plotly", None)
    write_at_end(folder)
    told = f"{folder}/report.html could not be written: plotly is not installed: pip install plotly"
    assert caplog.messages[-1] == told
    assert not (folder / "report.html").exists()


def test_two_processes_may_write_the_same_report(run, tmp_path, monkeypatch):
    """The second begins and ends while the first has written its file, but not renamed it."""
    pids, replace, file = iter((1, 2)), os.replace, tmp_path / "report.html"

    def second_first(*names: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        write_report([run], file)
        replace(*names)

    monkeypatch.setattr(os, "getpid", lambda: next(pids))
    monkeypatch.setattr(os, "replace", second_first)
    assert packed(write_report([run], file), "data")
    assert [*tmp_path.iterdir()] == [file]


def test_the_command_writes_into_the_folder_or_where_it_is_told(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "sweep" / "10")
    shutil.copytree(run, tmp_path / "sweep" / "9")
    assert [path.name for path in find_folders([tmp_path])] == ["9", "10"]
    report([tmp_path / "sweep"], None)
    assert (tmp_path / "sweep" / "report.html").is_file()
    report([tmp_path / "sweep" / "9", run], tmp_path / "two.html")
    [first, second] = json.loads(packed(tmp_path / "two.html", "data"))["runs"]
    assert first["folder"].endswith("9") and second["folder"] == str(run)
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{tmp_path}/two.html, 2.")
    with pytest.raises(UsageError, match="no run in this folder"):
        report([tmp_path / "sweep" / "none"], None)
    with pytest.raises(UsageError, match="cannot be written"):
        report([run], tmp_path / "none" / "r.html")


def test_a_device_or_folder_is_not_replaced_by_a_report(run):
    for output in (Path("/dev/null"), run):
        with pytest.raises(UsageError, match="is no ordinary file"):
            report([run], output)


def test_the_command_of_a_resumed_run_has_no_quotes_of_hydra():
    """`hybridrl resume` composes with quoted paths."""
    argv = ["/x/hybridrl/main.py", "seed=2", "resume=auto", "hydra.run.dir='/a/run 1'"]
    argv += ["hydra.searchpath=['file:///conf']", "model.path='/m/b'", "hydra.run.dir='/a/run'"]
    shown = _command(argv)
    assert "model.path=/m/b" in shown and "'hydra.searchpath=[file:///conf]'" in shown
    assert "/a/run 1" in shown and shlex.split(shown)[4] == "hydra.run.dir='/a/run 1'"
