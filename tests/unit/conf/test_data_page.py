"""docs/data.md: names every key of conf/data and none that does not exist."""

import re
from dataclasses import fields

from hybridrl.config.sections import DataConfig, MixturePart
from hybridrl.data.sources.order import START_SHARE
from tests.support.composing import REPO

PAGE = (REPO / "docs" / "data.md").read_text()


def test_every_key_has_its_place_and_every_place_its_key():
    keys = {field.name for field in fields(DataConfig)}
    named = set(re.findall(r"\bdata\.(\w+)", PAGE))
    assert named - {"md"} <= keys
    assert {key for key in keys if not re.search(rf"\b{key}\b", PAGE)} == set()
    of_part = {field.name for field in fields(MixturePart)}
    assert {key for key in of_part if f"`{key}`" not in PAGE} == set()


def test_every_group_file_has_a_row():
    names = {path.stem for path in (REPO / "conf" / "data").glob("*.yaml")}
    assert {name for name in names if f"| `{name}` |" not in PAGE} == set()


def test_the_pacing_is_the_one_of_the_code():
    first, rest = re.search(r"floor\(n \((\S+) \+ (\S+) d / D\)\)", PAGE).groups()
    assert float(first) == float(START_SHARE)
    assert float(first) + float(rest) == 1.0
