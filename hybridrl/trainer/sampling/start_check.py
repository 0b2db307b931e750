"""Comparison at the start: what vLLM samples after short and long prompts, and the actor's numbers.

Structure does not show every mistake: two models with equal weights may see windows of different
lengths. So one prompt is shorter than the sliding window and one longer, whatever the run's own
prompts are. Of those, some with images are compared as well, if there are any. Seeds of the run's
samples do not depend on these.
"""

from collections.abc import Sequence
from typing import Any

import torch

from hybridrl.config.choices import DType
from hybridrl.config.planner.families import placeholder_ids
from hybridrl.config.planner.shape import LayerShape, ModelShape
from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.requests import Request, Requests, SamplingParams
from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.image_tokens import processed
from hybridrl.data.sources.prompts import Prompt
from hybridrl.models.resolve import read_model_config
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.mismatch import check_rollout_log_probs
from hybridrl.trainer.timing.phases import Phases
from hybridrl.trainer.updates import Updates

# Prompts of each length, responses to each and their tokens; tokens of the shortest prompts.
PROMPTS, RESPONSES, TOKENS, SHORT = 4, 2, 16, 8


class StartCheck:
    """Comparison before the first update of a process; nothing afterwards.

    `seen` are prompts with images.
    """

    def __init__(
        self,
        config: RunConfig,
        shape: ModelShape,
        rollout: WorkerGroup,
        updates: Updates,
        phases: Phases,
        seen: Sequence[Prompt] = (),
    ) -> None:
        self._config = config
        self._seen = seen
        self._shape = shape
        self._rollout = rollout
        self._updates = updates
        self._phases = phases
        dtypes = config.rollout.dtype, config.fsdp.param_dtype
        self._is_float32 = all(dtype is DType.float32 for dtype in dtypes)
        # With rollout.exact each token of an update is compared.
        self._is_due = not config.rollout.exact
        self._sampled: RolloutBatch | None = None

    def sample(self) -> None:
        """Sample responses, with the actor's weights in vLLM."""
        if self._is_due:
            self._is_due = False
            with self._phases.section("rollout"):
                self._sampled = self._rollout.call("generate", self._requests())

    def compare(self) -> None:
        """Compare the responses' log-probs with the actor's, while vLLM sleeps.

        Raises:
            RunStopped: they differ by more than trainer.max_log_prob_diff after prompts of a
                length: in float32 any token, else the mean as in mismatch.py.
        """
        batch, self._sampled = self._sampled, None
        if batch is None:
            return
        limit = self._config.trainer.max_log_prob_diff
        assert limit is not None, "derived"
        with self._phases.section("score"):
            trained = self._updates.log_probs(batch)
        sees = [row is not None for row in batch.images.rows] if batch.images else [False]
        lengths = torch.stack(torch.broadcast_tensors(batch.prompts.lengths, torch.tensor(sees)), 1)
        lengths, kinds = lengths.unique(dim=0, return_inverse=True)
        difference = (batch.rollout_log_probs.values - trained.values).abs()
        above = trained.like(~(difference <= limit))  # NaN is above, too

        def where(kind: int) -> str:
            rows = zip(above.rows(), kinds.tolist(), strict=True)
            firsts = [int(row.int().argmax()) for row, own in rows if own == kind and row.any()]
            length, sees = lengths[kind].tolist()
            after = f"{length} tokens{' with images' * sees}"
            return f"{after}, differs from token {length + min(firsts)} of a sequence on"

        batch = batch.adding(old_log_probs=trained, engine=kinds)
        sizes: dict[str, Any] = {"limit": limit, "part": "length"}
        mask = batch.response_mask.values
        if self._is_float32:
            mask, sizes = above.values, sizes | {"calm": 0}
        try:
            check_rollout_log_probs(batch, mask, where=where, **sizes)
        except RunStopped as error:
            raise RunStopped(
                f"at the start, {error}\nThe model has {self._layers()}. If only sequences beyond "
                "a window differ, vLLM and the trainer do not see the same tokens: choose another "
                "model, or another version of vLLM."
            ) from None

    def _requests(self) -> Requests:
        rollout, seed = self._config.rollout, self._config.seed
        tokens = min(TOKENS, rollout.max_response_tokens)
        longest = rollout.max_prompt_tokens + rollout.max_response_tokens - tokens
        lengths = {SHORT}
        for window in {one.window for one in self._shape.attentions if one.window is not None}:
            lengths |= {window - tokens // 2, window + tokens}
        generator = torch.Generator().manual_seed(derive_seed(seed, "start"))
        params = SamplingParams(rollout.temperature, rollout.top_p)
        requests: list[Request] = []
        banned = placeholder_ids(read_model_config(self._config.model.path))
        words = torch.tensor(sorted({*range(self._shape.vocab)}.difference(banned)))
        prompts = [
            (words[prompt].tolist(), None)
            for length in sorted({max(1, min(length, longest)) for length in lengths})
            for prompt in torch.randint(len(words), (PROMPTS, length), generator=generator)
        ]
        shown = processed(prompt.images for prompt in self._seen)
        seen = [*zip((prompt.token_ids for prompt in self._seen), shown, strict=True)]
        for prompt, images in [*prompts, *seen]:
            for _ in range(RESPONSES):
                name, own = f"start-{len(requests)}", derive_seed(seed, "start", len(requests))
                requests.append(Request(name, prompt, own, tokens, params, images=images))
        group_id = torch.arange(len(requests)) // RESPONSES
        return Requests(requests, group_id, each=RESPONSES, returns_recorded=True)

    def _layers(self) -> str:
        """Return the kinds of the model's layers, with their number."""
        return ", ".join(f"{n} layers of {_attention(kind)}" for kind, n in self._shape.counted)


def _attention(layer: LayerShape) -> str:
    if layer.attention is None:
        return "no attention"
    window = layer.attention.window
    return "full attention" if window is None else f"sliding attention (window {window})"
