"""Choice of the weights that FSDP2 cuts by columns: those that the engine splits in another dim.

FSDP2 cuts every weight by rows (dim 0) by default. Of a row-parallel weight each tensor-parallel
rank needs some columns of every row, so most of each slice would be sent. Cut by columns, a rank's
shard is inside its slice. Experts are cut along their intermediate size, not by expert.
"""

import math
from collections.abc import Mapping, Sequence

from hybridrl.config.choices import Layout
from hybridrl.config.planner.world import is_nested
from hybridrl.config.schema import FSDPConfig
from hybridrl.distributed.experts import column_dim
from hybridrl.distributed.regions import Trace


def choose_columns(
    fsdp: FSDPConfig, sources: Mapping[str, tuple[int, ...]], traces: Sequence[Trace], itemsize: int
) -> tuple[list[str], list[str]]:
    """Choose the weights that the layout cuts by columns.

    `sources` are the shapes of all parameters, `traces` those of the tensor_parallel_size ranks of
    one engine, in order; a moved element has `itemsize` bytes.

    Returns:
        Names of the weights, and sentences for the log about the cost of others.
    """
    assert fsdp.dp_shard is not None
    tp, shards = fsdp.tensor_parallel_size, fsdp.dp_shard
    if fsdp.layout is Layout.plain or tp == 1:
        return [], []
    assert len(traces) == tp, (len(traces), tp)
    if not is_nested(fsdp):
        copied = sum(math.prod(copy.region.shape) for copy in traces[0].copies)
        received = itemsize * copied * (shards - 1) // shards
        return [], [
            f"rollout.tensor_parallel_size = {tp} does not divide fsdp.dp_shard = {shards}, so "
            f"shards stay in rank order and cut by rows: at every weight sync a rank receives "
            f"about {received / 2**20:.1f} MiB of its rollout weights from others"
        ]
    split = [name for name in sources if _dims_split(name, traces) == {column_dim(name)}]
    uneven = [name for name in split if sources[name][column_dim(name)] % shards]
    notes = []
    if uneven:
        # By rows 1/shards of a slice is in place, by columns tp/shards of it would be.
        slices = sum(math.prod(sources[name]) for name in uneven) // tp
        cost = itemsize * slices * (tp - 1) // shards
        notes.append(
            f"fsdp.dp_shard = {shards} does not divide the columns of {len(uneven)} weights "
            f"({uneven[0]}, ...), which are cut by rows: at every weight sync a rank receives "
            f"{cost / 2**20:.1f} MiB more than if it did"
        )
    return [name for name in split if name not in uneven], notes


def _dims_split(source: str, traces: Sequence[Trace]) -> set[int]:
    """Return the dims along which the ranks' loaders copy different parts of a tensor."""
    regions = [[c.region for c in trace.copies if c.source == source] for trace in traces]
    if not all(regions):
        return set()
    dims = range(len(regions[0][0].shape))
    spans = [{frozenset((r.offset[d], r.shape[d]) for r in part) for part in regions} for d in dims]
    return {dim for dim in dims if len(spans[dim]) > 1}
