"""Continuous sampling: requests are admitted while others decode.

The first rank of an engine receives the driver's messages and passes them on every few decoding
steps, so that the schedulers of all ranks admit and drop the same requests in the same order.
"""

import hashlib
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch.distributed as dist

from hybridrl.config.schema import ModelConfig
from hybridrl.data.batch import EngineStats
from hybridrl.data.live import (
    FAILED,
    DriverAddress,
    LiveRequest,
    Message,
    Progress,
    Served,
    decode_message,
    encode,
)
from hybridrl.distributed import position
from hybridrl.rollout.vllm_compat import (
    StepLogProbs,
    core_request,
    enable_grammars,
    finish_steps,
    structured_outputs,
    tensor_parallel_group,
)

# Decoding steps between two looks at the messages: one for each OPEN_PER_STEP open requests, but at
# least MIN_STEPS. A step that computes prompts takes some milliseconds more, for which all open
# requests wait; so the more there are, the more are admitted together.
MIN_STEPS, OPEN_PER_STEP = 4, 16


class Channel:
    """An engine's side of its connection with the driver. Only the first rank has a `link`."""

    def __init__(self, link: socket.socket | None, num_ranks: int) -> None:
        self._link = link
        self._num_ranks = num_ranks
        self._sent = hashlib.blake2b()
        self._received = SimpleQueue[Message | OSError]()
        self._reader = Thread(target=self._read, daemon=True)
        if link is not None:
            self._reader.start()

    def send(self, progress: list[Progress]) -> None:
        """Send progress to the driver, if there is any; called on all ranks."""
        if self._num_ranks > 1:
            for one in progress:
                self._sent.update(np.asarray([len(one.tokens), *one.tokens], np.int64).tobytes())
        if self._link is not None and progress:
            self._link.sendall(encode(progress))

    def receive(self, *, blocks: bool) -> list[Message]:
        """Return the messages since the last call, the same on all ranks; wait if it `blocks`.

        Raises:
            ConnectionError: the driver has closed the connection.
            RuntimeError: the ranks have sent different tokens.
        """
        found: list[Message] = []
        while self._link is not None and (blocks or not self._received.empty()):
            message, blocks = self._received.get(), False
            if isinstance(message, OSError):
                raise message
            found.append(message)
        if self._num_ranks == 1:
            return found
        own = found, self._sent.digest()
        ranks = [own] * self._num_ranks
        dist.all_gather_object(ranks, own, group=tensor_parallel_group())
        if len({digest for _, digest in ranks}) > 1:
            raise RuntimeError("the ranks of one rollout engine sampled different tokens")
        return ranks[0][0]

    def close(self) -> None:
        """End the connection once the driver has received everything."""
        if self._link is not None:
            self._link.shutdown(socket.SHUT_WR)
            self._reader.join()

    def _read(self) -> None:
        """Receive messages at once, so that the driver's buffer stays small."""
        assert self._link is not None
        why = "the driver closed it"
        try:
            with self._link.makefile("rb") as lines:
                for line in lines:
                    self._received.put(decode_message(line))
        except (OSError, TypeError, ValueError) as error:  # lost, or not a message
            why = repr(error)
        self._received.put(ConnectionError(f"the connection with the driver ended: {why}"))


@contextmanager
def connected(driver: DriverAddress, tensor_parallel_size: int) -> Iterator[Channel]:
    """Connect an engine with the driver; only its first rank does."""
    engine, rank = divmod(dist.get_rank(), tensor_parallel_size)
    if rank > 0:
        yield Channel(None, tensor_parallel_size)
        return
    with socket.create_connection(driver.address) as link:
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(encode(driver.secret) + encode(engine))
        channel = Channel(link, tensor_parallel_size)
        try:
            yield channel
        finally:
            channel.close()


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
        self._num_tokens = 0

    def serve(self, channel: Channel) -> Served:
        """Serve requests until the driver ends the run.

        Requests with sampling parameters of their own are sampled to their end: vLLM would apply
        penalties and grammars to the rest as if it were the whole. Others are cut.

        Raises:
            ConnectionError: the driver has closed the connection.
            RuntimeError: vLLM aborted a request, or the engine's ranks sampled different tokens.
        """
        start, idle_s, first_s, step, has_ended = time.perf_counter(), 0.0, 0.0, 0, False
        with self._log_probs.recorded(self._core):
            while not has_ended or any(request.sampling for request in self._open.values()):
                began = time.perf_counter()
                if not self._open:
                    position.at("wait for requests")
                messages = channel.receive(blocks=not self._open)
                if not self._open:
                    idle_s += time.perf_counter() - began
                self._take(messages)
                has_ended = has_ended or None in messages
                for _ in range(max(MIN_STEPS, len(self._open) // OPEN_PER_STEP)):
                    if not self._open:
                        break
                    step += 1
                    position.at("decoding step", step)
                    self._add(self._core.get_output().outputs)
                    if len(self._sampled) > len(self._open):  # a request has ended
                        channel.send(self._progress())
                channel.send(self._progress())
                if self._num_tokens:
                    first_s = first_s or time.perf_counter() - start
            for outputs in finish_steps(self._core):
                self._add(outputs)
        self._core.abort_requests([*self._open])
        self._open = {}
        channel.send(self._progress())
        channel.receive(blocks=False)
        seconds = time.perf_counter() - start - idle_s
        return Served(EngineStats(self._num_tokens, seconds, first_s), idle_s, self._version)

    def _take(self, messages: Sequence[Message]) -> None:
        """Admit and drop requests."""
        for message in messages:
            if isinstance(message, LiveRequest):
                name = message.request_id
                self._core.add_request(self._core_request(message))
                self._open[name] = message
                self._sampled[name] = self._nothing(name)
            elif message in self._open:
                self._core.abort_requests([message])
                del self._open[message], self._sampled[message]

    def _add(self, outputs: Sequence[Any]) -> None:
        """Add the outputs of one step, a token each."""
        # One that fails may have no token.
        sampled = [output for output in outputs if output.new_token_ids]
        rows = self._log_probs.of([output.request_id for output in sampled]) if sampled else ()
        self._num_tokens += len(sampled)
        for output, log_prob in zip(sampled, map(float, rows), strict=True):
            so_far = self._sampled[output.request_id]
            so_far.tokens.extend(output.new_token_ids)
            so_far.log_probs.append(log_prob)
        for output in outputs:
            if output.finish_reason is not None:
                name = output.request_id
                so_far = self._sampled[name]
                reason = output.finish_reason.name
                if reason not in ("STOP", "LENGTH"):
                    if not self._open[name].sampling:
                        raise RuntimeError(f"vLLM ended request {name} with {reason}")
                    # As with a grammar that accepts nothing.
                    reason, so_far = FAILED, self._nothing(name)
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
