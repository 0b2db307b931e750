"""Streaming writer of safetensors files: one piece is in memory at a time.

Source: https://github.com/huggingface/safetensors#format
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

# Bytes after which written data is synced, so that dirty pages do not fill memory.
SYNC_BYTES = 256 * 2**20
# Elements of a tensor that are cast and copied to the host at a time.
PIECE_ELEMENTS = 2**23

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def header(
    tensors: Mapping[str, tuple[torch.dtype, torch.Size]], about: Mapping[str, str]
) -> bytes:
    """Build the header of a file whose tensors follow in this order, with metadata `about`."""
    entries: dict[str, object] = {"__metadata__": dict(about)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + shape.numel() * dtype.itemsize
        offsets = [start, end]
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": offsets}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def pieces(tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield a tensor's bytes in order, cast on its device, piece by piece."""
    for piece in tensor.contiguous().view(-1).split(PIECE_ELEMENTS):
        yield memoryview(piece.to(dtype).cpu().view(torch.uint8).numpy())


def write_parts(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a new file part by part and sync it to disk; an OSError names it."""
    unsynced = 0
    with path.open("wb") as file:
        for part in parts:
            with naming(path):
                file.write(part)
                unsynced += len(part)
                if unsynced >= SYNC_BYTES:
                    unsynced = 0
                    file.flush()
                    os.fdatasync(file.fileno())
        with naming(path):
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to errors, which Python does only for open()."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
