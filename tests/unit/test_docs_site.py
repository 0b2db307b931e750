"""The documentation as a site."""

import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.config.keys import leaves
from hybridrl.config.schema_keys import is_read
from hybridrl.trainer.tracking.provenance import plain
from tests.support.run_configs import run_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A dead link and a page that is in no contents are warnings."""
    folder = tmp_path_factory.mktemp("site")
    sphinx = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    command = [*sphinx, "-b", "html", "-c", "docs", ".", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_every_config_key(site):
    page = (site / "docs" / "config_reference.html").read_text()
    keys = [key.split(".") for key in leaves(plain(run_config()))]
    own = [".".join(key) for key in keys if len(key) > 1 and is_read(".".join(key))]
    assert len(own) > 100
    assert [key for key in own if f">{key}<" not in page] == []


def test_no_page_is_wider_than_the_window(site, browser):
    for width in (1400, 400):
        page = browser.new_page(viewport={"width": width, "height": 800})
        for name in ("architecture", "coming_from", "reliability", "rewards", "security"):
            page.goto(f"file://{site}/docs/{name}.html")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)
        page.close()
