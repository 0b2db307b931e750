"""Advantages from rewards, by the estimator of the config."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from hybridrl.algorithms.advantages import GROUP_WISE, Estimate
from hybridrl.algorithms.masked import check_finite, whiten_parts
from hybridrl.config.algorithm_schema import AlgorithmConfig
from hybridrl.config.estimators import TENSORS, estimator_of
from hybridrl.config.user_code.classes import locate
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.blocks import BLOCK_ELEMENTS, PaddedBlocks
from hybridrl.data.ragged import Ragged

# A block size above that of any batch.
WHOLE = 2**62


class AdvantageEstimator:
    """Advantage estimator that `algorithm.advantage` names.

    A group-wise function (algorithms/advantages.py) runs on blocks of the batch. Any other
    function runs on the whole batch, padded.

    Args:
        config: the algorithm section, checked.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        estimator = estimator_of(config.advantage)
        self._name = config.advantage
        function = locate("algorithm.advantage", estimator.path)
        self._is_group_wise = GROUP_WISE in vars(function)
        self._function = vars(function)[GROUP_WISE] if self._is_group_wise else function
        self._compares_groups = estimator.compares_groups
        self._tensors = [name for name in estimator.takes if name in TENSORS]
        settings = vars(config)
        self._settings = {name: settings[name] for name in estimator.takes if name in settings}
        self._whiten = config.whiten_advantages or self._function is not function

    def estimate(self, batch: RolloutBatch, rewards: Ragged) -> dict[str, Ragged]:
        """Estimate `advantages` and, with a critic, `returns`.

        Advantages are whitened over the tokens that count in the policy loss, if there are any.

        Args:
            batch: with its loss mask, and with values if the estimator needs them.
            rewards: per token, after the KL penalty.

        Raises:
            ValueError: the estimator rejects its input, or an advantage is NaN or infinite.
        """
        blocks = PaddedBlocks(
            batch.responses.lengths,
            batch.group_id if self._compares_groups else None,
            BLOCK_ELEMENTS if self._is_group_wise else WHOLE,
        )
        inputs = {name: _input(name, batch, rewards) for name in self._tensors}
        _check_finite(self._name, batch.response_mask, inputs)
        estimates = list(self._by_block(blocks, inputs))
        advantages = [estimate.advantages for estimate in estimates]
        if not all(bool(block.sum().isfinite()) for block in advantages):
            found = {"advantages": blocks.ragged(advantages)}
            _check_finite(f"the policy loss after {self._name}", batch.response_mask, found)
        if self._whiten and bool(batch.counted.values.any()):
            advantages = whiten_parts(advantages, list(blocks.of(batch.counted, False)))
        returns = [estimate.returns for estimate in estimates if estimate.returns is not None]
        found = {"advantages": blocks.ragged(advantages)}
        return found | ({"returns": blocks.ragged(returns)} if returns else {})

    def _by_block(
        self, blocks: PaddedBlocks, inputs: Mapping[str, Ragged | Tensor]
    ) -> Iterator[Estimate]:
        def of(value: Ragged | Tensor) -> Iterator[Tensor]:
            if isinstance(value, Ragged):
                return blocks.of(value, 0.0)
            return (value[rows] for rows in blocks.rows)

        padded = [of(value) for value in inputs.values()]
        for tensors in zip(*padded, strict=True):
            named = dict(zip(inputs, tensors, strict=True))
            yield Estimate(*self._function(**named, **self._settings))


def _input(name: str, batch: RolloutBatch, rewards: Ragged) -> Ragged | Tensor:
    """Return one of TENSORS: of tokens, or of responses [B]."""
    if name == "rewards":
        return rewards
    found = batch.counted if name == "loss_mask" else vars(batch)[name]
    assert found is not None, name
    return found


def _check_finite(function: str, mask: Ragged, fields: Mapping[str, Ragged | Tensor]) -> None:
    """Raise a ValueError if a field is NaN or infinite on the mask; it names the place."""
    for name, field in fields.items():
        if isinstance(field, Ragged) and not bool(field.values.sum().isfinite()):
            check_finite(function, mask.pad(False), **{name: field.pad(0.0)})
