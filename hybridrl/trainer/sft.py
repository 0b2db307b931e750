"""Supervised fine-tuning (SFT): the loop of PPO, with reference answers in place of sampled ones.

update      actor, packed micro-batches: the likelihood of the reference answers
evaluate    reshard, sampled held-out responses; likelihood of the held-out reference answers
log, checkpoint
"""

from collections.abc import Sequence

import torch

from hybridrl.algorithms.masked import masked_mean
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import schedule
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.checkpointing.resume import Resume
from hybridrl.trainer.loop import TrainingLoop
from hybridrl.trainer.timing.engines import response_metrics


class SFTTrainer(TrainingLoop):
    """Trains the actor on reference answers; vLLM is awake during evaluations only."""

    def train(self, step: int) -> None:
        """Take the optimizer steps on the next prompts' reference answers."""
        batch = reference_batch(self.prompts.take(self.config.data.prompts_per_step))
        self.metrics |= response_metrics(batch)
        self.update(schedule(batch, self.sizes, seed=self.config.seed, step=step), step)

    def evaluate(self, step: int) -> None:
        """Measure held-out accuracy and likelihood."""
        super().evaluate(step)
        with self.phases.section("evaluate"):
            self.engine.sleep()
            self.metrics["eval/nll"] = self.held_out_nll()

    def resume(self, resume: Resume) -> None:
        """Restore the state of a checkpoint."""
        super().resume(resume)
        self.engine.sleep()

    def held_out_nll(self) -> float:
        """Compute the mean of -log p over the tokens of the held-out reference answers, nats."""
        batch = reference_batch(self.evaluator.prompts)
        log_probs = self.forward_any("compute_log_probs", batch)
        return -float(masked_mean(log_probs.values, batch.response_mask.values))


def reference_batch(prompts: Sequence[Prompt]) -> RolloutBatch:
    """Return the reference answers as responses that nobody sampled, of log-prob 0."""
    responses = Ragged.from_rows([prompt.answer_ids for prompt in prompts], torch.int32)
    return RolloutBatch(
        prompts=Ragged.from_rows([prompt.token_ids for prompt in prompts], torch.int32),
        responses=responses,
        response_mask=responses.like(torch.ones_like(responses.values, dtype=torch.bool)),
        rollout_log_probs=responses.like(torch.zeros(len(responses.values))),
        group_id=torch.tensor([prompt.prompt_id for prompt in prompts]),
        weight_version=torch.zeros(len(prompts), dtype=torch.int64),
        truncated=torch.zeros(len(prompts), dtype=torch.bool),
    )
