"""Multi-turn generation: the policy and an environment take turns, until a limit or the end.

    turn 1      all prompts, as in single-turn generation
    turn k      every open conversation: prompt = all its tokens so far, one sample, on the
                engine that has them cached
    between     the environments reply, in their own processes

The result is a rollout like any other. It holds the sampled tokens and, between them, those of the
environment, where response_mask is false and rollout_log_probs are 0.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybridrl.data.batch import Generate, PromptBatch, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.trainer.multi_turn.conversations import Conversations
from hybridrl.trainer.sampling.drafts import Draft, advanced, batch_of
from hybridrl.trainer.sampling.generation import total_stats


class MultiTurn:
    """Generator of conversations; `sample_turn` samples one turn of the policy."""

    def __init__(self, sample_turn: Generate, conversations: Conversations) -> None:
        self._sample_turn = sample_turn
        self.conversations = conversations

    def __call__(self, prompts: PromptBatch) -> RolloutBatch:
        """Generate `responses_per_prompt` conversations from each prompt, in order."""
        talks = self.conversations
        talks.take_seconds()
        request = replace(prompts, stop_token_ids=talks.stop_token_ids)
        opened = talks.open(request.prompt_id.tolist())
        which = [p for p in range(len(request)) for _ in range(request.responses_per_prompt)]
        parts = [self._sample_turn(self._first(request, opened))]
        drafts = advanced([opened[prompt] for prompt in which], parts[0], talks)
        while going := [index for index, draft in enumerate(drafts) if not draft.finished]:
            later = self._later(request, drafts, going, turn=len(parts), engine=parts[0].engine)
            parts.append(self._sample_turn(later))
            new = advanced([drafts[index] for index in going], parts[-1], talks)
            for index, draft in zip(going, new, strict=True):
                drafts[index] = draft
        versions = torch.cat([part.weight_version for part in parts])
        assert (versions == versions[0]).all(), "the weights changed within a conversation"
        prompts_of = request.prompts.select(which)
        return replace(
            batch_of(drafts, prompts_of, request.prompt_id[which], talks),
            token_versions=None,
            engine=parts[0].engine,
            engines=total_stats([part.engines for part in parts]),
        )

    def _first(self, request: PromptBatch, opened: Sequence[Draft]) -> PromptBatch:
        """Return the request of the first turns, which follow the openings, if there are any."""
        if not any(map(len, opened)):
            return request
        rows = zip(request.prompts.rows(), opened, strict=True)
        prompts = [torch.cat([row, draft.tokens]) for row, draft in rows]
        left = torch.tensor([self.conversations.limits.max_tokens - len(d) for d in opened])
        return replace(request, prompts=Ragged.from_rows(prompts, torch.int32), max_tokens=left)

    def _later(
        self,
        request: PromptBatch,
        drafts: Sequence[Draft],
        going: Sequence[int],
        *,
        turn: int,
        engine: Tensor | None,
    ) -> PromptBatch:
        """Return the request of a later turn, whose prompts are the open conversations so far.

        `engine` is the engine of each response in the first turn, if known.
        """
        each, limit = request.responses_per_prompt, self.conversations.limits.max_tokens
        rows, which = request.prompts.rows(), [index // each for index in going]
        sample = torch.tensor([index % each for index in going])
        first = 0 if request.first_sample is None else request.first_sample[which]
        prompts = [torch.cat([rows[index // each], drafts[index].tokens]) for index in going]
        return replace(
            request,
            prompts=Ragged.from_rows(prompts, torch.int32),
            prompt_id=request.prompt_id[which],
            responses_per_prompt=1,
            expected_tokens=None,
            first_sample=first + sample,
            turn=turn,
            max_tokens=torch.tensor([limit - len(drafts[index]) for index in going]),
            engine=None if engine is None else engine[[prompt * each for prompt in which]],
        )
