"""manifest.json: origin of a checkpoint, and every file with size and checksum.

It is untrusted input: another shape is rejected before use. It has its own SHA-256, and must equal
byte by byte what `write` would write.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.files import DRIVER, MANIFEST, STATE, retried, write_file

FORMAT = "hybridrl checkpoint 3"

_LARGEST = 64 * 2**20  # bytes: 400,000 files
# Paths stay inside the folder, and print as they are.
_PART = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._+=@-]{1,255}"
_PATH = re.compile(f"{_PART}(?:/{_PART}){{0,7}}")


class DamagedCheckpoint(ValueError):
    """Checkpoint that is not as it was written.

    Attributes:
        folder: of the checkpoint.
        file: damaged file, by its path in the folder.
        reason: value found and value expected; follows the file's name in messages.
    """

    def __init__(self, folder: Path, file: str, reason: str) -> None:
        super().__init__(folder, file, reason)
        self.folder = folder
        self.file = file
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.folder}: {self.file} {self.reason}"


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file as it was written.

    Attributes:
        size: bytes.
        sha256: of its content, 64 lower-case hex digits.
    """

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json.

    Attributes:
        step: the training step after which it was taken.
        created: time, in ISO format with time zone.
        config: of the run, plain JSON, secrets hidden.
        versions: of the packages that influence a run's numbers.
        world_size: ranks that wrote it.
        metrics: of the step; NaN and infinity are written as null.
        files: all but the manifest, by path in the folder, with `/`.
        models: fingerprints of the base models, by config key of the path, by file; 64 hex digits.
    """

    step: int
    created: str
    config: dict[str, Any]
    versions: dict[str, str]
    world_size: int
    metrics: dict[str, float | None]
    files: dict[str, FileRecord]
    models: dict[str, dict[str, str]]

    @property
    def config_hash(self) -> str:
        """SHA-256 of the config as JSON with sorted keys: equal for equal configs."""
        text = json.dumps(self.config, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def write(folder: Path, manifest: Manifest) -> None:
    """Write and fsync a checkpoint's manifest."""
    write_file(folder / MANIFEST, encode(manifest))


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest; the last field is the SHA-256 of the text without that field."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "step": manifest.step,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "metrics": {name: _finite(value) for name, value in manifest.metrics.items()},
        "versions": manifest.versions,
        "config": manifest.config,
        "config_hash": manifest.config_hash,
        "models": manifest.models,
        "files": {
            name: dataclasses.asdict(record) for name, record in sorted(manifest.files.items())
        },
    }
    own = hashlib.sha256(_text(body)).hexdigest()
    return _text(body | {"sha256": own})


def read(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedCheckpoint: it is missing, or not as it was written.
        UnreadableFile: it cannot be read.
    """
    try:
        data = retried(_bytes, folder / MANIFEST)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(folder, MANIFEST, "is missing") from error
    try:
        body = json.loads(data)
        problem = _problem(body)
        if problem is None:
            fields = {field.name: body[field.name] for field in dataclasses.fields(Manifest)}
            files = {name: FileRecord(**record) for name, record in body["files"].items()}
            manifest = Manifest(**fields | {"files": files})
            if encode(manifest) == data:
                return manifest
            problem = "is not as it was written: its own sha256 does not match"
    except RecursionError:
        problem = "is nested too deeply"
    except ValueError as error:
        problem = f"is not JSON: {error}"
    raise DamagedCheckpoint(folder, MANIFEST, problem)


def _text(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=2) + "\n").encode()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _bytes(path: Path) -> bytes:
    facts = os.lstat(path)
    if not stat.S_ISREG(facts.st_mode):
        raise DamagedCheckpoint(path.parent, MANIFEST, "is not a regular file")
    if facts.st_size > _LARGEST:
        reason = f"has {facts.st_size:,} bytes, expected at most {_LARGEST:,}"
        raise DamagedCheckpoint(path.parent, MANIFEST, reason)
    return path.read_bytes()


def _problem(body: Any) -> str | None:
    """Return the problem with the shape of a manifest, or None."""
    if not isinstance(body, dict):
        return f"holds {_shown(body)}, expected an object"
    found = body.get("format")
    if found != FORMAT:
        return f'has format {_shown(found)}, this version of hybridrl reads "{FORMAT}"'
    if body.keys() != _SHAPE.keys():
        return f"has the fields {_shown(sorted(body))}, expected {sorted(_SHAPE)}"
    for name, (is_right, expected) in _SHAPE.items():
        if not is_right(body[name]):
            return f"has {name} = {_shown(body[name])}, expected {expected}"
    for name, record in body["files"].items():
        if name == MANIFEST or not _PATH.fullmatch(name):
            return (
                f"lists {_shown(name)}, expected {DRIVER}, {STATE}/... or another plain path "
                f"inside the folder"
            )
        if not _is_record(record):
            return f"has {name} = {_shown(record)}, expected a size in bytes and a sha256"
    return None


def _shown(value: Any) -> str:
    """Shorten an untrusted value to few, printable characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _is_metric(value: Any) -> bool:
    # Not math.isfinite, which fails on integers that are no float.
    limit = sys.float_info.max
    return value is None or (type(value) in (int, float) and -limit <= value <= limit)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 10**18


def _is_text(value: Any, pattern: str = r"(?s:.*)") -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is_table(value: Any, of: Callable[[Any], bool] = lambda _: True) -> bool:
    return isinstance(value, dict) and all(map(of, value.values()))


_is_sha256 = partial(_is_text, pattern="[0-9a-f]{64}")


def _is_record(value: Any) -> bool:
    is_whole = _is_table(value) and value.keys() == {"size", "sha256"}
    return is_whole and _is_count(value["size"]) and _is_sha256(value["sha256"])


def _is_fingerprint(value: Any) -> bool:
    return _is_table(value, _is_sha256) and all(re.fullmatch(_PART, name) for name in value)


_SHAPE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "format": (_is_text, "text"),
    "step": (_is_count, "a step's number"),
    "created": (_is_time, "a time in ISO format with its zone"),
    "world_size": (_is_count, "a number of ranks"),
    "metrics": (partial(_is_table, of=_is_metric), "finite numbers or null by name"),
    "versions": (partial(_is_table, of=_is_text), "texts by name"),
    "config": (_is_table, "an object"),
    "config_hash": (_is_sha256, "64 hex digits"),
    "models": (partial(_is_table, of=_is_fingerprint), "64 hex digits by file by key"),
    "files": (_is_table, "size and sha256 by path"),
    "sha256": (_is_sha256, "64 hex digits"),
}
