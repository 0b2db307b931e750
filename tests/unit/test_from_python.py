"""What Python sees of hybridrl without a run: exports, refusals, callbacks, signals in threads."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from setuptools.config.setupcfg import read_configuration

import hybridrl
from hybridrl import algorithms
from hybridrl.api import run as api
from hybridrl.app.observers import Callbacks
from hybridrl.app.runs import run_at, state_of
from hybridrl.config.estimators import BUILT_IN_ESTIMATORS
from hybridrl.config.policy_losses import BUILT_IN_LOSSES
from hybridrl.controller.signals import Preemption, shielded, signal_guard
from hybridrl.data.ragged import Ragged
from hybridrl.trainer.record import RunHandle, StepRecord
from tests.support.run_folders import make_run

ROOT = Path(__file__).resolve().parents[2]
DRY = ["+recipe=gsm8k_grpo", "hardware=cpu", "run.dry=true"]


def modules_after(statement: str) -> set[str]:
    """Top-level modules that a new process has imported after a statement."""
    told = (
        "; import json, sys; print(json.dumps([*{name.partition('.')[0] for name in sys.modules}]))"
    )
    out = subprocess.run([sys.executable, "-c", statement + told], capture_output=True, check=True)
    return {*json.loads(out.stdout)}


def test_an_import_is_light_and_knows_its_version():
    heavy = {"torch", "ray", "vllm", "transformers", "hydra", "omegaconf", "numpy"}
    assert not heavy & modules_after("import hybridrl; assert hybridrl.__version__")
    found = read_configuration(ROOT / "setup.cfg")["metadata"]["version"]
    assert found == hybridrl.__version__


def test_callbacks_are_written_without_torch():
    assert "torch" not in modules_after("from hybridrl import Callback, ConfigError, RunStopped")


def test_the_program_checks_a_config_before_it_imports_what_takes_seconds():
    heavy = {"torch", "ray", "vllm", "transformers", "numpy", "huggingface_hub"}
    assert not heavy & modules_after("import hybridrl.main")
    machine_checks = "import hybridrl.main, hybridrl.doctor.main"
    assert not {"torch", "ray", "vllm", "transformers"} & modules_after(machine_checks)


def test_a_thread_imports_torch_ahead_but_not_transformers():
    """Two threads cannot import transformers: one would get the module that it replaces."""
    imports = "launch.import_in_background(launch.STARTS_ON_GPU).result()"
    imported = modules_after(f"from hybridrl.app import launch; {imports}")
    assert "torch" in imported and "transformers" not in imported


def test_names_are_imported_on_first_use():
    assert {*hybridrl.__all__} <= {*dir(hybridrl)}
    assert {getattr(hybridrl, name).__name__ for name in hybridrl.__all__} == {*hybridrl.__all__}
    with pytest.raises(AttributeError, match="no attribute 'Trainee'"):
        _ = hybridrl.Trainee


def test_algorithms_export_what_a_config_may_name():
    named = {path.rpartition(".")[2] for path in (e.path for e in BUILT_IN_ESTIMATORS.values())}
    named |= {loss.path.rpartition(".")[2] for loss in BUILT_IN_LOSSES.values()}
    assert named <= {*algorithms.__all__}
    assert all(callable(getattr(algorithms, name)) for name in algorithms.__all__)
    assert not {"ray", "vllm", "transformers"} & modules_after("import hybridrl.algorithms")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (["+recipe=gsm8k_grpo", "trainer.total_stepz=2", "seed=-1"], "trainer.total_steps"),
        (["+recipe=gsm8k_grpo", "-m", "seed=1,2"], "-m: expected overrides"),
        ("+recipe=gsm8k_grop", "gsm8k_grpo"),
        ({"seed": 1}, "has only seed"),
        ([*DRY[:2], "trainer.callbacks=[json.JSONDecoder]"], "expected a subclass of hybridrl.Cal"),
        ([*DRY[:2], "hydra.run.dir=${nowhere}"], "hydra.run.dir"),
    ],
)
def test_problems_are_raised_and_change_nothing(config, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sys.stdout, sys.stderr, logging.getLogger().handlers[:]
    with pytest.raises(hybridrl.ConfigError) as found:
        hybridrl.train(config)
    assert says in str(found.value)
    assert (sys.stdout, sys.stderr, logging.getLogger().handlers) == before
    assert [*tmp_path.iterdir()] == []


def test_a_run_that_is_refused_at_its_start_leaves_no_folder(tmp_path, monkeypatch):
    refusal = Mock(side_effect=hybridrl.ConfigError("another config than the checkpoint's"))
    monkeypatch.setattr(hybridrl.api.run, "train_with_restarts", refusal)
    with pytest.raises(hybridrl.ConfigError, match="another config"):
        hybridrl.train(DRY[:2], folder=tmp_path / "runs" / "new")
    assert [*tmp_path.iterdir()] == []


def test_all_problems_are_told_together():
    with pytest.raises(hybridrl.ConfigError) as found:
        hybridrl.Trainer(["+recipe=gsm8k_grpo", "trainer.total_stepz=2", "actor.epochs=0"])
    assert len(found.value.texts) == 2


def test_a_whole_config_is_that_of_its_overrides(tmp_path, capsys):
    """A run's config, as an object or as the plain data of its manifest, gives the same plan."""
    trainer = hybridrl.Trainer([*DRY[:2], "actor.mini_batch_size=128"], folder=tmp_path / "run")
    trainer.config.run.dry = True
    plans = []
    plain = json.loads(json.dumps(hybridrl.api.run.asdict(trainer.config), default=str))
    for config in ([*DRY, "actor.mini_batch_size=128"], trainer.config, plain):
        result = hybridrl.train(config, folder=tmp_path / "run")
        assert (result.step, result.folder) == (0, tmp_path / "run")
        plans.append(capsys.readouterr().out)
    assert "128" in plans[0] and plans[1] == plans[0] == plans[2]
    assert not (tmp_path / "run").exists()


def test_a_run_of_overrides_records_the_command_that_resumes_it(tmp_path):
    """A command has neither a whole config nor callbacks, so with these there is none."""

    def command(config, *callbacks):
        return hybridrl.Trainer(config, callbacks, folder=tmp_path)._run.prepared.checked.command

    own = [*DRY[:2], "seed=7", f"--config-dir={ROOT / 'examples'}"]
    own.append("hydra.searchpath=[pkg://hydra.conf]")
    assert command(own) == {
        "overrides": own[:3],
        "directory": os.getcwd(),
        "config_dirs": [str(ROOT / "examples"), "pkg://hydra.conf"],
    }
    assert command(own, hybridrl.Callback()) == {}
    assert command(hybridrl.Trainer(own, folder=tmp_path).config) == {}


def test_a_run_resumes_where_a_link_pointed_at_its_start(tmp_path, monkeypatch):
    """The run makes outputs/latest a link to itself."""
    monkeypatch.chdir(tmp_path)
    Path("outputs/old").mkdir(parents=True)
    Path("outputs/latest").symlink_to("old")
    trainer = hybridrl.Trainer([*DRY[:2], "resume=outputs/latest"])
    assert trainer.config.resume == str(tmp_path / "outputs/old")


class Named(hybridrl.Callback):
    def on_step_end(self, trainer, step, metrics):
        raise KeyError(f"no {metrics}")


def test_a_failing_callback_is_named_with_its_own_lines():
    with pytest.raises(hybridrl.RunStopped) as found:
        observer = Callbacks([hybridrl.Callback(), Named()], RunHandle(None, None))
        observer.after(StepRecord(3, "loss", None, None))
    text = str(found.value)
    assert text.startswith(f"step 3: the callback {__name__}.Named.on_step_end failed:")
    assert 'raise KeyError(f"no {metrics}")' in text and text.endswith("KeyError: 'no loss'")
    assert "observers.py" not in text
    assert isinstance(found.value.__cause__, KeyError)


def test_a_method_that_would_never_be_called_is_refused():
    with pytest.raises(TypeError, match=r"on_log is never called.*on_step_end"):
        type("Wrong", (hybridrl.Callback,), {"on_log": lambda *_: None})


def test_outside_the_main_thread_no_signal_handler_is_installed():
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    found = []

    def look():
        with signal_guard(), Preemption(60.0), shielded():
            found.append({signum: signal.getsignal(signum) for signum in before})

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_ragged_batch_is_shown_in_one_line():
    assert repr(Ragged.from_rows([[1, 2], [3]], torch.int32)) == (
        "Ragged(2 rows, 3 values, torch.int32)"
    )


def test_a_closed_trainer_says_so(tmp_path):
    with pytest.raises(hybridrl.ConfigError, match="a dry run has no steps"):
        hybridrl.Trainer(DRY)
    trainer = hybridrl.Trainer(DRY[:2], folder=tmp_path / "run")
    trainer.close()
    with pytest.raises(RuntimeError, match="closed"):
        trainer.step()
    assert not (tmp_path / "run").exists()


def test_a_run_that_its_workers_refuse_has_failed(tmp_path, monkeypatch):
    def refuse(prepared, folder):
        make_run(folder)
        raise hybridrl.ConfigError("actor.x = 1: too large")

    monkeypatch.setattr(api, "train_with_restarts", refuse)
    with pytest.raises(hybridrl.ConfigError, match="too large"):
        hybridrl.train(DRY[:2], folder=tmp_path / "run")
    run = run_at(tmp_path / "run")
    assert run is not None and state_of(run) == "failed"


def test_a_start_that_is_interrupted_before_it_begins_leaves_the_result(tmp_path, monkeypatch):
    """A finished run would be listed as stopped."""
    folder = make_run(tmp_path / "run", status="ok")
    monkeypatch.setattr(api, "train_with_restarts", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        hybridrl.train(DRY[:2], folder=folder)
    run = run_at(folder)
    assert run is not None and state_of(run) == "finished"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_without_shards_is_refused_by_name(dtype):
    with pytest.raises(ValueError, match=f"weight is Parameter of {dtype}: expected a float32 DT"):
        hybridrl.Resharder(torch.nn.Linear(2, 2, dtype=dtype), llm=None)
