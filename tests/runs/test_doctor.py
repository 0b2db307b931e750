"""The doctor as its user runs it: the whole program, every check, exit codes, in time."""

import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridrl.doctor.findings import CHECKS
from tests.support.namespaces import bench, need_namespaces
from tests.support.runs import SMALL

REPO = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 30.0
MODULE = (sys.executable, "-m", "hybridrl.doctor")
# The console script, and the doctor's word.
SCRIPT = (str(Path(sys.executable).with_name("hybridrl")), "doctor")


def doctor(folder, *arguments, command=MODULE, open_files=None, **variables):
    """The finished command, run in an empty folder with these variables of the environment."""

    def limit():
        if open_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

    environment = os.environ | {"PYTHONPATH": str(REPO), "NO_COLOR": "1"}
    environment.pop("RAY_ADDRESS", None)
    environment.pop("PYTHONUNBUFFERED", None)
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=280,
        preexec_fn=limit,
        check=False,
    )


def findings(output: Path) -> list[dict]:
    return json.loads((output / "doctor.json").read_text())["findings"]


def test_every_check_of_one_node_within_30_seconds(tmp_path):
    """By the console script, as a job of Slurm, whose output goes to a file line by line."""
    start = time.monotonic()
    arguments = ["+recipe=gsm8k_ppo", "doctor.minimal_training=false", "--output", "report"]
    done = doctor(tmp_path, *arguments, command=SCRIPT, SLURM_JOB_ID="77")
    assert time.monotonic() - start < TIME_LIMIT_S
    assert done.returncode == 0, done.stdout + done.stderr
    found = findings(tmp_path / "report")
    assert {finding["check"] for finding in found} == set(CHECKS)
    assert {finding["verdict"] for finding in found} <= {"ok", "warn", "skipped"}
    (terminal,) = [f for f in found if f["check"] == "host.terminal"]
    assert terminal["verdict"] == "ok" and "job 77, output line by line" in terminal["evidence"]
    assert "inputs.reward" in done.stdout and "reference answers score 1" in done.stdout
    assert done.stderr == ""


def test_what_would_fail_is_named_before_anything_is_started(tmp_path):
    done = doctor(tmp_path, "+recipe=gsm8k_ppo", "--output", "report", open_files=500)
    assert done.returncode == 2
    (failed,) = [f for f in findings(tmp_path / "report") if f["verdict"] == "fail"]
    assert failed["check"] == "host.limits"
    assert "500 files may be open" in failed["evidence"]
    assert "ulimit -n 65536" in done.stdout
    assert "stage host failed" in done.stdout


def test_a_run_looks_at_its_machine_by_itself(tmp_path):
    main = (sys.executable, "-m", "hybridrl.main")
    done = doctor(tmp_path, "+recipe=gsm8k_ppo", command=main, open_files=500)
    assert done.returncode == 2
    assert "MachineError: 1 problem of the machines" in done.stderr
    assert "host.limits on" in done.stderr and "ulimit -n 65536" in done.stderr
    assert "Traceback" not in done.stderr
    assert "-- workers" not in done.stdout


def test_a_sweep_or_another_primary_config_is_refused(tmp_path):
    done = doctor(tmp_path, "+recipe=gsm8k_ppo", "hardware=cpu", "-m", "seed=1,2")
    assert done.returncode == 2 and "-m: the doctor examines one run" in done.stderr, done.stderr
    done = doctor(tmp_path, "--config-name", "mine", "hardware=cpu")
    assert done.returncode == 2 and "--config-name mine: the doctor examines" in done.stderr


def test_a_wrong_key_is_answered_as_by_the_run(tmp_path):
    done = doctor(tmp_path, "+recipe=gsm8k_ppo", "trainer.totl_steps=3")
    assert done.returncode == 2
    assert "ConfigError: 1 problem in the config" in done.stderr
    assert "Did you mean trainer.total_steps" in done.stderr


@pytest.mark.parametrize(
    ("stage", "signum", "arguments"),
    [
        ("network", signal.SIGTERM, ["+recipe=gsm8k_ppo"]),
        pytest.param("training", signal.SIGINT, SMALL, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_doctor_reports_what_it_has_found(tmp_path, stage, signum, arguments):
    command = [sys.executable, "-u", "-m", "hybridrl.doctor", *arguments, "--output", "report"]
    environment = os.environ | {"PYTHONPATH": str(REPO), "NO_COLOR": "1"}
    environment.pop("RAY_ADDRESS", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, text=True, start_new_session=True, **pipes
    ) as running:
        seen = next(line for line in running.stdout if line == f"-- {stage}\n")
        running.send_signal(signum)
        stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 128 + signum, seen + stdout + stderr
    assert stderr == f"Stopped by {signum.name}\n"
    found = findings(tmp_path / "report")
    assert {finding["check"] for finding in found} == set(CHECKS)
    why = f"Stopped by {signum.name}"
    assert {f["evidence"] for f in found if f["check"].startswith(f"{stage}.")} == {why}
    assert "ok" in {f["verdict"] for f in found if f["check"].startswith("host.")}
    assert why in stdout


@pytest.mark.slow
def test_the_last_stage_trains_two_steps_of_the_recipe_and_leaves_nothing(tmp_path):
    """With a group of the user's own, of a run whose warm-up is longer than two steps."""
    (tmp_path / "conf" / "mine").mkdir(parents=True)
    (tmp_path / "conf" / "mine" / "own.yaml").write_text(
        "# @package _global_\ntrainer: {total_steps: 9, critic_warmup_steps: 5}\n"
    )
    longer = [given for given in SMALL if not given.startswith("trainer.total_steps=")]
    done = doctor(tmp_path, *longer, "--config-dir", "conf", "+mine=own", "--output", "report")
    assert done.returncode == 0, done.stdout + done.stderr
    (trained,) = [f for f in findings(tmp_path / "report") if f["check"] == "training.steps"]
    assert trained["verdict"] == "ok" and "step 2/2" in trained["evidence"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf", "report"]


@pytest.mark.slow
def test_a_recipe_that_cannot_train_fails_with_its_last_lines(tmp_path):
    (tmp_path / "broken.py").write_text(
        "from hybridrl.workers.actor import ActorWorker\n\n\n"
        "class Broken(ActorWorker):\n"
        "    def compute_log_probs(self, batch):\n"
        "        raise RuntimeError('no log-probs today')\n"
    )
    done = doctor(tmp_path, *SMALL, "actor.worker=broken.Broken", "--output", "report")
    assert done.returncode == 2, done.stdout + done.stderr
    (trained,) = [f for f in findings(tmp_path / "report") if f["check"] == "training.steps"]
    assert trained["verdict"] == "fail" and "no log-probs today" in trained["evidence"]


@pytest.fixture
def two_hosts():
    need_namespaces()
    with bench("10.79.1.2/24", "10.79.2.2/24") as made:
        yield made


def met(hosts, folder: Path, before: str = "true") -> tuple[int, list[dict], str]:
    """The head's exit code, findings and output of a command that every host runs, before Ray.

    Args:
        hosts: the head first.
        folder: an empty one.
        before: a shell command that makes a fault on the others, in mounts of their own.
    """
    place = f"{hosts[0].address}:29600"
    options = ["--join", place, "--nodes", str(len(hosts)), "--output", "report"]
    run = ["+recipe=gsm8k_ppo", "hardware=cpu", f"cluster.nodes={len(hosts)}"]
    run += ["cluster.gpus_per_node=1", "doctor.minimal_training=false"]
    faulty = ["unshare", "-m", "sh", "-ec", f'{before}; exec "$0" "$@"']
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment |= {"RAY_ADDRESS": "", "NO_COLOR": "1"}
    folder.mkdir()
    started = [
        host.start(
            *([] if host is hosts[0] else faulty),
            *(*MODULE, *options, *run),
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in hosts
    ]
    outputs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started[1:]] == [0] * (len(hosts) - 1), outputs
    return started[0].returncode, findings(folder / "report"), outputs[0]


@pytest.mark.slow
def test_one_command_on_two_hosts_tells_of_both_and_of_what_one_lacks(two_hosts, tmp_path):
    code, found, output = met(two_hosts, tmp_path / "sound")
    assert code == 0, output
    names = {host.name for host in two_hosts}
    assert {f["node"] for f in found if f["check"] == "host.shm"} == names
    assert {f["verdict"] for f in found} <= {"ok", "warn", "skipped"}
    assert {f["check"] for f in found} == set(CHECKS)
    assert "hybridrl doctor: 2 node(s): " in output
    code, found, output = met(
        two_hosts, tmp_path / "faulty", "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    )
    assert code == 2, output
    (failed,) = [f for f in found if f["verdict"] == "fail"]
    assert (failed["check"], failed["node"]) == ("host.shm", two_hosts[1].name)
    assert "/dev/shm has 64 MiB free of 64 MiB" in failed["evidence"]
    assert "docker run --shm-size=16g" in failed["advice"]
    assert "docker run --shm-size=16g" in output and "stage host failed" in output
