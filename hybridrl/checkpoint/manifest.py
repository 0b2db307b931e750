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
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.files import DRIVER, MANIFEST, STATE, retried, write_file

FORMAT = "hybridrl checkpoint 3"
# Fields of the file that are not those of `Manifest`.
_WRITTEN = {"format", "config_hash", "sha256"}

_LARGEST = 64 * 2**20  # bytes: 400,000 files
# Paths stay inside the folder, and print as they are.
_PART = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._+=@-]{1,255}"
_PATH = re.compile(f"{_PART}(?:/{_PART}){{0,7}}")


class DamagedCheckpoint(ValueError):
    """Checkpoint that is not as it was written.

    `file` is the damaged one by its path in `folder`; `reason` follows its name in messages.
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
    """Size in bytes and checksum of a file's content as it was written."""

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
        models: fingerprints of base models and own code, by config key of the path, by file; 64
            hex digits.
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
        "metrics": {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in manifest.metrics.items()
        },
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
    except OverflowError as error:
        problem = f"has a metric that is no float: {error}"
    except ValueError as error:
        problem = f"is not JSON: {error}"
    raise DamagedCheckpoint(folder, MANIFEST, problem)


def _text(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=2) + "\n").encode()


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
    if body.get("format") != FORMAT:
        shown = _shown(body.get("format"))
        return f'has format {shown}, this version of hybridrl reads "{FORMAT}"'
    hints = typing.get_type_hints(Manifest)
    if body.keys() != hints.keys() | _WRITTEN:
        return f"has the fields {_shown(sorted(body))}, expected {sorted(hints.keys() | _WRITTEN)}"
    for name, hint in hints.items():
        if not _fits(body[name], hint):
            return f"has {name} = {_shown(body[name])}, expected {hint}"
    for name in body["files"]:
        if name == MANIFEST or not _PATH.fullmatch(name):
            return (
                f"lists {_shown(name)}, expected {DRIVER}, {STATE}/... or another plain path "
                f"inside the folder"
            )
    return None


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value of JSON has the type of a field."""
    options = typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        is_whole = isinstance(value, dict) and value.keys() == hints.keys()
        return is_whole and all(_fits(value[name], hints[name]) for name in hints)
    if typing.get_origin(hint) is dict:
        return isinstance(value, dict) and all(_fits(one, options[1]) for one in value.values())
    if options:
        return any(_fits(value, option) for option in options)
    return hint is Any or type(value) is hint or (hint is float and type(value) is int)


def _shown(value: Any) -> str:
    """Shorten an untrusted value to few, printable characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
