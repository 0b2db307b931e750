"""One call of vLLM's engine core: token ids in, sampled token ids and their log-probs out.

`LLM.generate` spends a good part of each decoding step on turning every new token into the text,
the counters and the log-prob tables of a `RequestOutput`. None of it is wanted here: tokens are
taken as the engine core hands them out, log-probs one step earlier, as its model runner does.
Imports vllm: load it after `compat.set_environment`.
"""

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason

from hybridrl.data.batch import PromptBatch
from hybridrl.data.ragged import Ragged
from hybridrl.distributed import position
from hybridrl.rollout.engine import Generated
from hybridrl.rollout.start import replaced


@dataclass(frozen=True)
class Limits:
    """What ends a response.

    Attributes:
        max_tokens: longest length of the responses to each prompt, at least 1.
        stop_token_ids: tokens that end it, and that it keeps.
    """

    max_tokens: Sequence[int]
    stop_token_ids: Sequence[int]


class _StepLogProbs:
    """Takes each step's log-probs before vLLM's scheduler cuts them into one object per request.

    With hundreds of sequences the cutting takes a tenth of a decoding step, for which a GPU waits.
    `update` stands in for the scheduler's `update_from_output`: both versions of vLLM take a step's
    log-probs only there, and look at them once.
    """

    def __init__(self, scheduler: Any) -> None:
        self._update = scheduler.update_from_output
        self._rows: dict[str, int] = {}
        self._log_probs: NDArray[np.float32] | None = None

    def update(self, scheduled: Any, output: Any) -> Any:
        """Keep the step's log-probs and update the scheduler without them."""
        self._rows = output.req_id_to_index
        self._log_probs = None if output.logprobs is None else output.logprobs.logprobs
        output.logprobs = None
        return self._update(scheduled, output)

    def of(self, request_ids: Sequence[str]) -> NDArray[np.float32]:
        """Those of the tokens that the last step sampled, one for each request."""
        assert self._log_probs is not None, "vLLM sampled without log-probs"
        # One column: with logprobs=0 the sampled token's alone.
        return self._log_probs[[self._rows[request_id] for request_id in request_ids], 0]


class _Responses:
    """Tokens and log-probs in the order in which they come in."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._owners: list[int] = []
        self._tokens: list[int] = []
        self._log_probs: list[NDArray[np.float32]] = [np.empty(0, np.float32)]
        self.truncated = [False] * len(request_ids)
        self.unfinished = len(request_ids)

    def take(self, outputs: Sequence[Any], log_probs: _StepLogProbs) -> None:
        """Add one step's outputs, a token each."""
        for output in outputs:
            index = self._index[output.request_id]
            if output.finish_reason is not None:
                self._finish(index, output.finish_reason)
            (token,) = output.new_token_ids
            self._tokens.append(token)
            self._owners.append(index)
        self._log_probs.append(log_probs.of([output.request_id for output in outputs]))

    def ragged(self) -> tuple[Ragged, Ragged]:
        """Tokens and log-probs by response."""
        owners = torch.tensor(self._owners, dtype=torch.int64)
        order = owners.argsort(stable=True)
        lengths = owners.bincount(minlength=len(self.truncated))
        tokens = torch.tensor(self._tokens, dtype=torch.int32)
        log_probs = torch.from_numpy(np.concatenate(self._log_probs))
        return Ragged(tokens[order], lengths), Ragged(log_probs[order], lengths)

    def _finish(self, index: int, reason: FinishReason) -> None:
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise RuntimeError(f"vLLM ended response {index} of this call with {reason.name}")
        self.truncated[index] = reason is FinishReason.LENGTH
        self.unfinished -= 1


def generate(
    core: Any, prompts: PromptBatch, seeds: Sequence[int], limits: Limits, *, call: int
) -> Generated:
    """Sample `responses_per_prompt` responses of each prompt.

    Args:
        core: vLLM's client of an engine core in this process, which is awake.
        prompts: what to answer.
        seeds: one per response.
        limits: what ends a response.
        call: a number that no earlier call of this engine had; request ids derive from it.

    Raises:
        RuntimeError: vLLM gave a response up.
    """
    start = time.perf_counter()
    requests = _requests(prompts, seeds, limits, call)
    responses = _Responses([request.request_id for request in requests])
    for request in requests:
        core.add_request(request)
    first = start
    scheduler = core.engine_core.scheduler
    log_probs_of_step = _StepLogProbs(scheduler)
    with replaced(scheduler, {"update_from_output": log_probs_of_step.update}):
        step = 0
        while responses.unfinished:
            step += 1
            position.at("decoding step", step)
            outputs = core.get_output().outputs
            if not outputs:
                continue
            if first == start:
                first = time.perf_counter()
            responses.take(outputs, log_probs_of_step)
    tokens, log_probs = responses.ragged()
    return Generated(
        responses=tokens,
        log_probs=log_probs,
        truncated=torch.tensor(responses.truncated, dtype=torch.bool),
        first_token_s=first - start,
        seconds=time.perf_counter() - start,
    )


def _requests(
    prompts: PromptBatch, seeds: Sequence[int], limits: Limits, call: int
) -> list[EngineCoreRequest]:
    """One request per response; copies of one another but for prompt, length, seed and id."""
    shared = SamplingParams(
        temperature=prompts.temperature,
        top_p=prompts.top_p,
        stop_token_ids=list(limits.stop_token_ids),
        logprobs=0,  # the sampled token's alone
        detokenize=False,
    )
    rows = [row.tolist() for row in prompts.prompts.rows()]
    repeated = (
        pair
        for pair in zip(rows, limits.max_tokens, strict=True)
        for _ in range(prompts.responses_per_prompt)
    )
    requests = []
    for index, ((row, max_tokens), seed) in enumerate(zip(repeated, seeds, strict=True)):
        params = copy(shared)
        params.max_tokens = max_tokens
        params.seed = seed
        request = EngineCoreRequest(
            request_id=f"{call}-{index}",
            prompt_token_ids=row,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        requests.append(request)
    return requests
