"""The documentation as a site."""

import subprocess
import sys
from pathlib import Path

from hybridrl.config.keys import leaves
from hybridrl.trainer.tracking.provenance import plain
from tests.run_configs import run_config

ROOT = Path(__file__).resolve().parents[2]
# Nodes that the roles take from their own group.
SHARED = {"algorithm", "fsdp", "lora", "model"}


def test_the_site_builds_without_a_warning_and_has_every_config_key(tmp_path):
    """A dead link and a page that is in no contents are warnings."""
    sphinx = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    command = [*sphinx, "-b", "html", "-c", "docs", ".", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs" / "config_reference.html").read_text()
    keys = [key.split(".") for key in leaves(plain(run_config()))]
    own = [".".join(key) for key in keys if len(key) > 1 and key[1] not in SHARED]
    assert len(own) > 100
    assert [key for key in own if f">{key}<" not in page] == []
