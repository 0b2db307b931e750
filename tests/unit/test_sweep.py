"""A sweep's table when results are missing or broken: one job's loss is not the others'."""

import json
import os
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hybridrl.app.sweep import JobResult, SweepTable, ranked, read_results, sweep_table


def result(folder: Path, job: int) -> JobResult:
    (folder / str(job)).mkdir()
    overrides = ["+recipe=gsm8k_ppo", f"seed={job}"]
    return JobResult(job, overrides, "ok", 0.5, 60.0, str(folder / str(job)))


def test_a_result_that_cannot_be_read_is_a_failed_job_among_the_others(tmp_path):
    results = [result(tmp_path, job) for job in range(6)]
    for one in results:
        one.write()
    whole = (tmp_path / "0" / "result.json").read_bytes()
    for job, content in enumerate([whole[:40], b"{}", b"[]", b"\xff"]):
        (tmp_path / str(job) / "result.json").write_bytes(content)
    found = ranked(read_results(tmp_path, since=0.0))
    assert found[:2] == results[4:]
    assert [(r.job, r.status) for r in found[2:]] == [(job, "failed") for job in range(4)]
    assert all(r.error.startswith("result.json cannot be read: ") for r in found[2:])
    # What all others have in common is still left out.
    assert list(sweep_table(found).columns[2].cells)[:3] == ["seed=4", "seed=5", ""]


def begin(folder: Path) -> None:
    """Leave what Hydra leaves of a job that begins."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text("[]\n")


def make_old(folder: Path) -> None:
    """Have all of a folder be an hour old."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - 3600,) * 2)


def test_a_job_without_a_result_has_failed_and_the_sweep_with_it(tmp_path, capsys):
    """Lost by its launcher, or on a full disk; what an earlier sweep left is not its result."""
    for job in (0, 3):
        result(tmp_path, job).write()
        make_old(tmp_path / str(job))
    begin(tmp_path / "4")
    make_old(tmp_path / "4")
    table = SweepTable()
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    table.on_multirun_start(config)
    begin(tmp_path / "0")
    result(tmp_path, 1).write()
    (tmp_path / "2").mkdir()
    begin(tmp_path / "seed=4" / "lr=1")
    with pytest.raises(SystemExit) as raised:
        table.on_multirun_end(config)
    assert raised.value.code == 1
    rows = json.loads((tmp_path / "sweep.json").read_text())
    assert [(row["job"], row["status"], row["error"]) for row in rows] == [
        (1, "ok", ""),
        (-1, "failed", "left no result.json in seed=4/lr=1"),
        (0, "failed", "left no result.json in 0"),
        (2, "failed", "left no result.json in 2"),
    ]
    assert "left no result.json" in capsys.readouterr().out


def test_a_result_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path, caplog):
    lost = result(tmp_path, 0)
    (tmp_path / "0" / "result.json").mkdir()  # in the way
    lost.write()
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["result.json"]
    assert "result.json" in caplog.text and "could not be written" in caplog.text


def test_a_table_that_cannot_be_written_is_shown(tmp_path, capsys):
    result(tmp_path, 0).write()
    (tmp_path / "sweep.json").mkdir()  # in the way
    table = SweepTable()
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    table.on_multirun_start(config)
    table.on_multirun_end(config)
    shown = capsys.readouterr().out
    assert "0.5000" in shown and "sweep.json could not be written" in shown
    assert "Written to" not in shown


def test_the_table_is_written_best_first(tmp_path, capsys):
    for job in range(2):
        result(tmp_path, job).write()
    table = SweepTable()
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    table.on_multirun_start(config)
    table.on_multirun_end(config)
    assert [row["job"] for row in json.loads((tmp_path / "sweep.json").read_text())] == [0, 1]
    assert f"Written to {tmp_path / 'sweep.json'}" in capsys.readouterr().out.replace("\n", "")
