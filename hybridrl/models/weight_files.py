"""Weight files of a folder: read ahead, and checked against its config.json by headers alone.

A safetensors file begins with the length of a header in 8 bytes. The header is JSON: each tensor's
dtype, shape and place in the rest of the file. An index names the file of each tensor.
"""

import logging
import math
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from hybridrl.config.command.input_errors import parse_json, reason_of
from hybridrl.config.planner.shape import ModelShape

logger = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Pickled weights have no header.
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LENGTH_BYTES = 8
# Limit of the format.
_MAX_HEADER_BYTES = 100_000_000
EMBEDDING = "model.embed_tokens.weight"
MAX_NAMED = 3
# Of a read ahead of need.
BLOCK_BYTES = 16 << 20


def weight_problems(folder: Path, shape: ModelShape) -> Iterator[str]:
    """Yield the problems of the weights in a model's folder, each with the file's path."""
    tensors: dict[str, list[int]] = {}
    try:
        files = weight_files(folder)
    except (OSError, ValueError) as error:
        yield f"{folder / INDEX}: {_reason(error)}"
        return
    if not files and not any((folder / name).is_file() for name in PICKLED):
        yield f"{folder} has no weights ({SINGLE}, {INDEX} or {PICKLED[0]})"
    for file in files:
        try:
            tensors |= read_header(file)
        except (OSError, ValueError) as error:
            yield f"{file}: {_reason(error)}"
            return
    yield from _differences(folder, tensors, shape)


def weight_files(folder: Path, single: str = SINGLE, indexed: str = INDEX) -> list[Path]:
    """Return the file `single` of a model, or those that the index `indexed` names; [] without.

    Raises:
        OSError, ValueError: the index cannot be read, or is malformed.
    """
    if (folder / single).exists():
        return [folder / single]
    if not (folder / indexed).exists():
        return []
    index = parse_json((folder / indexed).read_bytes())
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(type(name) is str for name in places.values()):
        raise ValueError("no index of weights: it has no weight_map from tensors to files")
    return [folder / name for name in sorted({*places.values()})]


def read_header(file: Path) -> dict[str, list[int]]:
    """Return the shapes of a file's tensors by name.

    Raises:
        OSError, ValueError: the file cannot be read, is no safetensors file, or is truncated.
    """
    known = file.stat()
    if not stat.S_ISREG(known.st_mode):  # a pipe would block its reader
        raise ValueError("no plain file")
    size = known.st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > _MAX_HEADER_BYTES:
            raise ValueError("no safetensors file")
        if _LENGTH_BYTES + length > size:
            raise ValueError(f"cut off: it has {size:,} bytes, and its header alone takes more")
        header = parse_json(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("no safetensors file: its header is no JSON object")
    header.pop("__metadata__", None)
    try:
        ends = [tensor["data_offsets"][1] for tensor in header.values()]
        shapes = {name: [int(n) for n in tensor["shape"]] for name, tensor in header.items()}
        expected = _LENGTH_BYTES + length + max(ends, default=0)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError("no safetensors file: its header describes no tensors") from error
    if size != expected:
        raise ValueError(f"cut off or overwritten: it has {size:,} of {expected:,} bytes")
    return shapes


def _differences(
    folder: Path, tensors: Mapping[str, list[int]], shape: ModelShape
) -> Iterator[str]:
    """Yield a problem if the tensors in the files are not those of config.json."""
    if EMBEDDING not in tensors:  # other names, which transformers may map
        return
    # So many that some are missing, if config.json describes more than there are.
    expected = dict(islice(_expected(shape), len(tensors) + MAX_NAMED + 1))
    differing = [
        f"{name} is {tensors[name]}, expected {list(sides)}"
        if name in tensors
        else f"{name} is missing"
        for name, sides in expected.items()
        if name not in tensors or math.prod(tensors[name]) != math.prod(sides)
    ]
    surplus = f"model.layers.{shape.layers}."
    differing += [f"{name} is of no layer" for name in tensors if name.startswith(surplus)]
    if differing:
        more = " and more" if len(differing) > MAX_NAMED else ""
        yield (
            f"{folder}: the weights are not those that its config.json describes: "
            f"{'; '.join(differing[:MAX_NAMED])}{more}"
        )


def _expected(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the matrices of a model and their shapes; no head, which reward models replace."""
    yield EMBEDDING, (shape.vocab, shape.hidden)
    for layer, kind in enumerate(shape.order):
        for name, sides in shape.kinds[kind].matrices.items():
            yield f"model.layers.{layer}.{name}", sides


def _reason(error: Exception) -> str:
    """Return the text of an error without the file's name."""
    if isinstance(error, FileNotFoundError):
        return f"there is no such file, which {INDEX} names"
    return str(error.strerror) if isinstance(error, OSError) else reason_of(error)


def read_ahead(folder: Path) -> threading.Thread:
    """Read a folder's weights in a thread, so that the kernel caches them; return the thread."""
    files = sorted(folder.glob("*.safetensors"))
    thread = threading.Thread(target=_read_all, args=(files,), name="read ahead", daemon=True)
    thread.start()
    return thread


def _read_all(files: list[Path]) -> None:
    start, num_bytes, block = time.perf_counter(), 0, bytearray(BLOCK_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(block):
                num_bytes += count
    seconds = time.perf_counter() - start
    logger.info("read %.0f MB of weights ahead in %.1f s", num_bytes / 1e6, seconds)
