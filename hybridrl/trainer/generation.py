"""Generation of responses; the implementation is chosen once, where the trainer is built.

SingleTurn                one response of the policy to each prompt
multi_turn/generator.py   the policy and an environment take turns
"""

from typing import Protocol

from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import PromptBatch, Rollout


class Generator(Protocol):
    """Source of responses, sampled with the weights that the rollout engines hold."""

    def generate(self, prompts: PromptBatch) -> Rollout:
        """Generate `responses_per_prompt` responses to each prompt."""
        ...


class SingleTurn:
    """Generator of responses that are one turn of the policy.

    Args:
        rollout: the rollout engines of all ranks.
    """

    def __init__(self, rollout: WorkerGroup) -> None:
        self._rollout = rollout

    def generate(self, prompts: PromptBatch) -> Rollout:
        """Sample on all engines."""
        rollout: Rollout = self._rollout.call("generate", prompts)
        return rollout
