"""Resharder: moves the trainer's shards into the engine's live parameters and verifies them.

Frozen weights (those under adapters) have a plan of their own, which runs only if the engine does
not hold them yet. No full parameter is built, unless some rank's loader does more than copy it.
"""

import hashlib
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.distributed.part_timer import PartTimer
from hybridrl.distributed.regions import NamedShard
from hybridrl.reshard.copies import Buffers, Copier, CopyRect, copier_class, cut, region_view
from hybridrl.reshard.executor import Destination, PlanExecutor, ReshardError
from hybridrl.reshard.fingerprint import hashes, salt
from hybridrl.reshard.plan import Plan, build_plans
from hybridrl.reshard.transfers import SourceLayout

logger = logging.getLogger(__name__)

# Reasons why a parameter is wrong, as bits of a byte.
NOT_AS_SENT, REPLICAS_DIFFER = 1, 2
_REASONS = {
    NOT_AS_SENT: "does not hold what was sent to it",
    REPLICAS_DIFFER: "was sent weights that differ from the first replica's",
    NOT_AS_SENT | REPLICAS_DIFFER: "does not hold what was sent, which differs between replicas",
}


class Resharder:
    """One rank's part of a weight sync. Construction and all methods are collectives.

    Args:
        shards: this rank's shards of the trainer's weights, in one order on all ranks.
        destination: this rank's part of a rollout engine.
        mesh: the training mesh with axes dp_replicate and dp_shard. Data moves only between the
            ranks of one dp_shard group, which hold one replica of the weights.
        bucket_mb: MiB that a rank sends and receives at a time. Staging memory is at most twice
            that, and exists during `sync` only.

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
        self._shards = {shard.name: shard for shard in shards}
        num_shards = dist.get_world_size(self._group)
        self._sources = [SourceLayout(s.name, tuple(s.shape), num_shards, s.dim) for s in shards]
        # Hashes of all rows and columns, of tensors viewed as rows of their last dim.
        rows = max(1, *(math.prod(source.shape[:-1]) for source in self._sources))
        columns = max(source.shape[-1] for source in self._sources)
        self._hashes = hashes(rows, columns, destination.device)
        frozen = [shard.name for shard in shards if shard.frozen]
        plans = self._agreed_plans((bucket_mb << 20) // destination.dtype.itemsize, frozen)
        self._executors = [
            PlanExecutor(plan, self._shards, destination, self._group, self._hashes)
            for plan in plans
        ]
        self._parameters = {name: i for i, name in enumerate(destination.trace.parameters)}
        self._reader = self._parameter_reader()
        self._frozen_is_there = False
        self._sums_are_known = False
        self._log_plans()

    def sync(self, version: int, *, verify: bool, kept: bool = False) -> dict[str, float]:
        """Write the trainer's current weights into the engine's parameters.

        Args:
            version: version of the weights, for messages.
            verify: compare the fingerprints of all parameters afterwards.
            kept: true if the parameters still hold the last sync's weights; then frozen weights
                are not moved again.

        Returns:
            Seconds, device work included, of parts (`prepare_s`, `wait_s`, `move_s`, `verify_s`);
            bytes that this rank received and that it wrote into its parameters.

        Raises:
            ReshardError: on all ranks if a parameter did not arrive as sent on any rank; or a
                shard does not have the planned shape.
        """
        only_live = kept and self._frozen_is_there and (self._sums_are_known or not verify)
        executors = self._executors[-1:] if only_live else self._executors
        # Until the end the content of the parameters is undefined.
        self._frozen_is_there = self._sums_are_known = False
        device, itemsize = self._destination.device, self._destination.dtype.itemsize
        timer = PartTimer(device)
        for executor in executors:
            try:
                with timer.part("prepare_s"):
                    executor.prepare()
                with timer.part("wait_s"):  # so that a straggler does not count as a slow move
                    if dist.get_world_size(self._group) > 1:
                        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
                with timer.part("move_s"):
                    executor.move(fingerprint=verify)
            finally:
                executor.release()
        self._sums_are_known = verify
        if verify:
            with timer.part("verify_s"):
                self.verify(version)
        self._frozen_is_there = True
        return timer.seconds | {
            "received_bytes": float(itemsize * sum(one.plan.received for one in executors)),
            "written_bytes": float(itemsize * sum(one.plan.written for one in executors)),
        }

    @torch.no_grad()
    def verify(self, version: int) -> None:
        """Compare the live parameters with the fingerprints of the last sync with `verify`.

        Raises:
            ReshardError: on all ranks if a parameter differs on any rank; names all that differ.
        """
        assert self._sums_are_known, "the last sync left fingerprints out"
        destination = self._destination
        found = torch.zeros(len(self._parameters), dtype=torch.int64, device=destination.device)
        self._reader.run(0, 1, found, paced=False)
        cells = torch.stack([executor.sums.cells() for executor in self._executors]).sum(0)
        arrived = torch.empty_like(cells)
        dist.all_to_all_single(arrived, cells, group=self._group)
        expected = arrived.sum(0)
        problems = (found != expected).to(torch.uint8) * NOT_AS_SENT
        for fill in destination.trace.fills:
            region = region_view(destination.tensors[fill.parameter], fill.region)
            problems[self._parameters[fill.parameter]] |= (region != fill.value).any()
        if self._compares_replicas:
            replicas = _all_gather(expected, self._mesh.get_group("dp_replicate"))
            problems |= (replicas[0] != expected).to(torch.uint8) * REPLICAS_DIFFER
        listed = self._report(problems)
        if listed:
            raise ReshardError(
                f"after reshard {version} the rollout engine's weights are not the actor's:\n"
                f"  {listed}"
            )

    def _report(self, problems: Tensor) -> str:
        """Describe wrong parameters and their ranks, "" if none; a collective of all ranks."""
        wrong, names = _all_gather(problems).cpu(), list(self._parameters)
        ranks_of: dict[tuple[str, int], list[int]] = {}
        for rank, index in wrong.nonzero().tolist():
            key = (names[index], int(wrong[rank, index]))
            ranks_of.setdefault(key, []).append(rank)
        return "\n  ".join(
            f"{name} on ranks {ranks}: {_REASONS[kind]}"
            for (name, kind), ranks in sorted(ranks_of.items())
        )

    def _agreed_plans(self, bucket_elements: int, frozen: list[str]) -> list[Plan]:
        """Return this rank's plans, after a check that all ranks plan from the same inputs."""
        inputs = repr((self._sources, frozen, bucket_elements)).encode()
        own = (self._destination.trace, hashlib.blake2b(inputs).digest())
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        traces, digests = zip(*gathered, strict=True)
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if odd:
            raise ReshardError(
                f"ranks {odd} would plan the reshard from other inputs than rank 0: their shards "
                "or rollout.reshard_bucket_mb differ"
            )
        # An engine that spans replicas gives each another slice; then they cannot be compared.
        groups = self._mesh.mesh.T.tolist()
        self._compares_replicas = self._mesh["dp_replicate"].size() > 1 and all(
            traces[rank] == traces[group[0]] for group in groups for rank in group
        )
        group_traces = [traces[rank] for rank in dist.get_process_group_ranks(self._group)]
        rank = dist.get_rank(self._group)
        return build_plans(self._sources, frozen, group_traces, rank, bucket_elements)

    def _parameter_reader(self) -> Copier:
        """Return a copier that only reads the live parameters, whose addresses never change.

        Buffers and sums are numbered by parameter.
        """
        destination, trace = self._destination, self._destination.trace
        buffers = Buffers(destination.device)
        buffers.bind([destination.tensors[name] for name in self._parameters])
        whole = {source.name: source.shape for source in self._sources}
        rects: list[CopyRect] = []
        for copy in trace.copies:
            number = self._parameters[copy.parameter]
            part = (number, region_view(buffers.tensors[number], copy.destination))
            shape = whole[copy.source]
            rects += cut(buffers, part, part, copy.region, shape, salt(copy.source), number)
        kind = copier_class(destination.device)
        return kind(rects, buffers, destination.dtype, self._hashes, write=False)

    def _log_plans(self) -> None:
        """Log slow parameters and the traffic of the layout."""
        for name, refusal in self._destination.trace.refused.items():
            logger.warning(
                "%s is gathered whole at every reshard, which is slower and not verified: %s",
                name,
                refusal.reason,
            )
        if dist.get_rank() != 0:
            return
        mib = self._destination.dtype.itemsize / 2**20
        when = ("each time", "the first time")
        for executor, often in zip(self._executors[::-1], when, strict=False):
            plan = executor.plan
            logger.info(
                "reshard: %d buckets in %.0f MiB of staging memory; rank 0 takes part in %d sends, "
                "receives and all-gathers; it receives %.1f MiB %s, of which %.1f MiB are beyond "
                "what it holds under any layout",
                len(plan.buckets),
                sum(executor.staging_sizes()) * mib,
                sum(bucket.operations for bucket in plan.buckets),
                plan.received * mib,
                often,
                plan.unavoidable * mib,
            )


def _all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the tensors of a group's ranks, stacked."""
    every = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    dist.all_gather(list(every), tensor, group=group)
    return every
