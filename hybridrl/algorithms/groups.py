"""Groups of responses to the same prompt, and reductions over them.

Shapes:  B = responses   G = groups (prompts)
"""

from typing import NamedTuple

from torch import Tensor


class Groups(NamedTuple):
    """Partition of responses into groups.

    Attributes:
        index: [B] int64, group of each response, 0 to G - 1.
        sizes: [G] int64, responses of each group.
    """

    index: Tensor
    sizes: Tensor

    @property
    def size(self) -> Tensor:
        """[B] int64: number of responses of each response's group."""
        return self.sizes[self.index]

    def sum(self, values: Tensor) -> Tensor:
        """Return [B] the sum of `values` [B] over each response's group."""
        total = values.new_zeros(len(self.sizes)).index_add_(0, self.index, values)
        return total[self.index]

    def maximum(self, values: Tensor) -> Tensor:
        """Return [B] the maximum of `values` [B] over each response's group."""
        largest = values.new_zeros(len(self.sizes)).scatter_reduce(
            0, self.index, values, "amax", include_self=False
        )
        return largest[self.index]

    def centred(self, values: Tensor) -> Tensor:
        """Return [B] `values` [B] minus their group's mean; exactly 0 if a group's are equal."""
        # Subtract a member of the group first: equal values are then 0 despite rounding.
        relative = values - self.maximum(values)
        return relative - self.sum(relative) / self.size


def grouped(function: str, rewards: Tensor, group_id: Tensor, *, at_least: int = 2) -> Groups:
    """Build the groups of a batch.

    Args:
        function: name of the caller, for errors.
        rewards: [B, T].
        group_id: [B] int, responses of one prompt share it.
        at_least: minimum size of a group.

    Raises:
        ValueError: group_id is not [B], or a group has fewer responses.
    """
    if group_id.shape != rewards.shape[:1]:
        raise ValueError(
            f"{function} needs rewards [B, T] and group_id [B]; got shapes "
            f"{tuple(rewards.shape)} and {tuple(group_id.shape)}"
        )
    names, index, sizes = group_id.unique(return_inverse=True, return_counts=True)
    too_small = sizes < at_least
    if bool(too_small.any()):
        raise ValueError(
            f"{function} needs at least {at_least} responses in every group; group "
            f"{int(names[too_small][0])} has {int(sizes[too_small][0])}"
        )
    return Groups(index, sizes)
