"""Continuous sampling: requests are admitted while others decode, a few steps per call.

All ranks of an engine get the same calls, so their schedulers admit and drop the same requests in
the same order.
"""

import time
from collections.abc import Sequence
from typing import Any

from hybridrl.config.schema import ModelConfig
from hybridrl.data.live import EngineProgress, LiveCall, LiveRequest, Progress
from hybridrl.distributed import position
from hybridrl.rollout.vllm_compat import (
    StepLogProbs,
    core_request,
    enable_grammars,
    finish_steps,
    structured_outputs,
)


class LiveRequests:
    """Open requests of an engine core in this process. `stop_token_ids` are the model's."""

    def __init__(self, core: Any, model: ModelConfig, stop_token_ids: Sequence[int]) -> None:
        self._core = core
        self._model = model
        self._stop_token_ids = list(stop_token_ids)
        # Open requests, and tokens that have not been returned.
        self._open: dict[str, LiveRequest] = {}
        self._sampled: dict[str, Progress] = {}
        self._steps = 0

    def advance(self, call: LiveCall) -> EngineProgress:
        """Drop and admit requests, then decode up to `call.steps` steps.

        Raises:
            RuntimeError: vLLM aborted a request.
        """
        start, tokens = time.perf_counter(), 0
        dropped = [request_id for _, request_id in call.cancelled if request_id in self._open]
        self._core.abort_requests(dropped)
        for request_id in dropped:
            del self._open[request_id]
        for request in call.new:
            self._core.add_request(self._core_request(request))
            self._open[request.request_id] = request
            self._sampled[request.request_id] = Progress(request.request_id, [], [], "")
        log_probs = StepLogProbs()
        with log_probs.recorded(self._core):
            for _ in range(call.steps):
                if not self._open:
                    break
                self._steps += 1
                position.at("decoding step", self._steps)
                if outputs := self._core.get_output().outputs:
                    self._add(outputs, log_probs)
                    tokens += len(outputs)
            if not self._open:
                list(finish_steps(self._core))  # without outputs
        return EngineProgress(self._progress(), tokens, time.perf_counter() - start)

    def _add(self, outputs: Sequence[Any], log_probs: StepLogProbs) -> None:
        """Add the outputs of one step, a token each."""
        rows = log_probs.of([output.request_id for output in outputs]).tolist()
        for output, log_prob in zip(outputs, rows, strict=True):
            name = output.request_id
            so_far = self._sampled[name]
            so_far.tokens.extend(output.new_token_ids)
            so_far.log_probs.append(log_prob)
            if output.finish_reason is not None:
                reason = output.finish_reason.name
                if reason not in ("STOP", "LENGTH"):
                    raise RuntimeError(f"vLLM ended request {name} with {reason}")
                self._sampled[name] = so_far._replace(reason=reason)
                del self._open[name]

    def _progress(self) -> list[Progress]:
        """Take the tokens of requests in pieces, and of those that are not open any more."""
        found = [
            one
            for name, one in self._sampled.items()
            if name not in self._open or (self._open[name].in_pieces and one.tokens)
        ]
        for one in found:
            del self._sampled[one.request_id]
            if one.request_id in self._open:
                self._sampled[one.request_id] = Progress(one.request_id, [], [], "")
        return found

    def _core_request(self, request: LiveRequest) -> Any:
        from vllm import SamplingParams

        sampling = dict(request.sampling)
        if fields := sampling.pop("structured_outputs", None):
            enable_grammars(self._core, self._model)
            sampling["structured_outputs"] = structured_outputs(fields)
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            max_tokens=request.max_tokens,
            stop_token_ids=[*self._stop_token_ids, *request.stop_token_ids],
            logprobs=0,  # the sampled token's alone
            detokenize=False,
            **sampling,
        )
        return core_request(request.request_id, request.prompt, params)
