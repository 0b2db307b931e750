"""A Ray that is missing, or older than this package knows: the run and the doctor say so."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
OVERRIDES = ["+recipe=gsm8k_ppo", "hardware=cpu"]
RUN = ["hybridrl.main", *OVERRIDES]
NEEDS = "is installed; this package needs 2.60 or newer"
NOBODY = "127.0.0.1:1"
NODE = "import hybridrl.doctor.main as m, sys; m.serve(sys.argv[1], 30)"
HEAD = """
import sys
import hybridrl.doctor.main
from hybridrl.doctor.joined import joined_probes
from hybridrl.doctor.ray import examine

with joined_probes(sys.argv[1], 2, 30) as agents:
    for finding in examine(agents, 2):
        print(finding.check, finding.verdict.value, finding.evidence)
"""


class Python(NamedTuple):
    """An installation: its interpreter and what it finds modules by."""

    executable: str
    path: str

    def run(self, *arguments, folder, **variables):
        """Run it to its end in a folder; Ray's variables are those given."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return subprocess.run(
            [self.executable, *arguments],
            env=clean | {"PYTHONPATH": self.path} | variables,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.fixture(scope="module")
def without_ray(tmp_path_factory) -> Python:
    """A Python with everything that is installed here but Ray."""
    folder = tmp_path_factory.mktemp("none")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for installed in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(installed).iterdir():
            if entry.name.partition("-")[0] != "ray" and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    return Python(str(folder / "bin" / "python"), str(ROOT))


@pytest.fixture(scope="module")
def with_old_ray(tmp_path_factory) -> Python:
    """This Python with a Ray before the others that has no name which this package imports."""
    folder = tmp_path_factory.mktemp("old")
    (folder / "ray").mkdir()
    (folder / "ray" / "__init__.py").write_text('__version__ = "2.40.0"\n')
    (folder / "ray" / "_raylet.py").write_text("")
    metadata = folder / "ray-2.40.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.40.0\n")
    return Python(sys.executable, f"{folder}:{ROOT}")


def test_a_run_without_ray_says_so(without_ray, tmp_path):
    assert_refused(without_ray.run("-m", *RUN, folder=tmp_path), f"no Ray {NEEDS}")


def test_a_run_with_an_older_ray_says_so_before_it_joins_a_cluster(with_old_ray, tmp_path):
    done = with_old_ray.run("-m", *RUN, folder=tmp_path, RAY_ADDRESS=NOBODY)
    assert_refused(done, f"Ray 2.40.0 {NEEDS}")


def assert_refused(done, says):
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert f"{says}.\n  Type: pip install 'ray>=2.60'" in done.stderr


def test_the_doctor_shows_its_table_all_the_same(with_old_ray, tmp_path):
    call = ["-m", "hybridrl.doctor", *OVERRIDES, "--output", str(tmp_path)]
    done = with_old_ray.run(*call, folder=tmp_path, RAY_ADDRESS=NOBODY)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    found = json.loads((tmp_path / "doctor.json").read_text())["findings"]
    said = {finding["check"]: (finding["verdict"], finding["evidence"]) for finding in found}
    assert said["ray.version"] == ("fail", f"Ray 2.40.0 {NEEDS}")
    assert said["ray.reachable"][0] == "fail"
    assert said["placement.slots"] == ("skipped", "stage ray failed")


def test_each_node_without_ray_that_has_called_in_is_named(without_ray, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
    with ThreadPoolExecutor(1) as beside:
        given = {"folder": tmp_path, "HYBRIDRL_DOCTOR_KEY": "k" * 64}
        node = beside.submit(without_ray.run, "-c", NODE, place, **given)
        head = without_ray.run("-c", HEAD, place, **given)
    assert node.result().returncode == 0, node.result().stderr
    assert head.stdout.count(f"ray.version fail no Ray {NEEDS}\n") == 2, head.stdout + head.stderr
