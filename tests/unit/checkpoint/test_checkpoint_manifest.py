"""Manifests: what is written is read, and what somebody else wrote is refused by name."""

import hashlib
import json
import math
import os

import pytest

from hybridrl.checkpoint import manifest as manifests
from hybridrl.checkpoint.manifest import DamagedCheckpoint, FileRecord, Manifest
from hybridrl.checkpoint.verification import digest
from tests.support.checkpoint_cases import manifest

pytestmark = pytest.mark.full

DIGEST = "0" * 64
RECORD = {"size": 1, "sha256": DIGEST}
WRITTEN = manifest(20, {"driver.json": FileRecord(1, DIGEST)}, loss=0.1, reward=None)


def signed(body: dict) -> bytes:
    """A manifest that is whole by its own checksum, whatever is in it."""
    body = {name: value for name, value in body.items() if name != "sha256"}
    own = hashlib.sha256((json.dumps(body, indent=2) + "\n").encode()).hexdigest()
    return (json.dumps(body | {"sha256": own}, indent=2) + "\n").encode()


def body(**changes: object) -> dict:
    return json.loads(manifests.encode(WRITTEN)) | changes


def refusal(folder, data: bytes) -> str:
    """What is said of a manifest with these bytes."""
    (folder / "manifest.json").write_bytes(data)
    with pytest.raises(DamagedCheckpoint) as caught:
        manifests.read(folder)
    assert caught.value.file == "manifest.json"
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700
    return caught.value.reason


def test_what_is_written_is_read(tmp_path):
    manifests.write(tmp_path, WRITTEN)
    assert manifests.read(tmp_path) == WRITTEN
    assert (tmp_path / "manifest.json").read_bytes() == signed(body())


def test_metrics_that_are_no_numbers_are_null(tmp_path):
    manifests.write(tmp_path, manifest(1, {}, a=math.nan, b=-math.inf, c=2, d=1e-300))
    assert manifests.read(tmp_path).metrics == {"a": None, "b": None, "c": 2, "d": 1e-300}


def test_config_hash_is_of_the_values_alone():
    def hash_of(config: dict) -> str:
        return Manifest(1, "", config, {}, 1, {}, {}, {}).config_hash

    expected = hashlib.sha256(b'{"a":[1,null],"b":{"c":"\\u00e9"}}').hexdigest()
    assert hash_of({"b": {"c": "\u00e9"}, "a": [1, None]}) == expected
    assert hash_of({"a": [1, None], "b": {"c": "e"}}) != expected


def test_digest_is_sha256_and_size(tmp_path):
    data = os.urandom(700_001)
    (tmp_path / "file").write_bytes(data)
    assert digest(tmp_path / "file") == FileRecord(700_001, hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    "path",
    [
        *("../driver.json", "state/../../x", "/etc/passwd", "", ".", "..", "a//b", "a/", "./a"),
        *("state\\x", "a\nb", "driver.json\n", "a\x1b[2J", "\u202ea", "a" * 256, "a/" * 8 + "a"),
        "manifest.json",
    ],
)
def test_paths_that_leave_the_folder_or_hide_are_refused(tmp_path, path):
    reason = refusal(tmp_path, signed(body(files={path: RECORD})))
    assert "expected driver.json, state/... or another plain path" in reason


@pytest.mark.parametrize(
    "path", ["driver.json", "state/shard-00001-model-00001-of-00001.safetensors", "..a/b..c/.d"]
)
def test_plain_paths_are_read(tmp_path, path):
    (tmp_path / "manifest.json").write_bytes(signed(body(files={path: RECORD})))
    assert manifests.read(tmp_path).files == {path: FileRecord(1, DIGEST)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "hybridrl checkpoint 99"}, 'this version of hybridrl reads "hybridrl checkp'),
        ({"step": "20"}, "has step = '20', expected"),
        ({"step": True}, "has step = True"),
        ({"created": 20}, "has created = 20"),
        ({"world_size": 2.0}, "has world_size = 2.0"),
        ({"metrics": {"loss": "low"}}, "has metrics = {'loss': 'low'}"),
        ({"metrics": {"loss": True}}, "has metrics = {'loss': True}"),
        ({"metrics": {"loss": math.nan}}, "is not as it was written"),
        ({"metrics": {"loss": 10**400}}, "has a metric that is no float"),
        ({"metrics": [1]}, "has metrics = [1]"),
        ({"versions": {"torch": 2}}, "has versions = {'torch': 2}"),
        ({"config": []}, "has config = [], expected"),
        ({"config_hash": "0" * 63}, "is not as it was written"),
        ({"files": ["driver.json"]}, "has files = ['driver.json']"),
        ({"files": {"a": 1}}, "has files = {'a': 1}"),
        ({"files": {"a": RECORD | {"size": 1.0}}}, "has files = {'a': {'size': 1.0"),
        ({"files": {"a": {"size": 1}}}, "has files = {'a': {'size': 1}}"),
        ({"files": {"a": RECORD | {"mode": 7}}}, "has files = {'a': {'size': 1"),
        ({"models": {"model.path": "config.json"}}, "has models = {'model.path': 'config"),
        ({"models": {"model.path": {"config.json": 1}}}, "has models = {'model.path': {'config"),
        ({"more": "\x1b[2J" * 999}, "has the fields"),
        ({"config_hash": DIGEST}, "is not as it was written"),
    ],
)
def test_wrong_values_are_refused_by_field(tmp_path, changes, says):
    assert says in refusal(tmp_path, signed(body(**changes)))


@pytest.mark.parametrize("field", body())
def test_a_missing_field_is_refused(tmp_path, field):
    rest = {name: value for name, value in body().items() if name != field}
    data = (json.dumps(rest) if field == "sha256" else signed(rest).decode()).encode()
    assert refusal(tmp_path, data).startswith("has the fields" if field != "format" else "has for")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"{]", "is not JSON"),
        (b"1" * 5000, "is not JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a":' * 100_000, "is nested too deeply"),
        (b"[]", "holds [], expected an object"),
        (b"null", "holds None, expected an object"),
        (b'{"format": "\\ud800"}', "has format '\\ud800'"),
        (signed(body()).replace(b"\n", b"\n "), "is not as it was written"),
        (signed(body()) + b"\n", "is not as it was written"),
        (b'{"step": 7,' + signed(body())[1:], "is not as it was written"),
    ],
    ids=range(12),
)
def test_what_is_no_manifest_is_refused(tmp_path, data, says):
    assert says in refusal(tmp_path, data)


def test_a_manifest_nested_just_too_deeply_to_write_is_refused(tmp_path):
    for depth in range(300, 1000, 100):
        nested = "[" * depth + "]" * depth
        text = manifests.encode(WRITTEN).decode().replace('"seed": 1', f'"seed": {nested}')
        refusal(tmp_path, text.encode())


def test_a_huge_manifest_is_not_read(tmp_path):
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DamagedCheckpoint, match=r"has 1,099,511,627,776 bytes, expected at most"):
        manifests.read(tmp_path)
