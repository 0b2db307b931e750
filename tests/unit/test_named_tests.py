"""The pages that name tests for their promises: each of these tests is there."""

import re
from collections.abc import Iterator

import pytest

from tests.support.deploy_stubs import REPO

PAGES = ("reliability.md", "security.md")
FOLDERS = {"U": "tests/unit", "R": "tests/ranks", "E": "tests/runs"}
NAMED = re.compile(r"`((?:[URE]|tests)/[\w/]+\.py|\.\.|)(?:::(test_\w+)(\.\.\.)?)?`")


def named_tests(text: str) -> Iterator[tuple[str, str, str]]:
    """File, function and "..." if its name goes on; a name alone is of the file named before."""
    path = ""
    for found in NAMED.finditer(text):
        path = found[1] if found[1] not in ("", "..") else path
        yield in_full(path), found[2] or "", found[3] or ""


def in_full(path: str) -> str:
    first, _, rest = path.partition("/")
    return f"{FOLDERS.get(first, first)}/{rest}"


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_is_there(page):
    named = list(named_tests((REPO / "docs" / page).read_text()))
    assert len(named) > 10
    for path, function, goes_on in named:
        source = (REPO / path).read_text()
        end = r"\w*\(" if goes_on else r"\("
        assert not function or re.search(f"def {function}{end}", source), f"{path}::{function}"
