"""Continuous sampling: requests are admitted while others decode.

The first rank of an engine receives the driver's messages and passes them on every few decoding
steps, so that the schedulers of all ranks admit and drop the same requests in the same order.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Client, Connection
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch.distributed as dist

from hybridrl.config.schema import ModelConfig
from hybridrl.data.batch import EngineStats
from hybridrl.data.live import LiveRequest, Meeting, Message, Progress, send_at_once
from hybridrl.distributed import position
from hybridrl.rollout.sampling import check_ranks_agree
from hybridrl.rollout.vllm_compat import (
    StepLogProbs,
    core_request,
    enable_grammars,
    finish_steps,
    structured_outputs,
    tensor_parallel_group,
)

# Decoding steps between two looks at the messages: steps that compute a prompt are slower, so
# requests are admitted together.
STEPS = 4
# Seconds of a wait for messages, after which the position changes: waiting is not a stall.
WAIT_S = 1.0


class Line:
    """An engine's side of its connection with the driver; only the first rank has one.

    Attributes:
        num_ranks: of the engine.
    """

    def __init__(self, connection: Connection | None, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._connection = connection
        self._received = SimpleQueue[Message]()
        if connection is not None:
            Thread(target=self._read, args=(connection,), daemon=True).start()

    def send(self, progress: list[Progress]) -> None:
        """Send progress to the driver, if there is any."""
        if self._connection is not None and progress:
            self._connection.send(progress)

    def take(self, *, waits: bool) -> list[Message]:
        """Return the messages since the last call, the same on all ranks, or `WAIT_S` for one."""
        found: list[Message] = []
        if self._connection is not None:
            if waits:
                with suppress(Empty):
                    found.append(self._received.get(timeout=WAIT_S))
            while not self._received.empty():
                found.append(self._received.get())
        if self.num_ranks > 1:
            group, shared = tensor_parallel_group(), [found]
            dist.broadcast_object_list(shared, dist.get_global_rank(group, 0), group)
            (found,) = shared
        return found

    def _read(self, connection: Connection) -> None:
        """Receive messages at once, so that the driver never waits until they are sent."""
        with suppress(EOFError, OSError):  # the driver is gone
            while (message := connection.recv()) is not None:
                self._received.put(message)
        self._received.put(None)


@contextmanager
def connected(meeting: Meeting, tensor_parallel_size: int) -> Iterator[Line]:
    """Connect an engine with the driver; a collective of its ranks."""
    engine, rank = divmod(dist.get_rank(), tensor_parallel_size)
    if rank > 0:
        yield Line(None, tensor_parallel_size)
        return
    with closing(Client(meeting.address, authkey=meeting.secret)) as connection:
        send_at_once(connection)
        connection.send(engine)
        yield Line(connection, tensor_parallel_size)


class LiveRequests:
    """Open requests of an engine core in this process, sampled by weights number `version`.

    `stop_token_ids` are the model's.
    """

    def __init__(
        self, core: Any, model: ModelConfig, stop_token_ids: Sequence[int], version: int
    ) -> None:
        self._core = core
        self._model = model
        self._stop_token_ids = list(stop_token_ids)
        self._version = version
        # Open requests, and tokens that have not been sent.
        self._open: dict[str, LiveRequest] = {}
        self._sampled: dict[str, Progress] = {}
        self._log_probs = StepLogProbs()
        self._num_tokens, self._digest = 0, hashlib.blake2b()

    def serve(self, line: Line) -> EngineStats:
        """Sample what the driver asks for until it ends that; return the time with open requests.

        Requests with sampling parameters of their own are sampled to their end: vLLM would apply
        penalties and grammars to the rest as if it were the whole. Others are cut.

        Raises:
            RuntimeError: vLLM aborted a request, or the engine's ranks sampled different tokens.
        """
        start, busy_s, first_s, step, goes_on = time.perf_counter(), 0.0, 0.0, 0, True
        with self._log_probs.recorded(self._core):
            while goes_on or any(request.sampling for request in self._open.values()):
                if not self._open:
                    position.at("wait for requests")
                goes_on = goes_on and self._take(line.take(waits=not self._open))
                began = time.perf_counter()
                for _ in range(STEPS):
                    if not self._open:
                        break
                    step += 1
                    position.at("decoding step", step)
                    self._add(self._core.get_output().outputs)
                line.send(self._progress())
                if self._num_tokens:
                    first_s = first_s or time.perf_counter() - start
                busy_s += time.perf_counter() - began
            for outputs in finish_steps(self._core):
                self._add(outputs)
        self._core.abort_requests([*self._open])
        self._open = {}
        line.send(self._progress())
        check_ranks_agree(line.num_ranks, [*self._digest.digest()])
        return EngineStats(self._num_tokens, busy_s, first_s)

    def _take(self, messages: Sequence[Message]) -> bool:
        """Admit and drop requests; return False if the driver ends the call."""
        for message in messages:
            if isinstance(message, LiveRequest):
                name = message.request_id
                self._core.add_request(self._core_request(message))
                self._open[name] = message
                self._sampled[name] = self._nothing(name)
            elif message is not None and message in self._open:
                self._core.abort_requests([message])
                del self._open[message], self._sampled[message]
        return None not in messages

    def _add(self, outputs: Sequence[Any]) -> None:
        """Add the outputs of one step, a token each."""
        if not outputs:
            return
        rows = self._log_probs.of([output.request_id for output in outputs]).tolist()
        self._num_tokens += len(outputs)
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
            self._digest.update(np.asarray(one.tokens, np.int32).tobytes())
            del self._sampled[one.request_id]
            if one.request_id in self._open:
                self._sampled[one.request_id] = self._nothing(one.request_id)
        return found

    def _nothing(self, request_id: str) -> Progress:
        return Progress(request_id, [], [], "", self._version)

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
