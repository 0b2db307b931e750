"""Ids of problems: each that the code gives is one that a test compares."""

import ast
import re

from tests.support.composing import REPO

# Functions that make a problem of an id, their first argument.
MAKERS = ("Problem", "must_be", "path_problem")


def test_each_is_in_a_table_or_compared():
    trees = [ast.parse(file.read_text()) for file in (REPO / "hybridrl").rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in MAKERS]
    ids = {a.value for call in made for a in call.args[:1] if isinstance(a, ast.Constant)}
    tests = "\n".join(file.read_text() for file in (REPO / "tests" / "unit").rglob("test_*.py"))
    compared = {*re.findall(r"(?m)^(\w+) \S+ \S", tests), *re.findall(r'"(\w+)"', tests)}
    assert len(ids) > 100 and ids - compared == set()
