"""Verification of a reshard: compares fingerprints of sent weights and live parameters.

sums while packing and copying -> cells (receiver, parameter) -> all-to-all -> expected
one read of the live parameters -------------------------------------------> found
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# Reasons why a parameter is wrong, as bits of a byte.
NOT_AS_SENT, REPLICAS_DIFFER = 1, 2

_REASONS = {
    NOT_AS_SENT: "does not hold what was sent to it",
    REPLICAS_DIFFER: "was sent weights that differ from the first replica's",
    NOT_AS_SENT | REPLICAS_DIFFER: "does not hold what was sent, which differs between replicas",
}


class FingerprintSums:
    """Sums of sent fingerprints, one per set of cells (receiver, parameter).

    A transfer to several receivers is fingerprinted once and counts for all of them.

    Args:
        num_receivers: ranks of the shard group.
        num_parameters: of the engine.
    """

    def __init__(self, num_receivers: int, num_parameters: int) -> None:
        self._shape = (num_receivers, num_parameters)
        self._numbers: dict[tuple[tuple[int, int], ...], int] = {}

    def number(self, cells: Iterable[tuple[int, int]]) -> int:
        """Return the number of the sum that counts for these cells."""
        return self._numbers.setdefault(tuple(sorted(cells)), len(self._numbers))

    def allocate(self, device: torch.device) -> None:
        """Allocate the sums, once all numbers are assigned."""
        pairs = [
            (number, receiver * self._shape[1] + parameter)
            for cells, number in self._numbers.items()
            for receiver, parameter in cells
        ]
        index = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).to(device)
        self._from, self._to = index.unbind(1)
        self.values = torch.zeros(len(self._numbers), dtype=torch.int64, device=device)

    def cells(self) -> Tensor:
        """Return [receivers, parameters] int64: the expected sums of each receiver."""
        flat = self.values.new_zeros(self._shape[0] * self._shape[1])
        return flat.index_add_(0, self._to, self.values[self._from]).view(self._shape)


def expected_sums(cells: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's expected sums, [parameters] int64; a collective of the shard group."""
    arrived = torch.empty_like(cells)
    dist.all_to_all_single(arrived, cells, group=group)
    return arrived.sum(0)


def differing_replicas(expected: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [parameters] bool: true where this rank was sent other weights than replica 0."""
    replicas = expected.new_empty((dist.get_world_size(group), len(expected)))
    dist.all_gather(list(replicas), expected, group=group)
    return replicas[0] != expected


def report(problems: Tensor, parameters: Sequence[str]) -> str:
    """Describe wrong parameters and their ranks, "" if none; a collective of all ranks.

    Args:
        problems: [parameters] uint8 of this rank, bits as above.
        parameters: names of the parameters.
    """
    by_rank = problems.new_empty((dist.get_world_size(), len(problems)))
    dist.all_gather(list(by_rank), problems)
    wrong = by_rank.cpu()
    ranks_of: dict[tuple[str, int], list[int]] = {}
    for rank, index in wrong.nonzero().tolist():
        key = (parameters[index], int(wrong[rank, index]))
        ranks_of.setdefault(key, []).append(rank)
    return "\n  ".join(
        f"{name} on ranks {ranks}: {_REASONS[kind]}"
        for (name, kind), ranks in sorted(ranks_of.items())
    )


def replicas_match(traces: Sequence[object], mesh: DeviceMesh) -> bool:
    """Return whether ranks with the same shards in different replicas have the same trace.

    Only then can replicas be compared: an engine that spans replicas gives each another slice.

    Args:
        traces: traces of all ranks.
        mesh: the training mesh.
    """
    ranks = dist.get_process_group_ranks(mesh.get_group("dp_replicate"))
    alike = all(traces[rank] == traces[ranks[0]] for rank in ranks)
    everywhere: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, alike)
    return all(everywhere)
