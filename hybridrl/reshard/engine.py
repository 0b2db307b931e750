"""Moves the trainer's shards into the rollout engine's live parameters, by plan, and verifies it.

    shards (float32) -> cast while packing -> all-to-all in the shard group -> write in place

No full parameter is ever built, except those of which some rank's loader does more than copy.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.distributed.regions import Region, Trace
from hybridrl.distributed.shards import NamedShard
from hybridrl.reshard.fingerprint import Fingerprinter
from hybridrl.reshard.layout import SourceLayout, layouts_of
from hybridrl.reshard.plan import Bucket, Transfer, build_plan, digest

logger = logging.getLogger(__name__)


class ReshardError(RuntimeError):
    """The weights cannot be moved, or did not arrive as they were sent."""


@dataclass(frozen=True)
class Destination:
    """Where the weights go: one rank of a rollout engine.

    Attributes:
        trace: what the engine's loader does on this rank.
        tensors: the engine's live parameters by name; their storage stays where it is.
        load: the engine's own loader, for what the trace refused.
        dtype: to which weights are cast before they move.
    """

    trace: Trace
    tensors: dict[str, Tensor]
    load: Callable[[Iterable[tuple[str, Tensor]]], Any]
    dtype: torch.dtype


class Resharder:
    """One rank's part in moving weights. Construction and all methods are collectives.

    Args:
        shards: what this rank holds of the trainer's weights, in one order on all ranks.
        destination: this rank's part of a rollout engine.
        mesh: the training mesh with axes dp_replicate and dp_shard. Data moves within a copy of
            the weights only, that is, between the ranks of one dp_shard group.
        bucket_mb: MiB that a rank sends or receives at a time; twice that is allocated.

    Raises:
        ReshardError: the ranks would compute different plans.
        ValueError: the weights do not cover the engine's parameters.
    """

    def __init__(
        self,
        shards: Sequence[NamedShard],
        destination: Destination,
        mesh: DeviceMesh,
        bucket_mb: int,
    ) -> None:
        self._destination = destination
        self._group = mesh.get_group("dp_shard")
        self._rank = mesh.get_local_rank("dp_shard")
        self._world = dist.get_world_size()
        sources = layouts_of(shards, mesh["dp_shard"].size())
        self._shards = {shard.name: shard for shard in shards}
        self._sources = {source.name: source for source in sources}
        self._device = next(iter(destination.tensors.values())).device

        bucket_elements = (bucket_mb << 20) // destination.dtype.itemsize
        traces = self._all_ranks(destination.trace)
        self._compare(digest(sources, traces, bucket_elements))
        members = dist.get_process_group_ranks(self._group)
        self._plan = build_plan(
            sources, [traces[rank] for rank in members], self._rank, bucket_elements
        )
        for name, refusal in destination.trace.refused.items():
            logger.warning(
                "%s is gathered whole at every reshard, which is slower and not verified: %s",
                name,
                refusal.reason,
            )
        dims = max(len(source.shape) for source in sources)
        sizes = [max(s.shape[d] for s in sources if len(s.shape) > d) for d in range(dims)]
        self._fingerprint = Fingerprinter(sizes, self._device)

    @torch.no_grad()
    def move(self) -> dict[str, float]:
        """Write the trainer's current weights into the engine's parameters.

        Returns:
            seconds, and the bytes this rank received from others.
        """
        start = time.perf_counter()
        local = self._local_shards()
        if self._plan.gathered:
            self._destination.load((n, self._gather(n, local[n])) for n in self._plan.gathered)
        for fill in self._plan.fills:
            _view(self._destination.tensors[fill.parameter], fill.region).fill_(fill.value)
        received = self._move_buckets(local)
        _wait(self._device)
        return {"move_s": time.perf_counter() - start, "received_bytes": float(received)}

    @torch.no_grad()
    def verify(self, version: int) -> dict[str, float]:
        """Compare what the shards hold with what the engine's parameters hold now.

        Senders fingerprint their shards, receivers their live parameters, each by itself.

        Raises:
            ReshardError: on all ranks, if a parameter differs on any; names all that do.
        """
        start = time.perf_counter()
        wrong = self._expected() != self._found()
        for fill in self._plan.fills:
            view = _view(self._destination.tensors[fill.parameter], fill.region)
            wrong[self._plan.parameters.index(fill.parameter)] |= (view != fill.value).any()
        by_rank = wrong.new_empty((self._world, len(wrong)), dtype=torch.uint8)
        dist.all_gather(list(by_rank), wrong.to(torch.uint8))
        ranks_of: dict[str, list[int]] = {}
        for rank, index in by_rank.nonzero().tolist():
            ranks_of.setdefault(self._plan.parameters[index], []).append(rank)
        if ranks_of:
            listed = "\n  ".join(f"{name} on ranks {r}" for name, r in sorted(ranks_of.items()))
            raise ReshardError(
                f"after reshard {version} the rollout engine's weights differ from the actor's:\n"
                f"  {listed}"
            )
        return {"verify_s": time.perf_counter() - start}

    def _all_ranks(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._world
        dist.all_gather_object(values, value)
        return values

    def _compare(self, own: str) -> None:
        digests = self._all_ranks(own)
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if odd:
            raise ReshardError(
                f"ranks {odd} would plan the reshard from other inputs than rank 0: their shards, "
                "traces or rollout.reshard_bucket_mb differ"
            )

    def _local_shards(self) -> dict[str, Tensor]:
        local = {}
        for name, source in self._sources.items():
            local[name] = self._shards[name].local()
            expected = source.region(self._rank).shape
            if tuple(local[name].shape) != expected:
                raise ReshardError(
                    f"{name}: this rank's shard has shape {tuple(local[name].shape)}, "
                    f"planned was {expected} of {source.shape}"
                )
        return local

    def _move_buckets(self, local: dict[str, Tensor]) -> int:
        """Run all buckets through one pair of buffers; return the bytes received."""
        buckets = self._plan.buckets
        new = partial(torch.empty, dtype=self._destination.dtype, device=self._device)
        send_buffer = new(max((sum(b.send_sizes) for b in buckets), default=0))
        receive_buffer = new(max((sum(b.receive_sizes) for b in buckets), default=0))
        received = 0
        for bucket in buckets:
            for transfer in bucket.local:
                self._target(transfer).copy_(self._piece(transfer, local))
            if bucket.moves_data:
                received += self._exchange(bucket, local, send_buffer, receive_buffer)
        return received

    def _exchange(
        self, bucket: Bucket, local: dict[str, Tensor], send_buffer: Tensor, receive_buffer: Tensor
    ) -> int:
        sizes, receive_sizes = bucket.send_sizes, bucket.receive_sizes
        sent, received = send_buffer[: sum(sizes)], receive_buffer[: sum(receive_sizes)]
        for transfer, packed in _packed(bucket.sends, sent):
            packed.copy_(self._piece(transfer, local))
        dist.all_to_all_single(received, sent, receive_sizes, sizes, group=self._group)
        for transfer, packed in _packed(bucket.receives, received):
            self._target(transfer).copy_(packed)
        return received.nbytes

    def _piece(self, transfer: Transfer, local: dict[str, Tensor]) -> Tensor:
        """The region of a transfer as a view of this rank's shard."""
        source = self._sources[transfer.source]
        return _view(local[source.name], self._within_shard(source, transfer.region))

    def _within_shard(self, source: SourceLayout, region: Region) -> Region:
        first = source.region(self._rank).offset[0]
        return Region((region.offset[0] - first, *region.offset[1:]), region.shape)

    def _target(self, transfer: Transfer) -> Tensor:
        region = Region(transfer.offset, transfer.region.shape)
        return _view(self._destination.tensors[transfer.parameter], region)

    def _gather(self, name: str, shard: Tensor) -> Tensor:
        """The whole tensor, uncast, from all shards of the group."""
        source = self._sources[name]
        padded = shard.new_zeros((source.rows_per_shard, *source.shape[1:]))
        padded[: len(shard)] = shard
        shards = shard.new_empty((source.num_shards, *padded.shape))
        dist.all_gather(list(shards), padded, group=self._group)
        return shards.flatten(0, 1)[: source.shape[0]]

    def _expected(self) -> Tensor:
        """[parameters] int64: fingerprints of what each of this rank's should hold."""
        local = self._local_shards()
        index = {name: i for i, name in enumerate(self._plan.parameters)}
        shape = (dist.get_world_size(self._group), len(index))
        sums = torch.zeros(shape, dtype=torch.int64, device=self._device)
        known: dict[tuple[str, Region], Tensor] = {}
        for bucket in self._plan.buckets:
            for transfer in (*bucket.local, *(t for part in bucket.sends for t in part)):
                key = (transfer.source, transfer.region)
                if key not in known:
                    piece = self._piece(transfer, local)
                    known[key] = self._fingerprint(*key, piece, self._destination.dtype)
                sums[transfer.receiver, index[transfer.parameter]] += known[key]
        arrived = torch.empty_like(sums)
        dist.all_to_all_single(arrived, sums, group=self._group)
        return arrived.sum(0)

    def _found(self) -> Tensor:
        """[parameters] int64: fingerprints of what this rank's live parameters hold."""
        index = {name: i for i, name in enumerate(self._plan.parameters)}
        sums = torch.zeros(len(index), dtype=torch.int64, device=self._device)
        for copy in self._plan.copies:
            view = _view(self._destination.tensors[copy.parameter], copy.destination)
            sums[index[copy.parameter]] += self._fingerprint(
                copy.source, copy.region, view, self._destination.dtype
            )
        return sums


def _packed(parts: Sequence[Sequence[Transfer]], flat: Tensor) -> Iterator[tuple[Transfer, Tensor]]:
    """Each transfer of each peer with its place in a flat buffer."""
    start = 0
    for part in parts:
        for transfer in part:
            place = flat[start : start + transfer.numel]
            start += transfer.numel
            yield transfer, place.view(transfer.region.shape)


def _view(tensor: Tensor, region: Region) -> Tensor:
    """The region of a tensor, as a view."""
    for dim, (start, size) in enumerate(zip(region.offset, region.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
