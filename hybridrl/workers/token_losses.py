"""Policy loss named in the config, called with its tensors and settings."""

from collections.abc import Mapping

from torch import Tensor

from hybridrl.algorithms.token_loss import TokenLoss
from hybridrl.config.algorithm_schema import FunctionConfig
from hybridrl.config.policy_losses import KEY, policy_loss_of
from hybridrl.config.user_code.classes import locate
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged

# Tensors from the batch; the others come from the forward pass and its layout.
BATCH_FIELDS = ("old_log_probs", "rollout_log_probs", "advantages", "selected")


class TokenLosses:
    """Function named by `algorithm.loss.function`, with its settings.

    Args:
        config: the loss and its settings, validated.
    """

    def __init__(self, config: FunctionConfig) -> None:
        loss = policy_loss_of(config.function)
        self._function = locate(f"{KEY}.function", loss.path)
        self._tensors = loss.tensors
        self._settings = {name: config.args[name] for name in loss.settings}

    def fields(self, micro: RolloutBatch) -> dict[str, Ragged | None]:
        """Return the fields of the batch that the function uses."""
        fields = vars(micro)
        return {name: fields[name] for name in BATCH_FIELDS if name in self._tensors}

    def of_tokens(self, tensors: Mapping[str, Tensor]) -> TokenLoss:
        """Compute the losses of a micro-batch's tokens.

        Args:
            tensors: [N] each, by name; unused ones are ignored.
        """
        taken = {name: tensors[name] for name in self._tensors}
        loss: TokenLoss = self._function(**taken, **self._settings)
        return loss
