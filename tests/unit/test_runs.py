"""`hybridrl runs` and `hybridrl resume` without a run: what they find, print, and pass on."""

import fcntl
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybridrl.app.folders import claim, kept_unless_begun, link_latest
from hybridrl.app.runs import find_runs, run_at, state_of
from hybridrl.commands.resume import arguments, find_run
from hybridrl.commands.running import UsageError
from hybridrl.commands.runs import list_runs
from tests.support.run_folders import make_run


def test_runs_are_listed_newest_first_with_what_is_known(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(Path("outputs/a"), "09:00", "ok")
    sweep = f"multirun/{'sweep' * 50}"
    make_run(Path(sweep), "11:00", "failed", run="[other]")
    (tmp_path / "outputs/latest").symlink_to("a")
    make_run(Path("outputs/b"), "10:00", "stopped", config={"trainer": {"total_steps": 700}})
    (tmp_path / "outputs/b/metrics.jsonl").unlink()
    list_runs([])
    title, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert title == ["name", "started", "step", "accuracy", "state", "path"]
    assert [row[0] for row in rows] == ["[other]", "mine", "mine"]
    assert [row[-1] for row in rows] == [sweep, "outputs/b", "outputs/a"]
    assert [row[-2] for row in rows] == ["failed", "stopped", "finished"]
    assert rows[0][3:9] == ["2", "of", "5", "0.500", "+-", "0.125"]
    assert rows[1][3:7] == ["-", "of", "700", "-"]


def test_the_state_is_known_from_lock_and_result(tmp_path):
    def state(name: str, **facts: str) -> str:
        run = run_at(make_run(tmp_path / name, **facts))
        assert run is not None
        return state_of(run)

    assert state("killed") == "killed"
    assert state("elsewhere", lock="process 1 on another\n") == "unknown"
    assert state("without", lock="") == "unknown"
    folder = make_run(tmp_path / "copied", status="stopped")
    os.utime(folder / "result.json", (1, 1))
    run = run_at(folder)
    assert run is not None and state_of(run) == "stopped"
    with (folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state_of(run) == "running"


def test_no_runs_and_no_folder_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no runs in outputs/ and multirun/"):
        list_runs([])
    with pytest.raises(UsageError, match="nowhere: there is no such folder"):
        list_runs([Path("nowhere")])
    (tmp_path / "outputs" / "x").mkdir(parents=True)
    (tmp_path / "outputs" / "x" / "manifest.json").write_text("{")
    assert find_runs([tmp_path]) == []


def test_a_run_is_found_by_folder_name_and_as_the_latest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(["one", "two", "two"]):
        make_run(Path(f"outputs/{number}"), f"1{number}:00", run=name)
    assert find_run("latest").folder == Path("outputs/2")
    assert find_run("one").folder == Path("outputs/0")
    assert find_run("outputs/1").folder == tmp_path / "outputs/1"
    (tmp_path / "outputs/latest").symlink_to("1")
    assert find_run("outputs/latest").folder == tmp_path / "outputs/1"
    with pytest.raises(UsageError, match=r"2 runs have this name:\n.*outputs/2\n.*outputs/1"):
        find_run("two")
    with pytest.raises(UsageError, match="three: no run has this folder or name"):
        find_run("three")
    with pytest.raises(UsageError, match="expected a run, this is inside one"):
        find_run("outputs/0/checkpoints/step_00000002")


def test_a_resume_is_the_runs_own_command_with_changes(tmp_path):
    own = ["+recipe=x", "trainer.total_steps=5", "resume=auto", "+tag=a"]
    own += ["hardware=cpu", "hardware.reason='found here'", "model.path=outputs/latest"]
    config = {"trainer": {"total_steps": 5}, "model": {"path": "/outputs/old"}}
    dirs = ["/my conf", "pkg://my.conf"]
    folder = make_run(tmp_path / "run", overrides=own, config_dirs=dirs, config=config)
    run = run_at(folder)
    assert run is not None
    assert arguments(run, ["trainer.total_steps=9", "tag=b"]) == [
        *("+recipe=x", "model.path='/outputs/old'"),
        *("trainer.total_steps=9", "tag=b", "resume=auto"),
        *(f"hydra.run.dir='{folder}'", "hydra.searchpath=['file:///my conf','pkg://my.conf']"),
    ]
    with pytest.raises(UsageError, match="a run is resumed in its folder"):
        arguments(run, ["hydra.run.dir=/another"])


def test_a_resume_before_the_first_checkpoint_begins_where_the_run_began(tmp_path):
    folder = make_run(tmp_path / "run", overrides=["seed=1"], resumed_from="/a/step_00000020")
    run = run_at(folder)
    assert run is not None and arguments(run, [])[1] == "resume=auto"
    shutil.rmtree(folder / "checkpoints")
    assert arguments(run, [])[1] == "resume='/a/step_00000020'"


def test_a_resume_needs_the_command_and_its_secrets(tmp_path):
    hidden = ["+judge.api_key=***", "seed=1"]
    run = run_at(make_run(tmp_path / "run", overrides=hidden))
    assert run is not None
    with pytest.raises(UsageError, match=r"records no secrets.\n.*Add \+judge.api_key=<value>"):
        arguments(run, [])
    assert arguments(run, ["+judge.api_key=x"])[:2] == ["seed=1", "+judge.api_key=x"]
    manifest = {name: value for name, value in run.manifest.items() if name != "overrides"}
    (run.folder / "manifest.json").write_text(json.dumps(manifest))
    run = run_at(run.folder)
    assert run is not None
    with pytest.raises(UsageError, match=f"resume=auto hydra.run.dir={run.folder}"):
        arguments(run, [])


def test_starts_at_the_same_moment_get_folders_of_their_own(tmp_path):
    wanted = tmp_path / "outputs" / "mine" / "now"
    with ThreadPoolExecutor(8) as pool:
        claims = [*pool.map(lambda _: claim(wanted, is_new=True), range(8))]
    names = ["now", *(f"now_{number}" for number in range(2, 9))]
    assert sorted(found.folder.name for found in claims) == names
    assert claim(wanted, is_new=False).folder == wanted


def test_what_a_refused_run_made_is_removed_and_nothing_else(tmp_path):
    first = claim(tmp_path / "outputs" / "mine" / "now", is_new=True)
    second = claim(tmp_path / "outputs" / "mine" / "now", is_new=True)
    (second.folder / ".hydra").mkdir()
    (second.folder / ".lock").write_text("")
    second.release(".hydra")
    assert [path.name for path in (tmp_path / "outputs/mine").iterdir()] == ["now"]
    (first.folder / "metrics.jsonl").write_text("")
    first.release(".hydra")
    assert (first.folder / "metrics.jsonl").exists()
    (first.folder / "metrics.jsonl").unlink()
    first.release()
    assert list(tmp_path.iterdir()) == []
    given = claim(tmp_path, is_new=False)
    given.release()
    assert tmp_path.is_dir()


@pytest.mark.parametrize("begins", [False, True])
def test_hydras_files_are_of_the_run_that_began_last(tmp_path, begins):
    folder = make_run(tmp_path / "run")
    file = folder / ".hydra" / "config.yaml"
    file.parent.mkdir()
    file.write_text("seed: 1")
    with pytest.raises(SystemExit), kept_unless_begun(folder):
        file.write_text("seed: 2")
        if begins:
            shutil.rmtree(folder / "checkpoints")
            make_run(folder, "11:00")
        raise SystemExit(2)
    assert file.read_text() == ("seed: 2" if begins else "seed: 1")


def test_the_latest_run_in_outputs_has_a_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "outputs" / "mine" / name).mkdir(parents=True)
        link_latest(Path("outputs/mine") / name)
    assert os.readlink("outputs/latest") == "mine/b"
    assert sorted(os.listdir("outputs")) == ["latest", "mine"]
    (tmp_path / "elsewhere").mkdir()
    link_latest(Path("elsewhere"))
    assert os.readlink("outputs/latest") == "mine/b"
    Path("outputs/latest").unlink()
    Path("outputs/latest").mkdir()  # a run of that name
    link_latest(Path("outputs/mine/a"))
    assert Path("outputs/latest").is_dir() and not Path("outputs/latest").is_symlink()
