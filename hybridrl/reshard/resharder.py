"""Resharder: moves the trainer's shards into the engine's live parameters and verifies them.

Frozen weights (those under adapters) have a plan of their own, which runs only if the engine does
not hold them yet. No full parameter is built.
"""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.distributed.part_timer import PartTimer
from hybridrl.distributed.regions import FP8, NamedShard, Trace, gathered
from hybridrl.reshard.copies import Buffers, Copier, CopyRect, cut, hashes, region_view, salt
from hybridrl.reshard.executor import PlanExecutor, ReshardError, copier_class
from hybridrl.reshard.plan import Plan, build_plans
from hybridrl.reshard.route import Route
from hybridrl.reshard.row_scales import RowScales
from hybridrl.reshard.transfers import SourceLayout

logger = logging.getLogger(__name__)

# Reasons why a parameter is wrong.
_REASONS = (
    "does not hold what was sent to it",
    "was sent weights that differ from the first replica's",
)


class Resharder:
    """One rank's part of a weight sync. Construction and all methods are collectives.

    Args:
        shards, trace, tensors, route: see `Side`.
        bucket_mb: MiB that a rank sends and receives at a time. Staging memory is at most twice
            that, and exists during `sync` only.

    Raises:
        ReshardError: the ranks would compute different plans.
        ValueError: the weights do not cover the engine's parameters.
    """

    def __init__(
        self,
        shards: Sequence[NamedShard],
        trace: Trace,
        tensors: Mapping[str, Tensor],
        route: Route,
        bucket_mb: int,
    ) -> None:
        self._trace = trace
        self._parameters = {name: tensors[name] for name in trace.parameters}
        rounded = (t for name, t in self._parameters.items() if name not in trace.dtypes)
        first = next(rounded)
        self._device, self._dtype = first.device, first.dtype
        self._route, self._group = route, route.group
        self._shards = {shard.name: shard for shard in shards}
        self._sources = [
            SourceLayout(s.name, tuple(s.shape), route.num_shards, s.dim) for s in shards
        ]
        # Hashes of all rows and columns, of tensors viewed as rows of their last dim.
        rows = max(1, *(math.prod(source.shape[:-1]) for source in self._sources))
        columns = max(source.shape[-1] for source in self._sources)
        self._hashes = hashes(rows, columns, self._device)
        frozen = [shard.name for shard in shards if shard.frozen]
        plans = self._agreed_plans((bucket_mb << 20) // self._dtype.itemsize, frozen)
        side = self._shards, self._parameters, route, self._hashes, self._dtype
        self._executors = [
            PlanExecutor(plan, *side, self._row_scales(plan, tensors)) for plan in plans
        ]
        self._numbers = {name: i for i, name in enumerate(self._parameters)}
        dtypes = dict.fromkeys([None, *trace.dtypes.values()])
        self._readers = [self._parameter_reader(dtype) for dtype in dtypes]
        names = {gathered(source.parameter) for source in trace.loaded}
        size = sum(self._parameters[name].nbytes for name in names)
        self._gathered = {"gathered_bytes": float(size)} if names else {}
        self._frozen_is_there = False
        self._sums_are_known = False
        for plan in plans if dist.get_rank() == 0 else []:
            dtype = plan.dtype or self._dtype
            logger.info(
                "reshard of %d weights%s: this rank receives %.1f MiB in %d buckets, with %d "
                "sends, receives and all-gathers",
                len(plan.sources),
                " in FP8" if dtype is FP8 else "",
                plan.received * dtype.itemsize / 2**20,
                len(plan.buckets),
                sum(bucket.operations for bucket in plan.buckets),
            )

    def sync(self, version: int, *, verify: bool, kept: bool = False) -> dict[str, float]:
        """Write the trainer's current weights into the engine's parameters.

        Args:
            version: version of the weights, for messages.
            verify: compare the fingerprints of all parameters afterwards.
            kept: the parameters still hold the last sync's weights: frozen ones do not move again.

        Returns:
            Seconds, device work included, of parts (`prepare_s`, `wait_s`, `move_s`, `verify_s`);
            bytes that this rank received and that it wrote into its parameters; `gathered_bytes`
            of them for vLLM's loader, if there are any.

        Raises:
            ReshardError: on all ranks if a parameter did not arrive as sent on any rank; or a
                shard does not have the planned shape.
        """
        only_live = kept and self._frozen_is_there and (self._sums_are_known or not verify)
        executors = [e for e in self._executors if not (only_live and e.plan.frozen)]
        # Until the end the content of the parameters is undefined.
        self._frozen_is_there = self._sums_are_known = False
        timer = PartTimer(self._device, one_stream=True)  # a thread beside sampling may sync
        for executor in executors:
            try:
                with timer.part("prepare_s"):
                    executor.prepare()
                with timer.part("wait_s"):  # so that a straggler does not count as a slow move
                    if dist.get_world_size(self._group) > 1:
                        dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
                with timer.part("move_s"):
                    executor.move(fingerprint=verify)
            finally:
                executor.release()
        self._sums_are_known = verify
        if verify:
            with timer.part("verify_s"):
                self.verify(version)
        self._frozen_is_there = True
        sizes = [(e.dtype.itemsize, e.plan) for e in executors]
        return timer.seconds | {
            "received_bytes": float(sum(size * plan.received for size, plan in sizes)),
            "written_bytes": float(sum(size * plan.written for size, plan in sizes)),
            **self._gathered,
        }

    @torch.no_grad()
    def verify(self, version: int) -> None:
        """Compare the live parameters with the fingerprints of the last sync with `verify`.

        Raises:
            ReshardError: on all ranks; names all parameters that differ on any rank.
        """
        assert self._sums_are_known, "the last sync left fingerprints out"
        present = torch.zeros(len(self._parameters), dtype=torch.int64, device=self._device)
        for reader in self._readers:
            reader.run(0, 1, present, paced=False)
        sent = torch.stack([executor.sent() for executor in self._executors]).sum(0)
        cells = sent.new_zeros(dist.get_world_size(self._group), len(self._parameters))
        cells[self._route.members] = sent
        arrived = torch.empty_like(cells)
        dist.all_to_all_single(arrived, cells, group=self._group)
        expected = arrived.sum(0)
        for scales in (e.scales for e in self._executors if e.scales is not None):
            scales.add_sums(present, expected)
        problems = torch.stack([present != expected, torch.zeros_like(present).bool()])
        for fill in self._trace.fills:
            region = region_view(self._parameters[fill.parameter], fill.region)
            problems[0, self._numbers[fill.parameter]] |= (region != fill.value).any()
        everyone = self._route.everyone
        if self._route.has_copies:
            problems[1] = _all_gather(expected, everyone)[self._twin] != expected
        ranks_of: dict[tuple[int, int], list[int]] = {}
        of_ranks = _all_gather(problems.to(torch.uint8), everyone)
        for rank, reason, index in of_ranks.nonzero().tolist():
            ranks_of.setdefault((index, reason), []).append(rank)
        if ranks_of:
            names = list(self._parameters)
            listed = [
                f"\n  {names[index]} on ranks {ranks}: {_REASONS[reason]}"
                for (index, reason), ranks in sorted(ranks_of.items())
            ]
            raise ReshardError(
                f"after reshard {version} the rollout engine's weights are not the actor's:"
                + "".join(listed)
            )

    def _agreed_plans(self, bucket_elements: int, frozen: list[str]) -> list[Plan]:
        """Return this rank's plans, after a check that all ranks plan from the same inputs."""
        inputs = repr((self._sources, frozen, bucket_elements)).encode()
        own = (self._trace, hashlib.blake2b(inputs).digest())
        everyone = self._route.everyone
        gathered: list[Any] = [None] * dist.get_world_size(everyone)
        dist.all_gather_object(gathered, own, group=everyone)
        traces, digests = zip(*gathered, strict=True)
        odd = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if odd:
            raise ReshardError(
                f"ranks {odd} would plan the reshard from other inputs than rank 0: their shards "
                "or rollout.reshard_bucket_mb differ"
            )
        # Ranks with equal traces hold equal weights, also those of other replicas.
        self._twin = traces.index(self._trace)
        numbers = dist.get_process_group_ranks(everyone)
        of_route = [numbers.index(peer) for peer in self._route.peers]
        group_traces = [traces[rank] for rank in of_route]
        rank = self._route.position
        return build_plans(self._sources, frozen, group_traces, rank, bucket_elements, traces)

    def _row_scales(self, plan: Plan, tensors: Mapping[str, Tensor]) -> RowScales | None:
        if plan.dtype is not FP8:
            return None
        return RowScales(plan.sources, self._trace, tensors, self._group, self._device)

    def _parameter_reader(self, of_dtype: torch.dtype | None) -> Copier:
        """Return a copier that only reads live parameters of a dtype; buffers and sums are theirs.

        None is the engine's dtype.
        """
        buffers = Buffers(self._device)
        buffers.bind(list(self._parameters.values()))
        whole = {source.name: source.shape for source in self._sources}
        rects: list[CopyRect] = []
        for copy in self._trace.copies:
            if self._trace.dtypes.get(copy.parameter) is not of_dtype:
                continue
            number = self._numbers[copy.parameter]
            part = (number, region_view(buffers.tensors[number], copy.destination))
            shape = whole[copy.source]
            rects += cut(buffers, part, part, copy.region, shape, salt(copy.source), number)
        copier = copier_class(self._device)
        return copier(rects, buffers, of_dtype or self._dtype, self._hashes, write=False)


def _all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the tensors of a group's ranks, stacked."""
    every = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    dist.all_gather(list(every), tensor, group=group)
    return every
