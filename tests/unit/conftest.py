"""A real browser for tests of pages, and a check of processes."""

import shutil
from collections.abc import Iterator

import psutil
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Software rendering of WebGL, which parallel coordinates need; root has no sandbox.
ARGUMENTS = ["--no-sandbox", "--enable-unsafe-swiftshader"]


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium of the distribution, driven by playwright."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    """Fails a test after which a process that it started still runs."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()


@pytest.fixture(scope="session", autouse=True)
def kept_compositions() -> Iterator[None]:
    """What Hydra merges for the same groups is merged once."""
    from tests.support.hydra_cache import keep_compositions

    end = keep_compositions()
    yield
    end()
