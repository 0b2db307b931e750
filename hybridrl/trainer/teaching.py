"""Teachers in a step: what they read, advantages with their part, and metrics."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridrl.algorithms.distillation import distillation_advantages, spread
from hybridrl.algorithms.masked import on_mask
from hybridrl.config.schema import RunConfig, TeacherConfig
from hybridrl.data.batch import RolloutBatch, Values
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.alignment import Aligned
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.teachers import aligners
from hybridrl.models.resolve import read_model_config
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.record import Row


def teacher_fields(teacher: TeacherConfig | None, prompts: Sequence[Prompt]) -> dict[str, Values]:
    """Return the fields of a batch that teachers read; prompts[b] belongs to response b."""
    fields: dict[str, Values] = {}
    if teacher is None:
        return fields
    if len(teacher.paths) > 1:
        fields["teacher"] = torch.tensor([prompt.teacher for prompt in prompts])
    if any(prompt.teacher_ids for prompt in prompts):
        rows = [prompt.teacher_ids or prompt.token_ids for prompt in prompts]
        fields["teacher_prompts"] = Ragged.from_rows(rows, torch.int32)
    return fields


class OtherTokens:
    """Responses in the tokens of teachers with other tokenizers, and their log-probs back."""

    def __init__(self, config: RunConfig) -> None:
        assert config.teacher is not None
        self._aligners = aligners(config)
        paths = config.teacher.paths.values()
        self._positions = [read_model_config(p).get("max_position_embeddings") for p in paths]

    def read(self, batch: RolloutBatch) -> tuple[RolloutBatch, list[Aligned]]:
        """Return the responses as their teachers read them, and their spans.

        A response without a text is the teacher's end of a turn, which is in no span. So is what
        the teacher has no positions for.
        """
        several = "teacher" in batch.added
        chosen = batch.teacher.tolist() if several else [0] * len(batch)
        rows, aligned = list[list[int]](), list[Aligned]()
        given = batch.teacher_prompts.lengths.tolist(), batch.responses.rows()
        for index, length, response in zip(chosen, *given, strict=True):
            aligner, positions = self._aligners[index], self._positions[index]
            spans = aligner.align(response.tolist())
            aligned.append(spans if positions is None else spans.within(positions - length))
            rows.append(aligned[-1].teacher_ids or [aligner.teacher_end_id])
        read = unsampled(batch.teacher_prompts, Ragged.from_rows(rows, torch.int32), batch.group_id)
        return (read.adding(teacher=batch.teacher) if several else read), aligned

    def spread(self, old: Ragged, aligned: Sequence[Aligned], of_teacher: Ragged) -> Ragged:
        """Return the teachers' log-probs of the policy's tokens, whose own are `old`."""
        rows = [
            spread(own, read[: sum(spans.teacher_counts)], *map(torch.from_numpy, spans[1:]))
            for own, read, spans in zip(old.rows(), of_teacher.rows(), aligned, strict=True)
        ]
        return old.like(torch.cat(rows))


def unsampled(prompts: Ragged, responses: Ragged, group_id: Tensor) -> RolloutBatch:
    """Return responses that the policy has not sampled, of log-prob 0."""
    count = len(responses)
    return RolloutBatch(
        prompts=prompts,
        responses=responses,
        response_mask=responses.like(torch.ones_like(responses.values, dtype=torch.bool)),
        rollout_log_probs=responses.like(torch.zeros(len(responses.values))),
        group_id=group_id,
        weight_version=torch.zeros(count, dtype=torch.int64),
        truncated=torch.zeros(count, dtype=torch.bool),
    )


def taught_advantages(teacher: TeacherConfig, batch: RolloutBatch, own: Ragged) -> Ragged:
    """Compute advantages from those of the rewards, `own`, and the teachers' log-probs.

    With another objective than `sampled`, the actor's loss has the teachers' part.
    """
    log_probs = batch.teacher_log_probs.values, batch.old_log_probs.values
    coef = teacher.coef if teacher.is_sampled else 0.0
    values = distillation_advantages(
        own.values, *log_probs, reward_coef=teacher.reward_coef, coef=coef
    )
    return own.like(values.where(batch.response_mask.values, 0.0))


def teacher_metrics(batch: RolloutBatch, step: int) -> Row:
    """Compute the distance of policy and teachers on the sampled tokens.

    teacher/kl: mean of log p - log q, an estimate of KL(policy || teacher), nats per token.
    teacher/log_ratio_max: the largest |log p - log q|; 0 if the teacher is the policy.
    teacher/preference: mean of log q - log p over tokens of responses with a reward above their
    group's mean, less that over those below it. It is null without such responses.

    Raises:
        RunStopped: a teacher's log-prob is NaN or infinite.
    """
    log_probs = check_teachers(batch, step)
    ratio = log_probs - on_mask(batch.old_log_probs.values, batch.response_mask.values)
    return {
        "teacher/kl": 0.0 - float(ratio.mean()),
        "teacher/log_ratio_max": float(ratio.abs().max()),
        "teacher/preference": _preference(batch, ratio),
    }


def check_teachers(batch: RolloutBatch, step: int) -> Tensor:
    """Return the teachers' log-probs of the sampled tokens; RunStopped if one is not finite."""
    log_probs = on_mask(batch.teacher_log_probs.values, batch.response_mask.values)
    if wrong := int((~log_probs.isfinite()).sum()):
        raise RunStopped(
            f"step {step}: the teacher's log-probs of {wrong} tokens are NaN or infinite; try "
            f"fsdp.param_dtype=float32, or another checkpoint"
        )
    return log_probs


def _preference(batch: RolloutBatch, ratio: Tensor) -> float | None:
    """Compute teacher/preference; `ratio` is log q - log p of the tokens on the mask."""
    whole = batch.by_episode()
    values = whole.scores.values.double()
    scores = values.new_zeros(len(whole)).index_add(0, whole.scores.row_ids(), values)
    _, group = whole.group_id.unique(return_inverse=True)
    counts = group.bincount()
    means = scores.new_zeros(len(counts)).index_add(0, group, scores) / counts
    signs = (scores - means[group]).round(decimals=6).sign()
    above = on_mask(whole.responses.spread(signs), whole.response_mask.values)
    if not bool((above > 0).any() and (above < 0).any()):
        return None
    return float(ratio[above > 0].mean() - ratio[above < 0].mean())
