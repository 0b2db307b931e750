"""Requests to vLLM's engine core: token ids in, sampled token ids and their log-probs out.

`LLM.generate` spends much of each decoding step on text, counters and log-prob tables that are not
needed here. Tokens are read from the engine core, log-probs one step earlier from its model
runner. Imports vllm: load it after `vllm_compat.set_environment`.
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

from hybridrl.data.batch import PromptBatch
from hybridrl.data.ragged import Ragged
from hybridrl.distributed import position
from hybridrl.rollout.engine import Generated
from hybridrl.rollout.vllm_compat import StepLogProbs, core_request, is_truncated


@dataclass(frozen=True)
class ResponseLimits:
    """End conditions of responses.

    Attributes:
        max_tokens: longest length of the responses to each prompt, at least 1.
        stop_token_ids: tokens that end it and stay part of it.
    """

    max_tokens: Sequence[int]
    stop_token_ids: Sequence[int]


class _Responses:
    """Tokens and log-probs in the order of arrival."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._owners: list[int] = []
        self._tokens: list[int] = []
        self._log_probs: list[NDArray[np.float32]] = [np.empty(0, np.float32)]
        self.truncated = [False] * len(request_ids)
        self.unfinished = len(request_ids)

    def add(self, outputs: Sequence[Any], log_probs: StepLogProbs) -> None:
        """Add the outputs of one step, a token each."""
        for output in outputs:
            index = self._index[output.request_id]
            if output.finish_reason is not None:
                self._finish(index, output.finish_reason)
            (token,) = output.new_token_ids
            self._tokens.append(token)
            self._owners.append(index)
        self._log_probs.append(log_probs.of([output.request_id for output in outputs]))

    def ragged(self) -> tuple[Ragged, Ragged]:
        """Return tokens and log-probs by response."""
        owners = torch.tensor(self._owners, dtype=torch.int64)
        order = owners.argsort(stable=True)
        lengths = owners.bincount(minlength=len(self.truncated))
        tokens = torch.tensor(self._tokens, dtype=torch.int32)
        log_probs = torch.from_numpy(np.concatenate(self._log_probs))
        return Ragged(tokens[order], lengths), Ragged(log_probs[order], lengths)

    def _finish(self, index: int, reason: Any) -> None:
        try:
            self.truncated[index] = is_truncated(reason)
        except RuntimeError as error:
            raise RuntimeError(f"vLLM ended response {index} of this call with {error}") from None
        self.unfinished -= 1


def generate(
    core: Any, prompts: PromptBatch, seeds: Sequence[int], limits: ResponseLimits, *, call: int
) -> Generated:
    """Sample `responses_per_prompt` responses of each prompt.

    Args:
        core: client of an engine core in this process, which is awake.
        prompts: the prompts.
        seeds: one per response.
        limits: conditions that end a response.
        call: number of this call, unique in this engine; request ids derive from it.

    Raises:
        RuntimeError: vLLM aborted a response.
    """
    start = time.perf_counter()
    requests = _requests(prompts, seeds, limits, call)
    responses = _Responses([request.request_id for request in requests])
    for request in requests:
        core.add_request(request)
    first = start
    step_log_probs = StepLogProbs()
    with step_log_probs.recorded(core):
        step = 0
        while responses.unfinished:
            step += 1
            position.at("decoding step", step)
            outputs = core.get_output().outputs
            if not outputs:
                continue
            if first == start:
                first = time.perf_counter()
            responses.add(outputs, step_log_probs)
    tokens, log_probs = responses.ragged()
    return Generated(
        responses=tokens,
        log_probs=log_probs,
        truncated=torch.tensor(responses.truncated, dtype=torch.bool),
        first_token_s=first - start,
        seconds=time.perf_counter() - start,
    )


def _requests(
    prompts: PromptBatch, seeds: Sequence[int], limits: ResponseLimits, call: int
) -> list[Any]:
    """Build one request per response; they differ in prompt, length, seed and id."""
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
        requests.append(core_request(f"{call}-{index}", row, params))
    return requests
