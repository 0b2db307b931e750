"""Requests to vLLM's engine core: token ids in, sampled token ids and their log-probs out.

`LLM.generate` spends much of each decoding step on text, counters and log-prob tables that are not
needed here. Tokens are read from the engine core, log-probs one step earlier from its model runner.
"""

import math
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridrl.data.batch import PromptBatch
from hybridrl.data.ragged import Ragged
from hybridrl.distributed import position
from hybridrl.rollout.vllm_compat import StepLogProbs, core_request, finish_steps
from hybridrl.rollout.vllm_routing import RoutedExperts


@dataclass(frozen=True)
class Generated:
    """Responses in the order of the prompts, those of one prompt together.

    Attributes:
        responses: ragged int32, the end token included.
        log_probs: ragged float32, log pi of each token under the sampled distribution, nats.
        truncated: [B] bool, true where the length limit ended the response.
        unfinished: [B] bool, true where it was cut before its end; None without a budget.
        first_token_s: seconds from the call to the first sampled token; 0 where there was none.
        seconds: seconds of the whole call.
        routed_experts: as in `RolloutBatch`.
    """

    responses: Ragged
    log_probs: Ragged
    truncated: Tensor
    unfinished: Tensor | None
    first_token_s: float
    seconds: float
    routed_experts: Ragged | None


class _Responses:
    """Tokens and log-probs in the order of arrival."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self._index = {request_id: index for index, request_id in enumerate(request_ids)}
        self._owners: list[int] = []
        self._tokens: list[int] = []
        self._log_probs: list[NDArray[np.float32]] = [np.empty(0, np.float32)]
        self.truncated = [False] * len(request_ids)
        self.open = set(range(len(request_ids)))

    def add(self, outputs: Sequence[Any], log_probs: StepLogProbs) -> None:
        """Add the outputs of one step, a token each."""
        for output in outputs:
            index = self._index[output.request_id]
            if output.finish_reason is not None:
                reason = output.finish_reason.name
                if reason not in ("STOP", "LENGTH"):
                    raise RuntimeError(f"vLLM ended response {index} of this call with {reason}")
                self.truncated[index] = reason == "LENGTH"
                self.open.remove(index)
            (token,) = output.new_token_ids
            self._tokens.append(token)
            self._owners.append(index)
        self._log_probs.append(log_probs.of([output.request_id for output in outputs]))

    def is_over(self, budget: float, enough: float, needed: AbstractSet[int]) -> bool:
        """Return true if no response of `needed` is open, and `budget` tokens are sampled or
        `enough` responses have ended.
        """
        ended = len(self.truncated) - len(self.open)
        is_enough = len(self._tokens) >= budget or ended >= enough
        return not self.open or (is_enough and self.open.isdisjoint(needed))

    def open_ids(self) -> list[str]:
        """Return the ids of requests that have not ended."""
        return [request_id for request_id, index in self._index.items() if index in self.open]

    def ragged(self) -> tuple[Ragged, Ragged]:
        """Return tokens and log-probs by response."""
        owners = torch.tensor(self._owners, dtype=torch.int64)
        order = owners.argsort(stable=True)
        lengths = owners.bincount(minlength=len(self.truncated))
        tokens = torch.tensor(self._tokens, dtype=torch.int32)
        log_probs = torch.from_numpy(np.concatenate(self._log_probs))
        return Ragged(tokens[order], lengths), Ragged(log_probs[order], lengths)


def generate(
    core: Any,
    prompts: PromptBatch,
    seeds: Sequence[int],
    max_tokens: Sequence[int],
    stop_token_ids: Sequence[int],
    *,
    call: int,
    experts: RoutedExperts | None = None,
) -> Generated:
    """Sample `responses_per_prompt` responses of each prompt, or as many tokens as their budget.

    Args:
        core: client of an engine core in this process, which is awake.
        prompts: the prompts.
        seeds: one per response.
        max_tokens: longest length of the responses to each prompt, at least 1.
        stop_token_ids: tokens that end a response and stay part of it.
        call: number of this call, unique in this engine; request ids derive from it.
        experts: recorder of the tokens' experts.

    Raises:
        RuntimeError: vLLM aborted a response.
    """
    start = time.perf_counter()
    requests = _requests(prompts, seeds, max_tokens, stop_token_ids, call)
    ids = [request.request_id for request in requests]
    responses = _Responses(ids)
    for request in requests:
        core.add_request(request)
    first_token_s, step = 0.0, 0
    step_log_probs = StepLogProbs()
    per_prompt, must = prompts.token_budget, prompts.must_finish
    budget = math.inf if per_prompt is None else len(prompts) * per_prompt
    enough = math.inf if prompts.enough_ended is None else len(requests) * prompts.enough_ended
    needed = set() if must is None else set(must.nonzero().flatten().tolist())
    with step_log_probs.recorded(core), experts.recorded(core) if experts else nullcontext():
        while not responses.is_over(budget, enough, needed):
            step += 1
            position.at("decoding step", step)
            if outputs := core.get_output().outputs:
                first_token_s = first_token_s or time.perf_counter() - start
                responses.add(outputs, step_log_probs)
        if responses.open:
            core.abort_requests(responses.open_ids())
        finish_steps(core)
    tokens, log_probs = responses.ragged()
    is_open = torch.zeros(len(requests), dtype=torch.bool)
    is_open[list(responses.open)] = True
    return Generated(
        responses=tokens,
        log_probs=log_probs,
        truncated=torch.tensor(responses.truncated, dtype=torch.bool),
        unfinished=None if per_prompt is None else is_open,
        first_token_s=first_token_s,
        seconds=time.perf_counter() - start,
        routed_experts=None if experts is None else experts.take(ids),
    )


def _requests(
    prompts: PromptBatch,
    seeds: Sequence[int],
    max_tokens: Sequence[int],
    stop_token_ids: Sequence[int],
    call: int,
) -> list[Any]:
    """Build one request per response; they differ in prompt, length, seed and id."""
    from vllm import SamplingParams

    shared = SamplingParams(
        temperature=prompts.temperature,
        top_p=prompts.top_p,
        stop_token_ids=list(stop_token_ids),
        logprobs=0,  # the sampled token's alone
        detokenize=False,
    )
    rows = [row.tolist() for row in prompts.prompts.rows()]
    requests = []
    for index, seed in enumerate(seeds):
        prompt = index // prompts.responses_per_prompt
        params = copy(shared)
        params.max_tokens = max_tokens[prompt]
        params.seed = seed
        requests.append(core_request(f"{call}-{index}", rows[prompt], params))
    return requests
