"""A real browser for tests of pages."""

import shutil

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
