"""docs/architecture.md: what it names exists, and folders stay small enough to be listed there."""

import ast
import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
PACKAGE = REPO / "hybridrl"
PAGE = (REPO / "docs" / "architecture.md").read_text()
# `trainer/step.py` or `trainer/step.py:PPO.train`; a bare name continues the file before it.
NAMED = re.compile(r"`(?P<file>[a-z_0-9/]+\.py)(?::(?P<name>[A-Za-z_0-9.]+))?`")
MOST_FILES = 17


def definitions(file):
    """Names of a file's functions, classes, methods and constants, dotted."""

    def of(body, prefix):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + node.name
                if isinstance(node, ast.ClassDef):
                    yield from of(node.body, f"{prefix}{node.name}.")
            targets = (
                [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            )
            yield from (prefix + t.id for t in targets if isinstance(t, ast.Name))

    return set(of(ast.parse(file.read_text()).body, ""))


def test_files_and_functions_that_the_page_names_exist():
    found = list(NAMED.finditer(PAGE))
    assert len([match for match in found if match["name"]]) > 40
    missing = []
    for match in found:
        file = PACKAGE / match["file"]
        file = file if file.exists() else REPO / match["file"]
        if not file.exists() or (match["name"] and match["name"] not in definitions(file)):
            missing.append(match[0])
    assert not missing


def test_the_page_is_short_and_every_room_stands_on_it():
    assert len(PAGE.splitlines()) <= 300
    rooms = {init.parent for init in PACKAGE.rglob("__init__.py")} - {PACKAGE}
    assert not [room.name for room in rooms if f"{room.relative_to(PACKAGE)}/" not in PAGE]
    assert not {str(room): n for room in rooms if (n := len(list(room.glob("*.py")))) > MOST_FILES}
