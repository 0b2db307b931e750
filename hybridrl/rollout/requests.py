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
from typing import Any, NamedTuple

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
        old_kv_tokens: tokens of responses that were held over a change of the weights.
        routed_experts: as in `RolloutBatch`.
    """

    responses: Ragged
    log_probs: Ragged
    truncated: Tensor
    unfinished: Tensor | None
    first_token_s: float
    seconds: float
    old_kv_tokens: int
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

    def ragged(self) -> tuple[Ragged, Ragged]:
        """Return tokens and log-probs by response."""
        owners = torch.tensor(self._owners, dtype=torch.int64)
        order = owners.argsort(stable=True)
        lengths = owners.bincount(minlength=len(self.truncated))
        tokens = torch.tensor(self._tokens, dtype=torch.int32)
        log_probs = torch.from_numpy(np.concatenate(self._log_probs))
        return Ragged(tokens[order], lengths), Ragged(log_probs[order], lengths)


class Request(NamedTuple):
    """An open request: its id, the weights when it was added, and the call that added it."""

    request_id: str
    version: int
    call: int


class Requests:
    """Calls of an engine core in this process, which sample responses.

    Responses that a call leaves without an end are aborted. With `PromptBatch.response_id` they are
    held instead: a later call goes on with their requests, whose keys and values stay.

    Args:
        core: client of the engine core.
        stop_token_ids: tokens that end a response and stay part of it.
        experts: recorder of the tokens' experts.

    Attributes:
        salt: requests of one salt share cached prefixes.
        version: of the weights.
        held: held requests by response_id and length, prompt included.
    """

    def __init__(
        self, core: Any, stop_token_ids: Sequence[int], experts: RoutedExperts | None
    ) -> None:
        self._core = core
        self._stop_token_ids = list(stop_token_ids)
        self._experts = experts
        self._calls = 0
        self.salt = 0
        self.version = 0
        self.held: dict[tuple[int | None, int], Request] = {}

    def generate(
        self, prompts: PromptBatch, seeds: Sequence[int], max_tokens: Sequence[int]
    ) -> Generated:
        """Sample `responses_per_prompt` responses of each prompt, or tokens of their budget.

        Args:
            prompts: the prompts.
            seeds: one per response.
            max_tokens: longest length of the responses to each prompt, at least 1.

        Raises:
            RuntimeError: vLLM aborted a response.
        """
        start = time.perf_counter()
        core, experts = self._core, self._experts
        requests = self._opened(prompts, seeds, max_tokens)
        ids = [request.request_id for request in requests]
        responses = _Responses(ids)
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
            for outputs in filter(None, finish_steps(core)):
                responses.add(outputs, step_log_probs)
        tokens, log_probs = responses.ragged()
        self._hold_or_abort(prompts, requests, responses.open, tokens.lengths)
        is_open = torch.zeros(len(requests), dtype=torch.bool)
        is_open[list(responses.open)] = True
        is_old = torch.tensor([request.version != self.version for request in requests]).bool()
        return Generated(
            responses=tokens,
            log_probs=log_probs,
            truncated=torch.tensor(responses.truncated, dtype=torch.bool),
            unfinished=None if per_prompt is None else is_open,
            first_token_s=first_token_s,
            seconds=time.perf_counter() - start,
            old_kv_tokens=int(tokens.lengths[is_old].sum()),
            routed_experts=None if experts is None else experts.take(ids),
        )

    def _opened(
        self, prompts: PromptBatch, seeds: Sequence[int], max_tokens: Sequence[int]
    ) -> list[Request]:
        """Return one request per response, held or added; abort other held ones.

        Added ones differ in prompt, length, seed and id.
        """
        from vllm import SamplingParams

        shared = SamplingParams(
            temperature=prompts.temperature,
            top_p=prompts.top_p,
            top_k=prompts.top_k or 0,  # 0: all
            stop_token_ids=[*self._stop_token_ids, *prompts.stop_token_ids],
            logprobs=0,  # the sampled token's alone
            detokenize=False,
        )
        self._calls += 1
        rows = [row.tolist() for row in prompts.prompts.rows()]
        names = [None] * len(rows) if prompts.response_id is None else prompts.response_id.tolist()
        requests = []
        for index, seed in enumerate(seeds):
            row = index // prompts.responses_per_prompt
            request = self.held.pop((names[row], len(rows[row])), None)
            if request is None:
                request = Request(f"{self._calls}-{index}", self.version, self._calls)
                params = copy(shared)
                params.max_tokens = max_tokens[row]
                params.seed = seed
                salt = str(self.salt)
                self._core.add_request(core_request(request.request_id, rows[row], params, salt))
            requests.append(request)
        self._core.abort_requests([request.request_id for request in self.held.values()])
        self.held = {}
        return requests

    def _hold_or_abort(
        self,
        prompts: PromptBatch,
        requests: Sequence[Request],
        still_open: AbstractSet[int],
        sampled: Tensor,
    ) -> None:
        """Hold open requests that a later call may continue, and abort the others.

        New requests without a token wait for a place; the next call orders them anew.
        """
        kept: set[int] = set()
        if prompts.response_id is not None:
            kept = {
                index
                for index in still_open
                if sampled[index] or requests[index].call < self._calls
            }
            lengths = (prompts.prompts.lengths + sampled).tolist()
            ids = prompts.response_id.tolist()
            self.held = {(ids[index], lengths[index]): requests[index] for index in kept}
        self._core.abort_requests([requests[index].request_id for index in still_open - kept])
