"""One call of vLLM's engine core: token ids in, sampled token ids and their log-probs out.

`LLM.generate` spends a good part of each decoding step on turning every new token into the text,
the counters and the log-prob tables of a `RequestOutput`. None of it is wanted here: tokens and
log-probs are taken as the engine core hands them out. Imports vllm: load it after
`compat.set_environment`.
"""

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest, FinishReason

from hybridrl.data.batch import PromptBatch
from hybridrl.data.ragged import Ragged
from hybridrl.rollout.engine import Generated


@dataclass(frozen=True)
class Limits:
    """What ends a response.

    Attributes:
        max_tokens: longest length of the responses to each prompt, at least 1.
        stop_token_ids: tokens that end it, and that it keeps.
    """

    max_tokens: Sequence[int]
    stop_token_ids: Sequence[int]


class _Responses:
    """Tokens and log-probs as they come in, by response."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self.tokens: list[list[int]] = [[] for _ in request_ids]
        self.log_probs: list[list[float]] = [[] for _ in request_ids]
        self.truncated = [False] * len(request_ids)
        self.unfinished = len(request_ids)

    def take(self, outputs: Sequence[Any]) -> None:
        """Add one step's outputs."""
        for output in outputs:
            index = self._index[output.request_id]
            self.tokens[index] += output.new_token_ids
            # One column: with logprobs=0 the sampled token's alone.
            self.log_probs[index] += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                self._finish(index, output.finish_reason)

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
    while responses.unfinished:
        outputs = core.get_output().outputs
        if outputs and first == start:
            first = time.perf_counter()
        responses.take(outputs)
    tokens = _ragged(responses.tokens, torch.int64)
    log_probs = _ragged(responses.log_probs, torch.float32)
    assert torch.equal(tokens.lengths, log_probs.lengths), "a token came without its log-prob"
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


def _ragged(rows: list[Any], dtype: torch.dtype) -> Ragged:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return Ragged(torch.tensor(list(chain.from_iterable(rows)), dtype=dtype), lengths)
