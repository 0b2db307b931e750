"""Runs by Hydra, and its plugins: Optuna draws the values, joblib and submitit start the jobs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from hybridrl.app import before_start
from hybridrl.app.runs import run_at, state_of
from hybridrl.config.command.command_line import parse_argv
from hybridrl.config.errors import raised_problems
from tests.support.composing import composed
from tests.support.deploy_stubs import IN_CI
from tests.support.run_folders import make_run

EXTRA = "pip install 'hybridrl[sweeps]'"
DRY = ["+recipe=gsm8k_grpo", "hardware=cpu", "run.dry=true", "-m"]
COUNTED_RUN = """
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback

load, seen = ConfigLoaderImpl.load_configuration, []

class Seen(Callback):
    def __getattribute__(self, name):
        if name.startswith("on_"):
            seen.append(name)
        return super().__getattribute__(name)

def counted(self, *args, **more):
    seen.append("compose")
    return load(self, *args, **more)

def run(cfg, checked):
    state = HydraConfig.get()
    assert (cfg.seed, state.job.name, state.mode.name) == (3, "main", "RUN")
    main.log.info("in %s", state.runtime.output_dir)
    return 0.5

main.run, ConfigLoaderImpl.load_configuration = run, counted
import atexit
atexit.register(lambda: print("seen", *seen))
"""
OPTUNA = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=2"]


def swept(folder: Path, *arguments: str) -> list[dict]:
    """The results of a sweep's jobs, in their order; its folder is kept, as it was there before."""
    (folder / "here").mkdir(exist_ok=True)
    call = [sys.executable, "-m", "hybridrl.main", *DRY, "hydra.sweep.dir=here", *arguments]
    done = subprocess.run(call, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Sweep, best first" in done.stdout and "setup plugin" not in done.stdout
    results = json.loads((folder / "here" / "sweep.json").read_text())
    return sorted(results, key=lambda job: job["job"])


def ended(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The end of main on the CPU with parts replaced by code."""
    script = folder / "script.py"
    script.write_text(
        "import os\nfrom pathlib import Path\nimport hybridrl.main as main\n"
        "from hybridrl.config.errors import ConfigError\n"
        f"from tests.support.run_folders import make_run\n{code}main.main()\n"
    )
    call = [sys.executable, str(script), "+recipe=gsm8k_grpo", "hardware=cpu", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    return subprocess.run(
        call, cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize(
    ("options", "times"), [([], 1), (["--config-dir=mine"], 1), (["hydra.verbose=true"], 5)]
)
def test_a_run_composes_once_and_is_as_hydra_runs_it(tmp_path, options, times):
    (tmp_path / "mine").mkdir()
    where = "runs/${hydra.job.override_dirname}"
    typed = ["actor.optim.lr=1e-5", "seed=3"]
    callback = "+hydra.callbacks.seen._target_=__main__.Seen"
    done = ended(tmp_path, COUNTED_RUN, *typed, f"hydra.run.dir='{where}'", callback, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    called = ["on_run_start", "on_job_start", "on_job_end", "on_run_end"]
    assert done.stdout.splitlines()[-1].split() == ["seen", *["compose"] * times, *called]
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "+recipe=gsm8k_grpo,actor.optim.lr=1e-5,seed=3"
    assert f"in {folder}" in done.stdout and f"in {folder}" in (folder / "main.log").read_text()
    written = {file.stem: OmegaConf.load(file) for file in (folder / ".hydra").iterdir()}
    assert written["overrides"] == ["+recipe=gsm8k_grpo", "hardware=cpu", *typed]
    assert written["config"] == composed(written["overrides"])
    assert written["hydra"].hydra.runtime.output_dir == str(folder)


def state_in(folder: Path) -> str:
    """The state of a run on disk."""
    run = run_at(folder)
    assert run is not None
    return state_of(run)


def value(job: dict, key: str) -> str:
    """A key's value in the overrides of a job."""
    (found,) = [text for text in job["overrides"] if text.startswith(f"{key}=")]
    return found.partition("=")[2]


def test_optuna_draws_from_intervals_and_choices(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason=EXTRA)
    spaces = ["actor.optim.lr=tag(log,interval(1e-6,1e-4))", "seed=range(1,3)"]
    spaces += ["rollout.temperature=interval(0.5,1.0)", "algorithm=choice(grpo,rloo)"]
    jobs = swept(tmp_path, *OPTUNA, *spaces)
    assert [(job["job"], job["status"]) for job in jobs] == [(0, "dry"), (1, "dry")]
    for job in jobs:
        assert 1e-6 <= float(value(job, "actor.optim.lr")) <= 1e-4
        assert 0.5 <= float(value(job, "rollout.temperature")) <= 1.0
        assert value(job, "algorithm") in ("grpo", "rloo")
    assert value(jobs[0], "actor.optim.lr") != value(jobs[1], "actor.optim.lr")


def test_optuna_maximises_the_accuracy(tmp_path):
    """As main calls it, with a task that returns the share of its seed instead of training."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason=EXTRA)
    script = tmp_path / "script.py"
    script.write_text(
        "import hybridrl.main as main\n"
        "main.run = lambda cfg, _: cfg.seed / 4 if cfg.seed > 1 else float('nan')\n"
        "main.main()\n"
    )
    (tmp_path / "here").mkdir()
    call = [sys.executable, str(script), *DRY, "hydra.sweep.dir=here", "hydra/sweeper=optuna"]
    call += ["hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "seed=choice(1,2,3)"]
    call += ["hydra/sweeper/sampler=grid"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    best = yaml.safe_load((tmp_path / "here" / "optimization_results.yaml").read_text())
    assert best == {"name": "optuna", "best_params": {"seed": 3}, "best_value": 0.75}


@pytest.mark.parametrize(
    "launcher", ["joblib", pytest.param("submitit_local", marks=pytest.mark.slow)]
)
def test_jobs_at_once_have_folders_of_their_own(tmp_path, launcher):
    package = f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher"
    if not (IN_CI and "submitit" in launcher):
        pytest.importorskip(package, reason=EXTRA)
    options = ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    jobs = swept(tmp_path, f"hydra/launcher={launcher}", *options, "seed=1,2")
    assert [(job["job"], job["status"]) for job in jobs] == [(0, "dry"), (1, "dry")]
    assert [value(job, "seed") for job in jobs] == ["1", "2"]
    assert len({job["directory"] for job in jobs}) == 2
    assert all(os.path.isfile(f"{job['directory']}/.hydra/config.yaml") for job in jobs)


def test_jobs_of_slurm_need_srun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(before_start, "guard_logging", lambda _: None)
    monkeypatch.setattr(before_start.shutil, "which", lambda _: None)
    line = parse_argv([*DRY, "hydra.launcher._target_=a.submitit_launcher.SlurmLauncher"])
    found = before_start.compose_line(line, guards_output=False)
    (problem,) = raised_problems(before_start.before_start, line, found, print)
    assert (problem.id, problem.key) == ("no_slurm", "hydra/launcher=submitit_slurm")
    assert [*tmp_path.iterdir()] == []


def test_a_job_that_does_not_begin_leaves_the_result_of_the_run_in_its_folder(tmp_path):
    run = make_run(tmp_path / "here" / "0", status="ok")
    shutil.rmtree(run / "checkpoints")  # with which the job would be refused
    os.utime(run / "result.json", (1, 1))
    (job,) = swept(tmp_path, "seed=1")
    assert (job["status"], job["reward"]) == ("dry", None)
    assert state_in(run) == "finished"


def test_a_sweep_that_is_interrupted_ends_with_its_table_and_report(tmp_path):
    done = ended(
        tmp_path,
        "def run(cfg, _):\n"
        "    if cfg.seed == 2:\n"
        "        os.kill(os.getpid(), 15)\n"
        "    make_run(Path('here/0'))\n"
        "    return 0.5\n"
        "main.run = run\n",
        *("-m", "seed=1,2,3", "hydra.sweep.dir=here"),
    )
    assert done.returncode == 143 and "Stopped by SIGTERM" in done.stderr
    rows = json.loads((tmp_path / "here" / "sweep.json").read_text())
    assert [(row["job"], row["status"]) for row in rows] == [(0, "ok"), (1, "stopped")]
    assert (tmp_path / "here" / "report.html").is_file()


def test_a_run_that_its_workers_refuse_has_failed(tmp_path):
    """It was not killed: its directory has a manifest, and the result says how it ended."""
    done = ended(
        tmp_path,
        "def run(cfg, _):\n"
        "    make_run(Path('here'))\n"
        "    raise ConfigError('actor.x = 1: too large')\n"
        "main.run = run\n",
        "hydra.run.dir=here",
    )
    assert done.returncode == 2 and "actor.x = 1: too large" in done.stderr
    assert state_in(tmp_path / "here") == "failed"
