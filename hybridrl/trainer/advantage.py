"""From rewards to advantages by the estimator that the config names."""

from torch import Tensor

from hybridrl.algorithms.advantages import Estimate, whiten
from hybridrl.algorithms.masked import check_finite
from hybridrl.config.algorithm_schema import AlgorithmConfig
from hybridrl.config.classes import locate
from hybridrl.config.estimators import TENSORS, estimator_of
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged


class AdvantageEstimator:
    """Calls the function that `algorithm.advantage` names with what it takes.

    Args:
        config: the algorithm section, checked.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        estimator = estimator_of(config.advantage)
        self._name = config.advantage
        self._function = locate("algorithm.advantage", estimator.path)
        self._tensors = [name for name in estimator.takes if name in TENSORS]
        settings = vars(config)
        self._settings = {name: settings[name] for name in estimator.takes if name in settings}
        self._whiten = config.whiten_advantages

    def estimate(self, batch: RolloutBatch, rewards: Ragged) -> dict[str, Ragged]:
        """`advantages` and, of estimators with a critic, `returns` of a scored batch.

        Args:
            batch: with values if the estimator takes them.
            rewards: per token, after the KL penalty.

        Raises:
            ValueError: the estimator refuses its input, or an advantage is NaN or infinite.
        """
        mask = batch.response_mask.pad(False)
        tensors = {name: _tensor(name, batch, rewards, mask) for name in self._tensors}
        estimate: Estimate = self._function(**tensors, **self._settings)
        advantages, returns = estimate
        check_finite(f"the policy loss after {self._name}", mask, advantages=advantages)
        if self._whiten:  # what does not count in the loss has no part in mean and deviation
            counted = batch.counted.pad(False)
            if bool(counted.any()):
                advantages = whiten(advantages, counted)
        found = {"advantages": advantages} | ({} if returns is None else {"returns": returns})
        lengths = batch.responses.lengths
        return {name: Ragged.from_padded(tensor, lengths) for name, tensor in found.items()}


def _tensor(name: str, batch: RolloutBatch, rewards: Ragged, mask: Tensor) -> Tensor:
    """One of TENSORS, token fields padded to [B, T]."""
    if name == "response_mask":
        return mask
    if name == "group_id":
        return batch.group_id
    if name == "rewards":
        return rewards.pad(0.0)
    if name == "baseline_rewards":
        assert batch.baseline_rewards is not None, name
        return batch.baseline_rewards
    assert name == "values" and batch.values is not None, name
    return batch.values.pad(0.0)
