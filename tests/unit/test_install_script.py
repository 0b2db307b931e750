"""tools/install.sh: which set it installs, by nvidia-smi, and bubblewrap; pip notes its calls."""

import os
import shutil
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
    script(tmp_path / "bin/bwrap", "true")
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


@pytest.mark.parametrize("is_there", [True, False])
def test_bubblewrap_is_installed_by_root_or_named(tmp_path, is_there):
    """`apt-get` is a script that notes its calls and makes a bwrap, if it is there."""
    folder, calls = tmp_path / "bin", tmp_path / "apt"
    script(tmp_path / "venv/bin/python", "true")
    for name in (
        "bash",
        "cat",
        "cut",
        "dirname",
        "grep",
        "rm",
        "sh",
        "sha256sum",
        "touch",
        "chmod",
    ):
        folder.mkdir(exist_ok=True)
        (folder / name).symlink_to(shutil.which(name))
    if is_there:
        lines = f'echo "$@" >> {calls}; echo "" > {folder}/bwrap; chmod +x {folder}/bwrap'
        script(folder / "apt-get", lines)
    done = subprocess.run(
        ["bash", "tools/install.sh"],
        cwd=REPO,
        env={"PATH": str(folder), "PYTHON": sys.executable, "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    if is_there and os.geteuid() == 0:
        assert calls.read_text().splitlines()[0] == "update"
        assert {"install", "bubblewrap", "libseccomp2"} <= set(calls.read_text().split())
        assert done.stderr == ""
    else:
        assert not calls.exists()
        assert "apt-get install bubblewrap" in done.stderr
