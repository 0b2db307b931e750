"""Copy kernel for GPUs: casts, copies and fingerprints any number of rectangles per launch.

A program looks up its rectangle and processes a block of its columns, tile of rows by tile of
rows. All numbers come from tables on the device, so nothing is built per launch.

    owners[program] -> rectangle -> addresses[buffer] + offset -> tiles
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrl.distributed.regions import FP8
from hybridrl.reshard.copies import FP8_MAX, Copier, CopyRect

# 256 columns are 8 for each thread of a warp: 16 bytes of bfloat16. Hidden sizes are multiples
# of 128 or 256.
TILE_COLUMNS = 256
BLOCK_ROWS = 128
# Launch shapes: rows of a tile, which is held in registers, warps and cache eviction policy.
ALONE: dict[str, Any] = {"TILE_ROWS": 8, "num_warps": 4, "EVICTION": ""}
# An NCCL block needs nearly all registers of a multiprocessor, and NCCL up to 32 multiprocessors.
# With programs on all of them NCCL would wait for the kernel to end and nothing would overlap.
# Hence one large program on each of the rest. 60 leaves a margin: copies that use much memory
# bandwidth slow NCCL down, and other ranks wait for NCCL.
DURING_EXCHANGE: dict[str, Any] = {"TILE_ROWS": 64, "num_warps": 16, "EVICTION": "evict_first"}
NCCL_MULTIPROCESSORS = 60
# Elements of one vector access of 16 bytes of the narrow dtypes, and of FP8.
VECTOR, FP8_VECTOR = 8, 16

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_DTYPES[FP8] = tl.int8
_BITS = {1: tl.int8, 2: tl.int16, 4: tl.int32}
_FIELDS = tl.constexpr(14)
_FP8_MAX = tl.constexpr(FP8_MAX)
_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


class TritonCopier(Copier):
    """Copier with one kernel launch per kind of rectangle, mostly one in all.

    A kind is a source dtype and whether 16-byte accesses are possible everywhere.
    """

    def _prepare(self, rects: Sequence[CopyRect]) -> None:
        buffers, itemsize = self._buffers, self._dtype.itemsize
        self._paced_programs = 1  # in Triton's interpreter
        if buffers.device.type == "cuda":
            count = torch.cuda.get_device_properties(buffers.device).multi_processor_count
            self._paced_programs = max(1, count - NCCL_MULTIPROCESSORS)
        kinds: dict[tuple[torch.dtype, bool], list[CopyRect]] = {}
        for rect in rects:
            source_dtype = buffers.tensors[rect.source].dtype
            kinds.setdefault((source_dtype, self._is_aligned(rect)), []).append(rect)
        self._launches = [
            (*kind, *_tables(part, kind[0].itemsize, itemsize, buffers.device))
            for kind, part in kinds.items()
        ]

    def run(self, share: int, shares: int, sums: Tensor | None, *, paced: bool) -> None:
        """Do one part of the work; see `Copier.run`."""
        hashes, shape = self._hashes, DURING_EXCHANGE if paced else ALONE
        for source_dtype, aligned, table, owners in self._launches:
            count = len(owners)
            first, end = count * share // shares, count * (share + 1) // shares
            if first == end:
                continue
            programs = min(end - first, self._paced_programs) if paced else end - first
            copy_kernel[(programs,)](
                self._buffers.addresses,
                table,
                owners,
                first,
                end,
                hashes.rows,
                hashes.columns,
                hashes.rows if sums is None else sums,
                hashes.rows if self._scales is None else self._scales,
                SOURCE=_DTYPES[source_dtype],
                TARGET=_DTYPES[self._dtype],
                BITS=_BITS[self._dtype.itemsize],
                WRITE=self._write,
                FINGERPRINT=sums is not None,
                ALIGNED=aligned,
                BLOCK_ROWS=BLOCK_ROWS,
                TILE_COLUMNS=TILE_COLUMNS,
                **shape,
            )

    def _is_aligned(self, rect: CopyRect) -> bool:
        """Return whether every row begins and ends at a vector's boundary, on both sides."""
        numbers = [rect.source_start, rect.source_stride, rect.columns]
        buffers = [rect.source]
        vector = FP8_VECTOR if self._dtype is FP8 else VECTOR
        if self._write:
            numbers += [rect.target_start, rect.target_stride]
            buffers.append(rect.target)
        return all(number % vector == 0 for number in numbers) and all(
            self._buffers.tensors[buffer].data_ptr() % 16 == 0 for buffer in buffers
        )


def _tables(
    rects: Sequence[CopyRect], source_itemsize: int, target_itemsize: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return [rects, fields] int64 for the kernel, and [programs] int32: their rectangles."""
    programs = torch.tensor(
        [
            triton.cdiv(rect.columns, TILE_COLUMNS) * triton.cdiv(rect.rows, BLOCK_ROWS)
            for rect in rects
        ]
    )
    in_bytes = [
        rect._replace(
            source_start=rect.source_start * source_itemsize,
            target_start=rect.target_start * target_itemsize,
        )
        for rect in rects
    ]
    first = programs.cumsum(0) - programs
    table = torch.cat([first[:, None], torch.tensor(in_bytes, dtype=torch.int64)], dim=1)
    owners = torch.arange(len(rects), dtype=torch.int32).repeat_interleave(programs)
    return table.to(device), owners.to(device)


@triton.jit
def _locate(addresses, fields, DTYPE: tl.constexpr, ALIGNED: tl.constexpr) -> Any:  # type: ignore[no-untyped-def]
    """Return the first element of a rectangle and its row stride."""
    begin = tl.load(addresses + tl.load(fields)) + tl.load(fields + 1)
    begin = begin.to(tl.pointer_type(DTYPE))
    stride = tl.load(fields + 2)
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)
        stride = tl.multiple_of(stride, 8)
    return begin, stride


@triton.jit
def _cast(values, scale_at, inside, SOURCE: tl.constexpr, TARGET: tl.constexpr) -> Any:  # type: ignore[no-untyped-def]
    """Return a tile in the target's dtype; as `quantised` by the scales of its rows."""
    if tl.int8 == TARGET and tl.int8 != SOURCE:
        scale = tl.load(scale_at, mask=inside, other=1.0)[:, None]
        scaled = tl.div_rn(values.to(tl.bfloat16).to(tl.float32), scale)
        scaled = tl.clamp(scaled, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        values = scaled.to(tl.float8e4nv).to(TARGET, bitcast=True)
        if _IS_COMPILED:
            # ptxas 12.9.86, which Triton 3.8 brings for sm_90, reads half of the bytes for the sum
            # before they are there. It cannot take this register of four bytes apart.
            values = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [values], dtype=tl.int8, is_pure=True, pack=4
            )
    else:
        values = values.to(TARGET)
    return values


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
    scales,
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
    """Read, cast, write and fingerprint blocks first to end, over which programs stride."""
    for number in range(first + tl.program_id(0), end, tl.num_programs(0)):
        rect = table + tl.load(owners + number).to(tl.int64) * _FIELDS
        block = (number - tl.load(rect)).to(tl.int32)
        rows = tl.load(rect + 7).to(tl.int32)
        columns = tl.load(rect + 8).to(tl.int32)
        if ALIGNED:
            columns = tl.multiple_of(columns, 8)
        source, source_stride = _locate(addresses, rect + 1, SOURCE, ALIGNED)
        target, target_stride = _locate(addresses, rect + 4, TARGET, ALIGNED)
        across = (columns + TILE_COLUMNS - 1) // TILE_COLUMNS
        top = (block // across) * BLOCK_ROWS
        column = (block % across) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        inside = column < columns
        if FINGERPRINT:
            first_row = tl.load(rect + 9)
            hash_at = column_hashes + tl.load(rect + 10) + column
            column_hash = tl.load(hash_at, mask=inside, other=0).to(tl.int64)
            total = tl.zeros((TILE_ROWS, TILE_COLUMNS // 8), tl.int64)
        for start in range(top, tl.minimum(top + BLOCK_ROWS, rows), TILE_ROWS):
            row = start + tl.arange(0, TILE_ROWS)
            mask = (row < rows)[:, None] & inside[None, :]
            at = row.to(tl.int64)[:, None]
            read = source + at * source_stride + column[None, :]
            values = tl.load(read, mask=mask, other=0, eviction_policy=EVICTION)
            values = _cast(values, scales + tl.load(rect + 13) + row, row < rows, SOURCE, TARGET)
            if WRITE:
                written = target + at * target_stride + column[None, :]
                tl.store(written, values, mask=mask, eviction_policy=EVICTION)
            if FINGERPRINT:
                weighted = values.to(BITS, bitcast=True).to(tl.int64) * column_hash[None, :]
                # A thread sums its own columns first: threads are reduced only once, at the end.
                own = tl.sum(tl.reshape(weighted, (TILE_ROWS, TILE_COLUMNS // 8, 8)), axis=2)
                row_hash = tl.load(row_hashes + first_row + row, mask=row < rows, other=0)
                total += own * row_hash[:, None]
        if FINGERPRINT:
            salted = tl.sum(total) * tl.load(rect + 11)
            tl.atomic_add(sums + tl.load(rect + 12), salted, sem="relaxed")
