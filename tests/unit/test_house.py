"""tools/house.py: what it counts in a module, and what it says about an exceeded budget."""

import importlib.util
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SOURCE = '''"""A module."""
from typing import Any

class Found:
    """One sentence. Another."""
    value: int | None = None
    sure: int = 1

    @property
    def of(self) -> Any:
        """{long}"""
        return self.value
'''.replace("{long}", "word " * 26)


@pytest.fixture(scope="module")
def house():
    sys.path.insert(0, str(REPO / "tools"))
    spec = importlib.util.spec_from_file_location("house", REPO / "tools" / "house.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(REPO / "tools"))


def test_counts_of_a_module(house, tmp_path, monkeypatch):
    monkeypatch.setattr(house, "PACKAGE", tmp_path)
    (tmp_path / "one.py").write_text(SOURCE)
    module = house.Module(tmp_path / "one.py")
    assert (module.lines, module.optional_fields(), module.long_sentences()) == (12, 1, 1)
    assert list(module.functions()) == [(4, "one.py:of")]
    assert [house.poor_words(name) for name in module.names()].count({"found"}) == 1


def test_an_exceeded_budget_is_named_with_count_and_remedy(house):
    counted = {"trainer": (101, 3), "report": (1, 1), "new": (5, 1)}
    budgets = {"trainer": [100, 3], "report": [1, 1]}
    excess, missing = house.excesses("room", ("lines", "files"), counted, budgets)
    assert "'trainer': 101 lines, budget 100" in excess
    assert "tools/house.toml" in excess
    assert "'new' has no budget" in missing
