"""Several decoding steps of vLLM's model runner as one submission.

Between two steps of the same requests nothing is needed from the host: on a GPU the runner keeps
tokens, positions and seeds on the device. So the scheduler allocates the memory of several steps in
advance, and the runner runs them one after the other. Meanwhile the tokens of an earlier submission
are read. A request that ends in between goes on to the end of the next submission at most; its
further tokens are dropped. NAMES are the private names in use.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from hybridrl.rollout.vllm.decode_graph import DecodeGraphs, has_decode_graphs

NAMES: tuple[tuple[str, str], ...] = (
    (
        "vllm.v1.core.sched.output",
        "CachedRequestData.new_block_ids CachedRequestData.num_computed_tokens "
        "CachedRequestData.num_output_tokens SchedulerOutput.finished_req_ids "
        "SchedulerOutput.scheduled_cached_reqs",
    ),
    (
        "vllm.v1.outputs",
        "AsyncModelRunnerOutput.get_output LogprobsLists.logprobs ModelRunnerOutput.logprobs "
        "LogprobsTensors.logprobs LogprobsTensors.selected_token_ranks "
        "ModelRunnerOutput.req_ids ModelRunnerOutput.sampled_token_ids",
    ),
    ("vllm.v1.worker.gpu.buffer_utils", "set_default_max_concurrency"),
    ("vllm.v1.worker.gpu.sample.logprob", "compute_token_logprobs compute_topk_scores"),
    ("vllm.v1.worker.gpu.sample.sampler", "compute_topk_scores"),
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.execute_model GPUModelRunner.sample_tokens",
    ),
)


def log_probs_alone(*, exact: bool) -> None:
    """Replace vLLM's log-probs of sampled tokens on GPUs, from now on, by one pass over the logits.

    vLLM takes two, and a third one for the tokens' ranks, which nobody reads. With rollout.exact
    vLLM's log-probs stay: the trainer has them from the same kernel.
    """
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import logprob, sampler

    from hybridrl.distributed.forward.softmax_kernels import softmax_rows

    def scores(
        logits: Tensor, num_logprobs: int, sampled: Tensor, *args: Any, **options: Any
    ) -> LogprobsTensors:
        is_plain = num_logprobs == 0 and logits.stride(1) == 1 and not options["logits_mode"]
        if not is_plain or options["max_per_req_token_ids"]:
            return logprob.compute_topk_scores(logits, num_logprobs, sampled, *args, **options)
        ids = sampled[:, None]
        if exact:
            log_probs = logprob.compute_token_logprobs(logits, ids)
        else:
            log_probs = softmax_rows(logits, sampled, 1.0)[0][:, None]
        return LogprobsTensors(ids, log_probs, torch.zeros_like(sampled))

    sampler.compute_topk_scores = scores


MANY = 2**31


@contextmanager
def buffers_for(steps: int, device_type: str) -> Iterator[None]:
    """Within this context, vLLM's newer runner gets host buffers for two submissions.

    It copies states of requests to the device from buffers in turn, one for each step under way.
    """
    if device_type == "cpu":
        yield
        return
    from vllm.v1.worker.gpu import model_runner

    set_number = model_runner.set_default_max_concurrency
    with patch.object(
        model_runner, "set_default_max_concurrency", lambda number: set_number(number * steps)
    ):
        yield


def steps_ahead(
    requests: Sequence[Any], max_model_len: int, most: int
) -> tuple[int, list[int], list[int]]:
    """Return how many steps of requests may be submitted, 0 to `most`; 0 if a prompt is left.

    Also their computed and their sampled tokens. A request may end within several steps. Where
    `most` is 1, its last token is left to vLLM.
    """
    computed, sampled, steps, longest = [], [], most, 0
    for request in requests:
        done, queued = request.num_computed_tokens, request.num_output_placeholders
        known, prompt = request.num_tokens + queued, request.num_prompt_tokens
        room, left = max_model_len - known - 1, prompt + request.max_tokens - known - 1
        # The chunk's flag: a prompt of which one token is left looks like a sampled token.
        decodes = known - done == 1 and not request.is_prefill_chunk
        if not decodes or room < 1 or (most == 1 and left < 1):
            return 0, [], []
        steps, longest = min(steps, room), max(longest, left)
        computed.append(done)
        sampled.append(known - prompt)
    return min(steps, longest), computed, sampled


class MultiStep:
    """Model runner that repeats a step as often as the scheduler asks.

    Args:
        runner: vLLM's model runner.
        exact: rollout.exact.

    Attributes:
        most: steps that may be submitted at once.
        graphs: run a submission's steps after the first one, where they can.
    """

    def __init__(self, runner: Any, *, exact: bool) -> None:
        # vLLM 0.33 has two runners for GPUs. The older one, which it takes where the newer one
        # lacks a feature, keeps track of sampled tokens on the host.
        is_newer = type(runner).__module__.startswith("vllm.v1.worker.gpu.")
        self.most = MANY if is_newer or runner.device.type == "cpu" else 1
        if is_newer:
            log_probs_alone(exact=exact)
        self._runner = runner
        self.graphs = DecodeGraphs(runner) if is_newer and has_decode_graphs(runner) else None
        self._execute, runner.execute_model = runner.execute_model, self._note_and_execute
        self._sample, runner.sample_tokens = runner.sample_tokens, self._sample_all
        self._scheduled: Any = None
        self._steps: dict[int, int] = {}

    def submit(self, scheduled: Any, requests: Sequence[Any], steps: int) -> None:
        """Run a schedule, which the scheduler has counted as a token of each request, more often.

        Args:
            scheduled: the schedule.
            requests: vLLM's requests of it.
            steps: how often it is run.
        """
        self._steps[id(scheduled)] = steps
        for request in requests:
            request.num_computed_tokens += steps - 1
            request.num_in_flight_tokens += steps - 1
            if request.num_output_placeholders:  # with asynchronous scheduling
                request.num_output_placeholders += steps - 1

    def of(self, scheduled: Any) -> int:
        """Return how often a schedule was run, whose output is there."""
        return self._steps.pop(id(scheduled), 1)

    def _note_and_execute(self, scheduled: Any, *args: Any, **options: Any) -> Any:
        self._scheduled = scheduled
        return self._execute(scheduled, *args, **options)

    def _sample_all(self, grammar: Any) -> Any:
        """Sample the step's tokens, then run the further steps."""
        scheduled = self._scheduled
        more = self._steps.get(id(scheduled), 1) - 1
        state = self._runner.execute_model_state if more and self.graphs else None
        outputs = [first := self._sample(grammar)]
        if not more:
            return first
        if self.graphs and (rest := self.graphs.run(state, more)):
            outputs.append(rest)
        else:
            for done in range(1, 1 + more):
                self._execute(_later(scheduled, done))
                outputs.append(self._sample(None))
        if not hasattr(first, "get_output"):
            return _joined(outputs)
        reads = [one.get_output for one in outputs]  # each waits for the device

        def read_all() -> Any:
            del first.get_output  # the first one would keep all for Python's collector
            return _joined([read() for read in reads])

        first.get_output = read_all
        return first


def _later(scheduled: Any, done: int) -> Any:
    """Return the schedule of the same step after `done` repetitions."""
    requests = scheduled.scheduled_cached_reqs
    requests = replace(
        requests,
        new_block_ids=[None] * len(requests.new_block_ids),
        num_computed_tokens=[count + done for count in requests.num_computed_tokens],
        num_output_tokens=[count + done for count in requests.num_output_tokens],
    )
    return replace(scheduled, scheduled_cached_reqs=requests, finished_req_ids=set())


def _joined(outputs: Sequence[Any]) -> Any:
    """Join the outputs of the same requests' steps: several tokens of each, in their order."""
    first = outputs[0]
    assert all(one.req_ids == first.req_ids for one in outputs)
    rows = zip(*(one.sampled_token_ids for one in outputs), strict=True)
    first.sampled_token_ids = [[token for step in row for token in step] for row in rows]
    if first.logprobs is not None:
        columns = [one.logprobs.logprobs for one in outputs]
        first.logprobs = first.logprobs._replace(logprobs=np.concatenate(columns, 1))
    return first
