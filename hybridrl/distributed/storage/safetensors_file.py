"""Writing safetensors files of which nothing but the piece at hand is in memory.

Source: https://github.com/huggingface/safetensors#format
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

# The disk gets what was written after so many bytes, so that memory does not fill with it.
SYNC_BYTES = 256 * 2**20
# Of a tensor so many elements at a time are copied to the host and cast.
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
    """Build the head of a file: where the bytes of each tensor are, which follow in this order.

    Args:
        tensors: dtype and shape by name.
        about: what else the file says of itself.
    """
    entries: dict[str, object] = {"__metadata__": dict(about)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + shape.numel() * dtype.itemsize
        entries[name] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def pieces(tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield a tensor's bytes in order, cast where it lies, piece by piece."""
    for piece in tensor.contiguous().view(-1).split(PIECE_ELEMENTS):
        yield memoryview(piece.to(dtype).cpu().view(torch.uint8).numpy())


def write_parts(
    path: Path,
    parts: Iterable[bytes | memoryview],
    note: Callable[[bytes | memoryview], object] = len,
) -> None:
    """Write a new file part by part; the disk has it when this returns.

    Args:
        path: of the file.
        parts: its content in order.
        note: gets each part before it is written.

    Raises:
        OSError: the disk does not take it, with the file's name; or what `parts` raises.
    """
    unsynced = 0
    with path.open("wb") as file:
        for part in parts:
            note(part)
            with _naming(path):
                file.write(part)
            unsynced += len(part)
            if unsynced >= SYNC_BYTES:
                unsynced = 0
                with _naming(path):
                    file.flush()
                    os.fdatasync(file.fileno())
        with _naming(path):
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in errors, which Python does for failures to open it alone."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
