"""A sweep's table when results are missing or broken: one job's loss is not the others'."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

from hybridrl.app.sweep import JobResult, ranked, read_results, show_results, sweep_table


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
    of_file = replace(found[0], overrides=["reward.function=my.py\\:f"])
    assert [*sweep_table([of_file]).columns[2].cells] == ["reward.function=my.py:f"]


def begin(folder: Path) -> None:
    """Leave what Hydra leaves of a job that begins."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text("[]\n")


def make_old(folder: Path) -> None:
    """Have all of a folder be an hour old."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - 3600,) * 2)


def test_a_job_without_a_result_has_failed(tmp_path):
    """Lost by its launcher, or on a full disk; what an earlier sweep left is not its result."""
    for job in (0, 3):
        result(tmp_path, job).write()
        make_old(tmp_path / str(job))
    begin(tmp_path / "4")
    make_old(tmp_path / "4")
    start = time.time()
    begin(tmp_path / "0")
    result(tmp_path, 1).write()
    (tmp_path / "2").mkdir()
    begin(tmp_path / "seed=4" / "lr=1")
    rows = ranked(read_results(tmp_path, start))
    assert [(row.job, row.status, row.error) for row in rows] == [
        (1, "ok", ""),
        (-1, "failed", "left no result.json in seed=4/lr=1"),
        (0, "failed", "left no result.json in 0"),
        (2, "failed", "left no result.json in 2"),
    ]


def test_a_result_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path, caplog):
    lost = result(tmp_path, 0)
    (tmp_path / "0" / "result.json").mkdir()  # in the way
    lost.write()
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["result.json"]
    assert "result.json" in caplog.text and "could not be written" in caplog.text


def test_a_table_that_cannot_be_written_is_shown(tmp_path, capsys):
    (tmp_path / "sweep.json").mkdir()  # in the way
    show_results(tmp_path, [result(tmp_path, 0)])
    shown = capsys.readouterr().out
    assert "0.500" in shown and "sweep.json could not be written" in shown
    assert "Written to" not in shown


def test_the_table_is_written_best_first(tmp_path, capsys):
    show_results(tmp_path, [result(tmp_path, job) for job in (1, 0)])
    assert [row["job"] for row in json.loads((tmp_path / "sweep.json").read_text())] == [0, 1]
    assert f"Written to {tmp_path / 'sweep.json'}" in capsys.readouterr().out.replace("\n", "")


def test_a_result_has_the_last_numbers_of_its_run(tmp_path):
    rows = [{"step": 0, "eval/accuracy": 0.5, "eval/ci95": 0.15}]
    rows += [{"step": 1, "eval/accuracy": None, "reward/mean": 0.25, "actor/kl": 0.002}]
    one = result(tmp_path, 0)
    (tmp_path / "0" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one.write()
    (read,) = read_results(tmp_path, since=0.0)
    assert read == replace(one, ci95=0.15, reward=0.25, kl=0.002)
    cells = [next(iter(column.cells)) for column in sweep_table([read]).columns]
    assert cells[3:7] == ["0.500 +- 0.150", "0.250", "0.0020", "1.0"]


def test_accuracies_that_do_not_differ_share_the_first_rank(tmp_path):
    """0.50 and 0.45 of 40 problems are the same, 0.10 is less; of 4,000 problems 0.45 is less."""
    of_40 = {0.5: 0.149, 0.45: 0.152, 0.1: 0.13}
    results = [replace(result(tmp_path, job), metric=m) for job, m in enumerate([*of_40, 0.05])]
    few = [replace(one, ci95=of_40[one.metric]) for one in results[:3]]
    table = sweep_table([*few, results[3]])
    assert [*table.columns[0].cells] == ["1", "1", "3", "4"]
    assert "2 jobs within noise of the best" in str(table.caption)
    many = sweep_table([replace(one, ci95=0.0155) for one in results[:3]])
    assert [*many.columns[0].cells] == ["1", "2", "3"] and many.caption is None


def test_numbers_of_overrides_have_three_digits_unless_jobs_would_look_the_same(tmp_path):
    def cells(*overrides):
        jobs = [JobResult(n, [o], "ok", 0.5, 1.0, "x") for n, o in enumerate(overrides)]
        return [*sweep_table(jobs).columns[2].cells]

    lrs = ["actor.optim.lr=4.294535301234567e-05", "actor.optim.lr=0.000123456789"]
    assert cells(*lrs, "seed=12345", "x=v1.23456") == [
        "actor.optim.lr=4.29e-05",
        "actor.optim.lr=0.000123",
        "seed=12345",
        "x=v1.23456",
    ]
    alike = ["actor.optim.lr=1.00012", "actor.optim.lr=1.00013"]
    assert cells(*alike) == alike
