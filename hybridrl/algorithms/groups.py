"""Which responses answer the same prompt, and sums over them.

Shapes:  B = responses   G = groups (prompts)
"""

from typing import NamedTuple

from torch import Tensor


class Groups(NamedTuple):
    """Which responses belong together.

    Attributes:
        index: [B] int64, the group of each response, 0 to G - 1.
        sizes: [G] int64, responses of each group.
    """

    index: Tensor
    sizes: Tensor

    @property
    def size(self) -> Tensor:
        """[B] int64: how many responses each response's group has."""
        return self.sizes[self.index]

    def sum(self, values: Tensor) -> Tensor:
        """[B]: the sum of `values` [B] over each response's group."""
        total = values.new_zeros(len(self.sizes)).index_add_(0, self.index, values)
        return total[self.index]

    def maximum(self, values: Tensor) -> Tensor:
        """[B]: the largest of `values` [B] in each response's group."""
        largest = values.new_zeros(len(self.sizes)).scatter_reduce(
            0, self.index, values, "amax", include_self=False
        )
        return largest[self.index]

    def centred(self, values: Tensor) -> Tensor:
        """[B]: `values` [B] less their group's mean; exactly 0 where all of a group are equal."""
        # Relative to a member of the group, equal values are 0, whatever their mean rounds to.
        relative = values - self.maximum(values)
        return relative - self.sum(relative) / self.size


def grouped(function: str, rewards: Tensor, group_id: Tensor, *, at_least: int = 2) -> Groups:
    """The groups of a batch.

    Args:
        function: whom errors name.
        rewards: [B, T].
        group_id: [B] int, responses of one prompt share it.
        at_least: responses that every group must have.

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
