"""Moves the trainer's shards into the rollout engine's live parameters, by plan, and verifies it.

    shards (float32) -> cast and copy what stays on this rank ----------------> live parameters
                     -> cast and pack -> bucket -> exchange -> bucket -> unpack ->

While a bucket is on its way, the next one is packed and the one before unpacked. No full
parameter is ever built, except those of which some rank's loader does more than copy.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.distributed.part_timer import PartTimer
from hybridrl.distributed.regions import Region, Trace
from hybridrl.distributed.shards import NamedShard
from hybridrl.reshard.copies import Buffers, Copies, Job, build_copies
from hybridrl.reshard.exchange import Staging, gather
from hybridrl.reshard.fingerprint import hashes
from hybridrl.reshard.layout import layouts_of
from hybridrl.reshard.plan import Plan, build_plan, digest
from hybridrl.reshard.tables import Tables, build_programs, largest_index
from hybridrl.reshard.verify import (
    NOT_AS_SENT,
    REPLICAS_DIFFER,
    Sums,
    differing_replicas,
    expected_sums,
    replicas_take_alike,
    report,
)

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
        bucket_mb: MiB of a bucket: what a rank sends and receives at a time. Staging memory is
            at most twice that, and exists during `sync` only.

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
        self._mesh = mesh
        self._group = mesh.get_group("dp_shard")
        self._rank = dist.get_rank(self._group)
        self._shards = shards
        self._sources = layouts_of(shards, dist.get_world_size(self._group))
        self._device = next(iter(destination.tensors.values())).device
        self._plan = self._agreed_plan((bucket_mb << 20) // destination.dtype.itemsize)
        self._staging = Staging(self._plan.buckets, self._group, destination.dtype, self._device)
        self._hashes = hashes(*largest_index(self._sources), self._device)
        self._sums = Sums(dist.get_world_size(self._group), len(self._plan.parameters))
        shapes = destination.trace.parameters
        self._tables = Tables(self._plan, self._rank, self._sources, shapes, self._sums)
        self._buffers = Buffers(self._device)
        self._found = self._build_found()
        self._sent_is_known = False
        self._log_plan()

    def sync(self, version: int, *, verify: bool) -> dict[str, float]:
        """Write the trainer's current weights into the engine's parameters.

        Args:
            version: of the weights, for messages.
            verify: compare fingerprints on both sides afterwards.

        Returns:
            Seconds of looking up where everything lies and taking staging memory (`prepare_s`),
            of moving (`move_s`) and of comparing (`verify_s`), each until the device was done,
            and the bytes that this rank received from others.

        Raises:
            ReshardError: on all ranks, if a parameter did not arrive as it was sent on any; or a
                shard has not the shape that was planned.
        """
        timer = PartTimer(self._device)
        try:
            with timer.part("prepare_s"):
                self._prepare()
            with timer.part("move_s"):
                self._move(fingerprint=verify)
            self._sent_is_known = verify
            if verify:
                with timer.part("verify_s"):
                    self.verify(version)
        finally:
            self._buffers.release()
            self._staging.free()
        received = float(self._plan.received * self._destination.dtype.itemsize)
        return timer.seconds | {"received_bytes": received}

    @torch.no_grad()
    def verify(self, version: int) -> None:
        """Compare what the last `sync` with `verify` sent with what the parameters hold now.

        Raises:
            ReshardError: on all ranks, if a parameter differs on any; names all that do.
        """
        assert self._sent_is_known, "the last sync left fingerprints out"
        names = self._plan.parameters
        found = torch.zeros(len(names), dtype=torch.int64, device=self._device)
        self._found.run(0, 1, found, paced=False)
        expected = expected_sums(self._sums.cells(), self._group)
        problems = (found != expected).to(torch.uint8) * NOT_AS_SENT
        for fill in self._plan.fills:
            view = _view(self._destination.tensors[fill.parameter], fill.region)
            problems[names.index(fill.parameter)] |= (view != fill.value).any()
        if self._compares_replicas:
            differ = differing_replicas(expected, self._mesh.get_group("dp_replicate"))
            problems |= differ.to(torch.uint8) * REPLICAS_DIFFER
        listed = report(problems, names)
        if listed:
            raise ReshardError(
                f"after reshard {version} the rollout engine's weights are not the actor's:\n"
                f"  {listed}"
            )

    def _agreed_plan(self, bucket_elements: int) -> Plan:
        """This rank's plan, once all ranks would compute it from the same inputs."""
        traces = self._all_ranks(self._destination.trace)
        digests = self._all_ranks(digest(self._sources, traces, bucket_elements))
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if odd:
            raise ReshardError(
                f"ranks {odd} would plan the reshard from other inputs than rank 0: their shards, "
                "traces or rollout.reshard_bucket_mb differ"
            )
        self._compares_replicas = self._mesh["dp_replicate"].size() > 1 and replicas_take_alike(
            traces, self._mesh
        )
        members = dist.get_process_group_ranks(self._group)
        return build_plan(
            self._sources, [traces[rank] for rank in members], self._rank, bucket_elements
        )

    def _all_ranks(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def _log_plan(self) -> None:
        """Say once what is slow, and what the layout costs."""
        for name, refusal in self._destination.trace.refused.items():
            logger.warning(
                "%s is gathered whole at every reshard, which is slower and not verified: %s",
                name,
                refusal.reason,
            )
        if dist.get_rank() == 0:
            mib = self._destination.dtype.itemsize / 2**20
            logger.info(
                "reshard: %d buckets in %.0f MiB of staging memory; rank 0 receives %.1f MiB each "
                "time, of which %.1f MiB are beyond what it holds under any layout",
                len(self._plan.buckets),
                self._staging.nbytes / 2**20,
                self._plan.received * mib,
                self._plan.unavoidable * mib,
            )

    @torch.no_grad()
    def _prepare(self) -> None:
        """Take staging memory and look up where everything lies, which may have changed."""
        self._staging.allocate()
        shards = self._local_shards()
        if self._buffers.place([*shards, *self._parameters(), *self._staging.halves]):
            self._programs = build_programs(
                self._tables, self._buffers, self._destination.dtype, self._hashes
            )
            self._sums.build(self._device)

    def _parameters(self) -> list[Tensor]:
        return [self._destination.tensors[name] for name in self._plan.parameters]

    def _build_found(self) -> Copies:
        """What reads the live parameters, which stay where they are."""
        parameters = Buffers(self._device)
        parameters.place(self._parameters())
        pieces = self._tables.found()
        dtype = self._destination.dtype
        return build_copies(Job(pieces, parameters, dtype, self._hashes, write=False))

    def _local_shards(self) -> list[Tensor]:
        tensors = []
        for shard, source in zip(self._shards, self._sources, strict=True):
            tensor = shard.local()
            expected = source.region(self._rank).shape
            if tuple(tensor.shape) != expected or not tensor.is_contiguous():
                raise ReshardError(
                    f"{shard.name}: this rank's shard has shape {tuple(tensor.shape)}, "
                    f"planned was {expected} of {source.shape}, contiguous"
                )
            tensors.append(tensor)
        return tensors

    @torch.no_grad()
    def _move(self, *, fingerprint: bool) -> None:
        """Enqueue everything; on GPUs it runs on the current stream and on the group's own."""
        destination, plan = self._destination, self._plan
        if plan.gathered:
            destination.load(
                (shard.name, gather(shard.local(), source, self._group))
                for shard, source in zip(self._shards, self._sources, strict=True)
                if shard.name in plan.gathered
            )
        for fill in plan.fills:
            _view(destination.tensors[fill.parameter], fill.region).fill_(fill.value)
        self._run_buckets(self._sums.values.zero_() if fingerprint else None)

    def _run_buckets(self, sums: Tensor | None) -> None:
        """Packing is always one bucket ahead, so that the links never wait for it.

        A bucket's half of the staging memory is packed again only after the bucket was unpacked,
        because both run on one stream. Local copies are spread over the buckets if the links take
        long, and else come first, so that the device works while the exchange is prepared.
        """
        programs, count = self._programs, len(self._plan.buckets)
        spread = self._plan.exchanges_much
        if not spread:
            programs.local.run(0, 1, sums, paced=False)
        on_the_way = self._start_bucket(0, sums, paced=False) if count else []
        for number in range(count):
            arriving, is_last = on_the_way, number + 1 == count
            if not is_last:
                on_the_way = self._start_bucket(number + 1, sums, paced=spread)
            if spread:
                programs.local.run(number, count, sums, paced=True)
            for work in arriving:
                work.wait()
            programs.unpack[number].run(0, 1, None, paced=spread and not is_last)

    def _start_bucket(self, number: int, sums: Tensor | None, *, paced: bool) -> list[Any]:
        """Pack and send; what to wait for before unpacking."""
        self._programs.pack[number].run(0, 1, sums, paced=paced)
        return self._staging.start(number)


def _view(tensor: Tensor, region: Region) -> Tensor:
    """The region of a tensor, as a view."""
    for dim, (start, size) in enumerate(zip(region.offset, region.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
