"""Ranks between which weights move: those with shards send, those with an engine receive.

    colocated   the ranks of a dp_shard group, each of which sends and receives
    split       the ranks of one copy of the weights send, those of its engines receive

A plan does not distinguish them. A rank without an engine has an empty trace, one without weights
empty shards.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.distributed.mesh import device_of
from hybridrl.distributed.regions import NamedShard, Trace
from hybridrl.reshard.transfers import SourceLayout


class Route(NamedTuple):
    """Ranks of one plan.

    Attributes:
        everyone: group of all ranks of all routes; None: the default group.
        group: process group in which data moves, of at least the members.
        members: ranks in `group`, in the order of the plan; member s holds shard s of the weights.
        num_shards: members with weights, the first ones.
        has_copies: there are several copies of the weights, which are compared.
    """

    everyone: ProcessGroup | None
    group: ProcessGroup
    members: list[int]
    num_shards: int
    has_copies: bool

    @classmethod
    def colocated(cls, mesh: DeviceMesh) -> "Route":
        """Return the route of a rank of a training mesh, with an engine on every rank."""
        group = mesh.get_group("dp_shard")
        members = list(range(dist.get_world_size(group)))
        return cls(None, group, members, len(members), mesh["dp_replicate"].size() > 1)

    @property
    def position(self) -> int:
        """Place of this rank among the members."""
        return self.members.index(dist.get_rank(self.group))

    @property
    def peers(self) -> list[int]:
        """The members as torch.distributed numbers them in point-to-point operations."""
        numbers = dist.get_process_group_ranks(self.group)
        return [numbers[member] for member in self.members]


class Side(NamedTuple):
    """This rank's part of a weight sync.

    Attributes:
        shards: its shards of the trainer's weights, in one order on all ranks.
        trace: trace of the engine's loader on this rank.
        tensors: the live parameters of the engine by name, and the scales of those that are FP8;
            they never move.
        route: ranks between which data moves, with one replica of the weights.
    """

    shards: Sequence[NamedShard]
    trace: Trace
    tensors: dict[str, Tensor]
    route: Route


class _Offer(NamedTuple):
    """Facts about one rank that all others need; of weights or of an engine.

    Attributes:
        place: its copy of the weights and its shard; None for a rank of an engine.
        weights: name, shape, cut dim and frozen of each weight.
        parameters: names of the engine's parameters.
    """

    place: tuple[int, int] | None
    weights: list[tuple[str, tuple[int, ...], int, bool]]
    parameters: list[str]


def sender(
    shards: Sequence[NamedShard],
    mesh: DeviceMesh,
    dtype: torch.dtype,
    everyone: ProcessGroup,
    ranks_per_engine: int,
) -> Side:
    """Return the side of a rank with weights and without an engine; a collective of everyone.

    `everyone` are all ranks with weights and all of engines; `mesh` is the training mesh of the
    former. The engines' parameters are of `dtype`.
    """
    place = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
    weights = [(s.name, tuple(s.shape), s.dim, s.frozen) for s in shards]
    offers = _gathered(_Offer(place, weights, []), everyone)
    names = next(offer.parameters for offer in offers if offer.place is None)
    nothing = torch.empty(0, dtype=dtype, device=device_of(mesh))
    trace = Trace([], [], dict.fromkeys(names, (0,)))
    route = _split(offers, everyone, ranks_per_engine)
    return Side(shards, trace, dict.fromkeys(names, nothing), route)


def receiver(
    trace: Trace, tensors: dict[str, Tensor], everyone: ProcessGroup, ranks_per_engine: int
) -> Side:
    """Return the side of a rank of an engine without weights; see `sender`."""
    offers = _gathered(_Offer(None, [], list(trace.parameters)), everyone)
    route = _split(offers, everyone, ranks_per_engine)
    device = next(iter(tensors.values())).device
    shards = []
    for name, shape, dim, frozen in next(offer.weights for offer in offers if offer.place):
        held = SourceLayout(name, shape, route.num_shards, dim).region(route.position)
        assert held.numel == 0, "a rank of an engine holds no weights"
        empty = partial(torch.empty, held.shape, dtype=torch.float32, device=device)
        shards.append(NamedShard(name, shape, empty, dim, frozen))
    return Side(shards, trace, tensors, route)


def _split(offers: Sequence[_Offer], everyone: ProcessGroup, ranks_per_engine: int) -> Route:
    """Return the route of this rank; engines are assigned to the copies of the weights in turn."""
    holders = {offer.place: rank for rank, offer in enumerate(offers) if offer.place is not None}
    receivers = [rank for rank, offer in enumerate(offers) if offer.place is None]
    copies, shards = (1 + max(places) for places in zip(*holders, strict=True))
    of_copy: list[list[int]] = [
        [holders[copy, shard] for shard in range(shards)] for copy in range(copies)
    ]
    for index, rank in enumerate(receivers):
        of_copy[index // ranks_per_engine % copies].append(rank)
    mine = dist.get_rank(everyone)
    members = next(members for members in of_copy if mine in members)
    return Route(everyone, everyone, members, shards, copies > 1)


def _gathered(offer: _Offer, everyone: ProcessGroup) -> list[_Offer]:
    offers: list[Any] = [None] * dist.get_world_size(everyone)
    dist.all_gather_object(offers, offer, group=everyone)
    return offers
