"""hydra/launcher=submitit_slurm: jobs of a sweep are Slurm jobs, here on stubs of its commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deploy_stubs import IN_CI

pytestmark = pytest.mark.full

if not IN_CI:
    pytest.importorskip("submitit", reason="pip install -e .[slurm]")

STUBS = {
    # An array of jobs: each is run here, once sbatch has answered and submitit has named its files.
    "sbatch": """
array=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$1")
cp "$1" "$STUB/script"
for ((i = 0; i <= ${array:-0}; i++)); do
  (SLURM_JOB_ID=$((100 + i)) SLURM_ARRAY_JOB_ID=100 SLURM_ARRAY_TASK_ID=$i SLURM_NTASKS=1 \\
    SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 \\
    bash "$STUB/script"; touch "$STUB/done_$i") >/dev/null 2>&1 &
done
echo "Submitted batch job 100"
""",
    "srun": """
while [[ $1 == -* ]]; do
  case $1 in --output | --error) shift 2 ;; *) shift ;; esac
done
exec "$@"
""",
    "sacct": """
echo "JobID|State|NodeList"
for i in 0 1; do
  [[ -e $STUB/done_$i ]] && state=COMPLETED || state=RUNNING
  echo "100_$i|$state|node1"
done
""",
}


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """The environment of a login node."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLURM_"))}
    return environment | {"PATH": f"{folder}:{os.environ['PATH']}", "STUB": str(tmp_path)}


def test_a_sweep_submits_an_array_and_prints_one_table(tmp_path: Path, slurm):
    call = [sys.executable, "-m", "hybridrl.main", "+recipe=gsm8k_ppo", "run.dry=true"]
    call += ["hardware=cpu", "-m", "hydra/launcher=submitit_slurm", "seed=1,2"]
    call += ["hydra.launcher.partition=gpu", "hydra.launcher.gpus_per_node=8"]
    call += ["hydra.launcher.timeout_min=1440", "hydra.sweep.dir=here"]
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        call, cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    script = (tmp_path / "script").read_text()
    for line in ("--partition=gpu", "--gpus-per-node=8", "--time=1440", "--array=0-1%2"):
        assert f"#SBATCH {line}" in script, script
    results = json.loads((tmp_path / "here" / "sweep.json").read_text())
    assert [(job["job"], job["status"]) for job in results] == [(0, "dry"), (1, "dry")]
    assert "seed=2" in done.stdout
