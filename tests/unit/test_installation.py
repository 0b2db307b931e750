"""What is installed decides whether vLLM can run; distributions here are folders of metadata."""

import configparser
import logging
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from hybridrl.config.checks import installation
from hybridrl.config.checks.installation import OLDEST_RAY, check_installation
from hybridrl.config.choices import Accelerator
from hybridrl.config.errors import raised_problems


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Put a distribution's metadata before all others on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name, version):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )

    return install


def test_this_installation_is_fine():
    accelerator = Accelerator.gpu if torch.cuda.is_available() else Accelerator.cpu
    assert check_installation(accelerator)[0].isdigit()


@pytest.mark.parametrize("version", ["0.24.0", "0.34.1", "1.2.0"])
def test_another_generation_is_refused(installed, version):
    installed("vllm", version)
    (problem,) = raised_problems(check_installation, Accelerator.cpu)
    assert (problem.id, problem.value) == ("vllm", version)
    assert "pinned in requirements/" in problem.remedy


def test_no_vllm_is_refused(monkeypatch):
    version = installation._version
    monkeypatch.setattr(installation, "_version", lambda n: None if "vllm" in n else version(n))
    (problem,) = raised_problems(check_installation, Accelerator.cpu)
    assert problem.id == "no_vllm" and "requirements/" in problem.remedy


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0+cu130"])
def test_another_torch_is_refused(installed, version):
    installed("torch", version)
    (problem,) = raised_problems(check_installation, Accelerator.cpu)
    assert (problem.id, problem.value) == ("torch", version)
    assert problem.expected and "pinned in requirements/" in problem.remedy


@pytest.mark.parametrize(
    ("version", "sleep", "options", "refused"),
    [
        ("0.32.0", "kv_cache", {}, [("kv_cache_sleep", "all or none with vllm 0.32.0")]),
        ("0.32.0", "all", {"exact": True}, [("exact_version", "false with vllm 0.32.0")]),
        ("0.32.0", "all", {"weights": "fp8"}, [("fp8_version", "dtype with vllm 0.32.0")]),
        ("0.33.0", "kv_cache", {"exact": True, "weights": "fp8"}, []),
        ("0.32.0", "all", {}, []),
    ],
)
def test_what_older_releases_lack_is_refused(installed, version, sleep, options, refused):
    installed("vllm", version)
    check = partial(check_installation, **options)
    problems = raised_problems(check, Accelerator.gpu, sleep)
    assert [(p.id, p.expected) for p in problems] == refused


def test_a_neighbouring_version_is_called_untested(installed, caplog):
    installed("vllm", "0.28.1")
    with caplog.at_level(logging.WARNING):
        assert check_installation(Accelerator.cpu) == "0.28.1"
    assert "vllm 0.28.1 is untested on cpu; tested: 0.30.0, 0.31.0, 0.32.0\n" in caplog.text


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch")
def test_a_cuda_companion_of_a_cpu_torch_is_refused(installed, name):
    installed(name, "0.28.0")
    (problem,) = raised_problems(check_installation, Accelerator.cpu)
    assert problem.id == "cuda_build" and f"pip uninstall {name}" in problem.remedy


def test_a_cpu_companion_is_fine(installed):
    installed("torchvision", "0.28.0+cpu")
    check_installation(Accelerator.cpu)


def test_the_oldest_ray_is_the_one_that_the_package_asks_for():
    config = configparser.ConfigParser()
    config.read(Path(__file__).parents[2] / "setup.cfg")
    asked = re.search(r"^ray>=(\d+)\.(\d+)", config["options"]["install_requires"], re.MULTILINE)
    assert asked is not None and tuple(map(int, asked.groups())) == OLDEST_RAY
