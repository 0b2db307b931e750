"""Cast, copy and fingerprint on a GPU: one launch for any number of pieces.

A program looks up which piece it belongs to and works on a block of its columns, from a tile of
rows to the next. All numbers come from tables on the device, so that nothing is built per launch.

    owners[program] -> piece -> addresses[buffer] + offset -> tiles
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrl.reshard.copies import Job
from hybridrl.reshard.pieces import Piece


class _Shape(NamedTuple):
    """How a block of a piece is worked on: a tile of its rows is in registers at a time.

    `eviction` is how long what is read and written should stay in the cache.
    """

    tile_rows: int
    num_warps: int
    eviction: str


# 256 columns are 8 for each thread of a warp: 16 bytes of bfloat16. Hidden sizes are multiples
# of 128 or 256.
TILE_COLUMNS = 256
BLOCK_ROWS = 128
ALONE = _Shape(tile_rows=8, num_warps=4, eviction="")
# A block of NCCL's takes nearly all registers of a multiprocessor, and NCCL up to 32 of them. If
# programs were everywhere, it would wait until a kernel is through, and nothing would overlap;
# hence one large program each on a part of them. 60 are more than NCCL takes, because it slows
# down where copies take much memory bandwidth, and it is NCCL that others wait for.
BESIDE_EXCHANGE = _Shape(tile_rows=64, num_warps=16, eviction="evict_first")
NCCL_MULTIPROCESSORS = 60
# Elements of one vector access of the narrow dtypes.
VECTOR = 8

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_FIELDS = tl.constexpr(13)


class _Launch(NamedTuple):
    """Pieces of one kind, and the programs that they need."""

    source_dtype: torch.dtype
    aligned: bool
    table: Tensor
    owners: Tensor


class TritonCopies:
    """One kernel launch per kind of piece, mostly one in all.

    A kind is the dtype read and whether 16-byte accesses are possible everywhere.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        device = job.buffers.device
        self._paced_programs = _multiprocessors_beside_nccl(device)
        kinds: dict[tuple[torch.dtype, bool], list[Piece]] = {}
        for piece in job.pieces:
            source_dtype = job.buffers.tensors[piece.source].dtype
            kinds.setdefault((source_dtype, self._is_aligned(piece)), []).append(piece)
        self._launches = [
            _Launch(*kind, *_tables(part, kind[0].itemsize, job.dtype.itemsize, device))
            for kind, part in kinds.items()
        ]

    def run(self, share: int, shares: int, sums: Tensor | None, *, paced: bool) -> None:
        """Do one part of the work; see `Copies`."""
        job, shape = self._job, BESIDE_EXCHANGE if paced else ALONE
        for launch in self._launches:
            count = len(launch.owners)
            first, end = count * share // shares, count * (share + 1) // shares
            if first == end:
                continue
            programs = min(end - first, self._paced_programs) if paced else end - first
            copy_kernel[(programs,)](
                job.buffers.addresses,
                launch.table,
                launch.owners,
                first,
                end,
                job.hashes.rows,
                job.hashes.columns,
                job.hashes.rows if sums is None else sums,
                SOURCE=_DTYPES[launch.source_dtype],
                TARGET=_DTYPES[job.dtype],
                BITS=tl.int32 if job.dtype.itemsize == 4 else tl.int16,
                WRITE=job.write,
                FINGERPRINT=sums is not None,
                ALIGNED=launch.aligned,
                EVICTION=shape.eviction,
                BLOCK_ROWS=BLOCK_ROWS,
                TILE_ROWS=shape.tile_rows,
                TILE_COLUMNS=TILE_COLUMNS,
                num_warps=shape.num_warps,
            )

    def _is_aligned(self, piece: Piece) -> bool:
        """Whether every row begins and ends at a vector's boundary, on both sides."""
        numbers = [piece.source_start, piece.source_stride, piece.columns]
        buffers = [piece.source]
        if self._job.write:
            numbers += [piece.target_start, piece.target_stride]
            buffers.append(piece.target)
        return all(number % VECTOR == 0 for number in numbers) and all(
            self._job.buffers.tensors[buffer].data_ptr() % 16 == 0 for buffer in buffers
        )


def _multiprocessors_beside_nccl(device: torch.device) -> int:
    """Those that an exchange leaves; 1 where Triton's interpreter stands in for a GPU."""
    if device.type != "cuda":
        return 1
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, count - NCCL_MULTIPROCESSORS)


def _tables(
    pieces: Sequence[Piece], source_itemsize: int, target_itemsize: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """[pieces, fields] int64 in the kernel's order, and [programs] int32: each one's piece."""
    programs = torch.tensor(
        [
            triton.cdiv(piece.columns, TILE_COLUMNS) * triton.cdiv(piece.rows, BLOCK_ROWS)
            for piece in pieces
        ]
    )
    first = programs.cumsum(0) - programs
    table = torch.tensor(
        [
            (
                0,
                piece.source,
                piece.source_start * source_itemsize,
                piece.source_stride,
                piece.target,
                piece.target_start * target_itemsize,
                piece.target_stride,
                piece.rows,
                piece.columns,
                piece.row,
                piece.column,
                piece.salt,
                piece.sum,
            )
            for piece in pieces
        ],
        dtype=torch.int64,
    )
    table[:, 0] = first
    owners = torch.arange(len(pieces), dtype=torch.int32).repeat_interleave(programs)
    return table.to(device), owners.to(device)


@triton.jit
def _place(addresses, fields, DTYPE: tl.constexpr, ALIGNED: tl.constexpr) -> Any:  # type: ignore[no-untyped-def]
    """Where a piece begins and how far apart its rows are, from buffer, offset and stride."""
    begin = tl.load(addresses + tl.load(fields)) + tl.load(fields + 1)
    begin = begin.to(tl.pointer_type(DTYPE))
    stride = tl.load(fields + 2)
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)
        stride = tl.multiple_of(stride, 8)
    return begin, stride


@triton.jit
def copy_kernel(  # type: ignore[no-untyped-def]
    addresses,
    table,
    owners,
    first,
    end,
    row_hashes,
    column_hashes,
    sums,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    BITS: tl.constexpr,
    WRITE: tl.constexpr,
    FINGERPRINT: tl.constexpr,
    ALIGNED: tl.constexpr,
    EVICTION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> Any:
    """Read, cast, write (WRITE) and fingerprint (FINGERPRINT) blocks first to end.

    There may be fewer programs than blocks; then each takes every so many-th.
    """
    for number in range(first + tl.program_id(0), end, tl.num_programs(0)):
        piece = table + tl.load(owners + number).to(tl.int64) * _FIELDS
        block = (number - tl.load(piece)).to(tl.int32)
        rows = tl.load(piece + 7).to(tl.int32)
        columns = tl.load(piece + 8).to(tl.int32)
        if ALIGNED:
            columns = tl.multiple_of(columns, 8)
        source, source_stride = _place(addresses, piece + 1, SOURCE, ALIGNED)
        target, target_stride = _place(addresses, piece + 4, TARGET, ALIGNED)
        across = (columns + TILE_COLUMNS - 1) // TILE_COLUMNS
        top = (block // across) * BLOCK_ROWS
        column = (block % across) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        inside = column < columns
        if FINGERPRINT:
            first_row = tl.load(piece + 9)
            hash_at = column_hashes + tl.load(piece + 10) + column
            column_hash = tl.load(hash_at, mask=inside, other=0).to(tl.int64)
            total = tl.zeros((TILE_ROWS, TILE_COLUMNS // 8), tl.int64)
        for start in range(top, tl.minimum(top + BLOCK_ROWS, rows), TILE_ROWS):
            row = start + tl.arange(0, TILE_ROWS)
            mask = (row < rows)[:, None] & inside[None, :]
            at = row.to(tl.int64)[:, None]
            read = source + at * source_stride + column[None, :]
            values = tl.load(read, mask=mask, other=0.0, eviction_policy=EVICTION).to(TARGET)
            if WRITE:
                written = target + at * target_stride + column[None, :]
                tl.store(written, values, mask=mask, eviction_policy=EVICTION)
            if FINGERPRINT:
                weighted = values.to(BITS, bitcast=True).to(tl.int64) * column_hash[None, :]
                # A thread's own columns are summed first: threads meet only once, at the end.
                own = tl.sum(tl.reshape(weighted, (TILE_ROWS, TILE_COLUMNS // 8, 8)), axis=2)
                row_hash = tl.load(row_hashes + first_row + row, mask=row < rows, other=0)
                total += own * row_hash[:, None]
        if FINGERPRINT:
            salted = tl.sum(total) * tl.load(piece + 11)
            tl.atomic_add(sums + tl.load(piece + 12), salted, sem="relaxed")
