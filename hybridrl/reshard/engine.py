"""Moves the trainer's shards into the rollout engine's live parameters, by plan, and verifies it.

There is one plan for what never changes (the weights under adapters) and one for what does. The
first is carried out only where the engine does not hold these weights already. No full parameter is
ever built, except those of which some rank's loader does more than copy.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.distributed.part_timer import PartTimer
from hybridrl.distributed.shards import NamedShard, ShardKind
from hybridrl.reshard.copies import Buffers, Copies, Job, build_copies
from hybridrl.reshard.fingerprint import hashes
from hybridrl.reshard.layout import layouts_of
from hybridrl.reshard.mover import Destination, Mover, ReshardError, view
from hybridrl.reshard.plan import Plan, build_plans, digest
from hybridrl.reshard.tables import largest_index
from hybridrl.reshard.verify import (
    NOT_AS_SENT,
    REPLICAS_DIFFER,
    differing_replicas,
    expected_sums,
    replicas_take_alike,
    report,
)

logger = logging.getLogger(__name__)


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
        self._shards = {shard.name: shard for shard in shards}
        self._sources = layouts_of(shards, dist.get_world_size(self._group))
        self._hashes = hashes(*largest_index(self._sources), destination.device)
        frozen = [shard.name for shard in shards if shard.kind is ShardKind.frozen]
        plans = self._agreed_plans((bucket_mb << 20) // destination.dtype.itemsize, frozen)
        self._movers = [self._mover(plan) for plan in plans]
        self._parameters = plans[0].parameters
        self._found = self._build_found()
        self._frozen_is_there = False
        self._sent_is_known = False
        self._log_plans()

    def sync(self, version: int, *, verify: bool, kept: bool = False) -> dict[str, float]:
        """Write the trainer's current weights into the engine's parameters.

        Args:
            version: of the weights, for messages.
            verify: compare fingerprints on both sides afterwards, also of what was not moved
                again.
            kept: whether the parameters hold what the last sync wrote; then weights that never
                change are not moved again.

        Returns:
            Seconds of looking up where everything lies and taking staging memory (`prepare_s`),
            until the other ranks of its group had done so, too (`wait_s`), of moving (`move_s`) and
            of comparing (`verify_s`), each until the device was done; the bytes that this rank
            received from others and those that it wrote into its parameters.

        Raises:
            ReshardError: on all ranks, if a parameter did not arrive as it was sent on any; or a
                shard has not the shape that was planned.
        """
        movers = self._due(verify=verify, kept=kept)
        # Until all is done nothing is known of what the parameters hold.
        self._frozen_is_there = self._sent_is_known = False
        timer = PartTimer(self._destination.device)
        for mover in movers:
            try:
                with timer.part("prepare_s"):
                    mover.prepare()
                with timer.part("wait_s"):
                    self._meet()
                with timer.part("move_s"):
                    mover.move(fingerprint=verify)
            finally:
                mover.release()
        self._sent_is_known = verify
        if verify:
            with timer.part("verify_s"):
                self.verify(version)
        self._frozen_is_there = True
        size = self._destination.dtype.itemsize
        return timer.seconds | {
            "received_bytes": float(size * sum(mover.plan.received for mover in movers)),
            "written_bytes": float(size * sum(mover.plan.written for mover in movers)),
        }

    @torch.no_grad()
    def verify(self, version: int) -> None:
        """Compare what was sent last, by syncs with `verify`, with what the parameters hold now.

        Raises:
            ReshardError: on all ranks, if a parameter differs on any; names all that do.
        """
        assert self._sent_is_known, "the last sync left fingerprints out"
        names, tensors = self._parameters, self._destination.tensors
        found = torch.zeros(len(names), dtype=torch.int64, device=self._destination.device)
        self._found.run(0, 1, found, paced=False)
        cells = torch.stack([mover.sums.cells() for mover in self._movers]).sum(0)
        expected = expected_sums(cells, self._group)
        problems = (found != expected).to(torch.uint8) * NOT_AS_SENT
        for fill in (fill for mover in self._movers for fill in mover.plan.fills):
            region = view(tensors[fill.parameter], fill.region)
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

    def _meet(self) -> None:
        """Wait for the ranks that exchange with this one: a late one is no slow move of others."""
        if dist.get_world_size(self._group) > 1:
            dist.all_reduce(torch.zeros(1, device=self._destination.device), group=self._group)

    def _due(self, *, verify: bool, kept: bool) -> list[Mover]:
        """What has to be carried out: all plans, or only that of what changes."""
        sums_are_known = self._sent_is_known or not verify
        if kept and self._frozen_is_there and sums_are_known:
            return self._movers[-1:]
        return self._movers

    def _agreed_plans(self, bucket_elements: int, frozen: list[str]) -> list[Plan]:
        """This rank's plans, once all ranks would compute them from the same inputs."""
        traces = self._all_ranks(self._destination.trace)
        inputs = (digest(self._sources, traces, bucket_elements), frozen)
        digests = self._all_ranks(inputs)
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
        rank = dist.get_rank(self._group)
        group_traces = [traces[member] for member in members]
        return build_plans(self._sources, frozen, group_traces, rank, bucket_elements)

    def _mover(self, plan: Plan) -> Mover:
        sources = [source for source in self._sources if source.name in plan.sources]
        shards = [self._shards[source.name] for source in sources]
        return Mover(plan, shards, sources, self._destination, self._group, self._hashes)

    def _all_ranks(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def _build_found(self) -> Copies:
        """What reads the live parameters, which stay where they are."""
        parameters = Buffers(self._destination.device)
        parameters.place(self._live_parameters())
        pieces = [piece for mover in self._movers for piece in mover.tables.found()]
        dtype = self._destination.dtype
        return build_copies(Job(pieces, parameters, dtype, self._hashes, write=False))

    def _live_parameters(self) -> list[Tensor]:
        return [self._destination.tensors[name] for name in self._parameters]

    def _log_plans(self) -> None:
        """Say once what is slow, and what the layout costs."""
        for name, refusal in self._destination.trace.refused.items():
            logger.warning(
                "%s is gathered whole at every reshard, which is slower and not verified: %s",
                name,
                refusal.reason,
            )
        if dist.get_rank() != 0:
            return
        mib = self._destination.dtype.itemsize / 2**20
        for mover, what in zip(self._movers[::-1], ("each time", "the first time"), strict=False):
            logger.info(
                "reshard: %d buckets in %.0f MiB of staging memory; rank 0 takes part in %d sends, "
                "receives and all-gathers; it receives %.1f MiB "
                "%s, of which %.1f MiB are beyond what it holds under any layout",
                len(mover.plan.buckets),
                mover.staging.nbytes / 2**20,
                sum(bucket.operations for bucket in mover.plan.buckets),
                mover.plan.received * mib,
                what,
                mover.plan.unavoidable * mib,
            )
