"""Resharder: moves the trainer's shards into the engine's live parameters and verifies them.

Frozen weights (those under adapters) have a plan of their own, which runs only if the engine does
not hold them yet. No full parameter is built, unless some rank's loader does more than copy it.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.distributed.part_timer import PartTimer
from hybridrl.distributed.shards import NamedShard, ShardKind
from hybridrl.reshard.buffers import Buffers
from hybridrl.reshard.copies import Copier, build_copier
from hybridrl.reshard.executor import Destination, PlanExecutor, ReshardError, region_view
from hybridrl.reshard.fingerprint import hashes
from hybridrl.reshard.plan import Plan, build_plans, digest
from hybridrl.reshard.source_layout import largest_index, layouts_of
from hybridrl.reshard.verify import (
    NOT_AS_SENT,
    REPLICAS_DIFFER,
    differing_replicas,
    expected_sums,
    replicas_match,
    report,
)

logger = logging.getLogger(__name__)


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
        self._sources = layouts_of(shards, dist.get_world_size(self._group))
        self._hashes = hashes(*largest_index(self._sources), destination.device)
        frozen = [shard.name for shard in shards if shard.kind is ShardKind.frozen]
        plans = self._agreed_plans((bucket_mb << 20) // destination.dtype.itemsize, frozen)
        self._executors = [self._executor(plan) for plan in plans]
        self._parameters = plans[0].parameters
        self._reader = self._parameter_reader()
        self._frozen_is_there = False
        self._sums_are_known = False
        self._log_plans()

    def sync(self, version: int, *, verify: bool, kept: bool = False) -> dict[str, float]:
        """Write the trainer's current weights into the engine's parameters.

        Args:
            version: version of the weights, for messages.
            verify: compare fingerprints on both sides afterwards, including frozen weights that
                were not moved again.
            kept: true if the parameters still hold the last sync's weights; then frozen weights
                are not moved again.

        Returns:
            Seconds, device work included, of looking up addresses and allocating staging memory
            (`prepare_s`), waiting for the group (`wait_s`), moving (`move_s`) and comparing
            (`verify_s`); bytes that this rank received and that it wrote into its parameters.

        Raises:
            ReshardError: on all ranks if a parameter did not arrive as sent on any rank; or a
                shard does not have the planned shape.
        """
        executors = self._due(verify=verify, kept=kept)
        # Until the end the content of the parameters is undefined.
        self._frozen_is_there = self._sums_are_known = False
        timer = PartTimer(self._destination.device)
        for executor in executors:
            try:
                with timer.part("prepare_s"):
                    executor.prepare()
                with timer.part("wait_s"):
                    self._wait_for_group()
                with timer.part("move_s"):
                    executor.move(fingerprint=verify)
            finally:
                executor.release()
        self._sums_are_known = verify
        if verify:
            with timer.part("verify_s"):
                self.verify(version)
        self._frozen_is_there = True
        size = self._destination.dtype.itemsize
        return timer.seconds | {
            "received_bytes": float(size * sum(executor.plan.received for executor in executors)),
            "written_bytes": float(size * sum(executor.plan.written for executor in executors)),
        }

    @torch.no_grad()
    def verify(self, version: int) -> None:
        """Compare the live parameters with the fingerprints of the last sync with `verify`.

        Raises:
            ReshardError: on all ranks if a parameter differs on any rank; names all that differ.
        """
        assert self._sums_are_known, "the last sync left fingerprints out"
        names, tensors = self._parameters, self._destination.tensors
        found = torch.zeros(len(names), dtype=torch.int64, device=self._destination.device)
        self._reader.run(0, 1, found, paced=False)
        cells = torch.stack([executor.sums.cells() for executor in self._executors]).sum(0)
        expected = expected_sums(cells, self._group)
        problems = (found != expected).to(torch.uint8) * NOT_AS_SENT
        for fill in (fill for executor in self._executors for fill in executor.plan.fills):
            region = region_view(tensors[fill.parameter], fill.region)
            problems[names.index(fill.parameter)] |= (region != fill.value).any()
        if self._compares_replicas:
            differ = differing_replicas(expected, self._mesh.get_group("dp_replicate"))
            problems |= differ.to(torch.uint8) * REPLICAS_DIFFER
        listed = report(problems, names)
        if listed:
            raise ReshardError(
                f"after reshard {version} the rollout engine's weights are not the actor's:\n"
                f"  {listed}"
            )

    def _wait_for_group(self) -> None:
        """Wait for the ranks of the group, so that a straggler does not count as a slow move."""
        if dist.get_world_size(self._group) > 1:
            dist.all_reduce(torch.zeros(1, device=self._destination.device), group=self._group)

    def _due(self, *, verify: bool, kept: bool) -> list[PlanExecutor]:
        """Return the executors to run: all, or only that of weights that change."""
        sums_are_known = self._sums_are_known or not verify
        if kept and self._frozen_is_there and sums_are_known:
            return self._executors[-1:]
        return self._executors

    def _agreed_plans(self, bucket_elements: int, frozen: list[str]) -> list[Plan]:
        """Return this rank's plans, after a check that all ranks plan from the same inputs."""
        traces = self._all_ranks(self._destination.trace)
        inputs = (digest(self._sources, traces, bucket_elements), frozen)
        digests = self._all_ranks(inputs)
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if odd:
            raise ReshardError(
                f"ranks {odd} would plan the reshard from other inputs than rank 0: their shards, "
                "traces or rollout.reshard_bucket_mb differ"
            )
        self._compares_replicas = self._mesh["dp_replicate"].size() > 1 and replicas_match(
            traces, self._mesh
        )
        members = dist.get_process_group_ranks(self._group)
        rank = dist.get_rank(self._group)
        group_traces = [traces[member] for member in members]
        return build_plans(self._sources, frozen, group_traces, rank, bucket_elements)

    def _executor(self, plan: Plan) -> PlanExecutor:
        sources = [source for source in self._sources if source.name in plan.sources]
        shards = [self._shards[source.name] for source in sources]
        return PlanExecutor(plan, shards, sources, self._destination, self._group, self._hashes)

    def _all_ranks(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def _parameter_reader(self) -> Copier:
        """Return a copier that only reads the live parameters, whose addresses never change."""
        parameters = Buffers(self._destination.device)
        parameters.bind([self._destination.tensors[name] for name in self._parameters])
        rects = [rect for executor in self._executors for rect in executor.lowered.written()]
        return build_copier(rects, parameters, self._destination.dtype, self._hashes, write=False)

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
                "receives and all-gathers; it receives %.1f MiB "
                "%s, of which %.1f MiB are beyond what it holds under any layout",
                len(plan.buckets),
                executor.staging.nbytes / 2**20,
                sum(bucket.operations for bucket in plan.buckets),
                plan.received * mib,
                often,
                plan.unavoidable * mib,
            )
