"""tools/install.sh: which set it installs, by nvidia-smi; pip is a script that notes its calls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
CPU_SAYS = "So the CPU set is installed. For the GPU set mend the driver and run this again.\n"


def script(file: Path, lines: str) -> None:
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text(f"#!/bin/sh\n{lines}\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("lines", "name", "says"),
    [
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'", "gpu", ""),
        ("true", "cpu", ""),
        ("echo 'No devices were found'; exit 6", "cpu", ""),
        ("echo 'NVML: mismatch'; exit 18", "cpu", f"nvidia-smi failed: NVML: mismatch\n{CPU_SAYS}"),
        ("echo 'no GPU here' >&2; exit 9", "cpu", f"nvidia-smi failed: no GPU here\n{CPU_SAYS}"),
    ],
)
def test_the_set_is_chosen_by_nvidia_smi(tmp_path, lines, name, says):
    script(tmp_path / "bin/nvidia-smi", lines)
    script(tmp_path / "venv/bin/python", f'echo "$@" >> {tmp_path}/calls')
    done = subprocess.run(
        ["bash", "tools/install.sh"],
        cwd=REPO,
        env=os.environ
        | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHON": sys.executable}
        | {"VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == says
    assert f"-r requirements/{name}.txt" in (tmp_path / "calls").read_text()
