"""The loop over an engine's decoding steps: requests in, tokens and log-probs out.

`Call` admits, steps, keeps the tokens and ends. Two things decide what is admitted and when it is
over: a batch of prompts (`Sampler.generate`), or the driver, which sends live requests
(rollout/live.py).
"""

import hashlib
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridrl.config.schema import RolloutConfig
from hybridrl.data.batch import EngineStats, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.requests import FAILED, LENGTH, STOP, Message, Request, Requests
from hybridrl.distributed import position
from hybridrl.rollout.engine import Engine, EnginePart, Step

# Tokens of a request between two looks at them, where any number will do.
ANY = 2**31


@dataclass
class Response:
    """Tokens and log-probs that a call has sampled for a request, in parts.

    `reason` is empty before its end.
    """

    request: Request
    reason: str = ""
    parts: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(tokens) for tokens, _ in self.parts)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Token ids, [n]."""
        return np.concatenate([np.empty(0, np.int32), *(tokens for tokens, _ in self.parts)])

    @property
    def log_probs(self) -> NDArray[np.float32]:
        """Log-probs of the tokens, [n], nats."""
        return np.concatenate([np.empty(0, np.float32), *(values for _, values in self.parts)])


class Call:
    """Responses of one call of an engine.

    Attributes:
        responses: by request id; the caller may remove those that it has read.
        open: ids of requests without an end.
        must_finish: those of them that are sampled to their end in any case.
        num_tokens: tokens sampled so far.
        num_steps: decoding steps so far.
        first_token_s: seconds from the beginning to the first token; 0 before.

    Raises:
        RuntimeError: the engine is asleep.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.awake != set(EnginePart):  # vLLM would wait forever
            raise RuntimeError("the rollout engine is asleep; reshard wakes it")
        self._engine = engine
        self._start = time.perf_counter()
        self.responses: dict[str, Response] = {}
        self.open: set[str] = set()
        self.must_finish: set[str] = set()
        self.num_tokens = self.num_steps = 0
        self.first_token_s = 0.0
        # Since `share`: the request of each token, the tokens, and the log-probs of each step.
        self._names: list[str] = []
        self._tokens: list[int] = []
        self._log_probs: list[NDArray[np.float32]] = []

    def admit(self, requests: Sequence[Request], held: Collection[str] = ()) -> None:
        """Open requests; those with an id of `held` are open in the engine already."""
        self._engine.submit([one for one in requests if one.request_id not in held])
        for request in requests:
            self.responses[request.request_id] = Response(request)
            self.open.add(request.request_id)
            if request.must_finish:
                self.must_finish.add(request.request_id)

    def drop(self, request_ids: Sequence[str]) -> None:
        """Drop open requests; what was sampled for them stays."""
        self._engine.cancel(request_ids)
        self.open.difference_update(request_ids)
        self.must_finish.difference_update(request_ids)

    def run(self, goes_on: Callable[[], int]) -> None:
        """Step the engine as long as the call goes on, which is asked before each look at tokens.

        Args:
            goes_on: returns the most tokens of a request before it is asked again; 0: none.

        Raises:
            RuntimeError: the engine ended a response by itself.
        """
        while most := goes_on():
            position.at("decoding step", self.num_steps + 1)
            self._keep(self._engine.step(most))
        for step in self._engine.drain():
            self._keep(step)

    def to_the_end(self) -> None:
        """Step the engine until all responses have ended."""
        self.run(lambda: ANY if self.open else 0)

    def seconds(self) -> float:
        """Return the seconds since the beginning."""
        return time.perf_counter() - self._start

    def share(self) -> None:
        """Add the tokens since the last time to their responses."""
        index = {name: at for at, name in enumerate(self.responses)}
        owners = np.fromiter(map(index.__getitem__, self._names), np.int64, len(self._names))
        order = owners.argsort(kind="stable")
        tokens = np.array(self._tokens, np.int32)[order]
        log_probs = np.concatenate([np.empty(0, np.float32), *self._log_probs])[order]
        start, ends = 0, np.bincount(owners, minlength=len(index)).cumsum()
        for response, end in zip(self.responses.values(), ends.tolist(), strict=True):
            if end > start:
                response.parts.append((tokens[start:end], log_probs[start:end]))
            start = end
        self._names, self._tokens, self._log_probs = [], [], []

    def _keep(self, step: Step) -> None:
        """Keep a step's tokens, all at once: a GPU may wait for it."""
        if step.tokens and not self.first_token_s:
            self.first_token_s = self.seconds()
        self.num_tokens += len(step.tokens)
        self.num_steps += step.steps
        self._names += step.request_ids
        self._tokens += step.tokens
        self._log_probs.append(step.log_probs)
        for name, reason in step.ended.items():
            response = self.responses[name]
            response.reason = reason
            if reason not in (STOP, LENGTH):
                if not response.request.params.more:
                    raise RuntimeError(f"the engine ended request {name} with {reason}")
                response.reason = FAILED  # as with a grammar that accepts nothing
            self.open.remove(name)
            self.must_finish.discard(name)


class Peers:
    """Agreement of an engine's ranks on tokens, and on what the first one received."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self.size = 1 if group is None else group.size()
        self._sampled = hashlib.blake2b()

    def note(self, tokens: Sequence[int] | Tensor) -> None:
        """Add integers that all ranks must have sampled alike."""
        if self._group is not None:
            self._sampled.update(len(tokens).to_bytes(8, "little"))
            self._sampled.update(np.asarray(tokens, np.int64).tobytes())

    def of_first(self, messages: list[Message]) -> list[Message]:
        """Return the messages that the first rank received; a collective.

        Raises:
            RuntimeError: the ranks have noted different tokens.
        """
        if self._group is None:
            return messages
        own = messages, self._sampled.digest()
        ranks = [own] * self.size
        dist.all_gather_object(ranks, own, group=self._group)
        if len({digest for _, digest in ranks}) > 1:
            raise RuntimeError("the ranks of one rollout engine sampled different tokens")
        return ranks[0][0]


class Admitted(NamedTuple):
    """An admitted request: its id, the number of the weights then, and that of the call."""

    request_id: str
    version: int
    call: int


class Sampler:
    """Calls of an engine with batches of requests.

    Responses that a call leaves without an end are dropped. With `Requests.holds` they are held
    instead: a later call goes on with their requests, whose keys and values stay.

    Attributes:
        held: by request id and length, prompt included.
    """

    def __init__(self, engine: Engine, config: RolloutConfig) -> None:
        self._engine = engine
        self._config = config
        self._calls = 0
        self.held: dict[tuple[str, int], Admitted] = {}

    def generate(self, batch: Requests, version: int) -> RolloutBatch:
        """Sample the responses, or tokens of their budget, by weights number `version`.

        Raises:
            RuntimeError: the engine is asleep or ended a response by itself, or its ranks sampled
                different tokens.
            ValueError: a prompt is longer than rollout.max_prompt_tokens.
        """
        call = Call(self._engine)
        self._check_lengths(batch.requests)
        admitted = self._admit(call, batch, version)
        budget = math.inf if batch.token_budget is None else len(batch) * batch.token_budget
        enough = math.inf if batch.enough_ended is None else len(batch) * batch.enough_ended

        def goes_on() -> int:
            ended, left = len(batch) - len(call.open), budget - call.num_tokens
            if left <= 0 or ended >= enough:
                return int(bool(call.must_finish))
            # A quarter: tokens are counted two submissions later, and none may exceed the budget.
            decoding = min(len(call.open), self._config.max_num_seqs or ANY)
            return int(max(1, min(left / 4 / decoding, ANY))) if decoding else 0

        call.run(goes_on)
        call.share()
        responses = [call.responses[one.request_id] for one in admitted]
        if batch.holds:
            self._hold(batch.requests, responses, admitted)
        kept = {one.request_id for one in self.held.values()}
        call.drop([name for name in call.open if name not in kept])
        answer = self._answer(batch, responses, version)
        peers = Peers(self._engine.peers)
        peers.note(answer.responses.values)
        peers.note(answer.responses.lengths)
        peers.of_first([])
        old = torch.tensor([one.version != version for one in admitted], dtype=torch.bool)
        old_kv_tokens = int(answer.responses.lengths[old].sum())
        stats = EngineStats(call.num_tokens, call.seconds(), call.first_token_s, old_kv_tokens)
        return replace(answer, engines=(stats,))

    def _admit(self, call: Call, batch: Requests, version: int) -> list[Admitted]:
        """Open requests, or take the held ones; drop other held ones."""
        self._calls += 1
        held = self.held if batch.holds else {}
        admitted, requests = [], []
        for index, request in enumerate(batch.requests):
            # Ids are the call's own: an engine may still have tokens of an earlier one's.
            new = Admitted(f"{self._calls}-{index}/{request.request_id}", version, self._calls)
            one = held.pop((request.request_id, len(request.prompt)), new)
            admitted.append(one)
            requests.append(request._replace(request_id=one.request_id))
        self._engine.cancel([one.request_id for one in self.held.values()])
        self.held = {}
        call.admit(requests, {one.request_id for one in admitted if one.call < self._calls})
        return admitted

    def _hold(
        self,
        requests: Sequence[Request],
        responses: Sequence[Response],
        admitted: Sequence[Admitted],
    ) -> None:
        """Hold open requests that a later call may continue.

        New requests without a token wait for a place; the next call orders them anew.
        """
        self.held = {
            (request.request_id, len(request.prompt) + len(response)): one
            for request, response, one in zip(requests, responses, admitted, strict=True)
            if not response.reason and (len(response) or one.call < self._calls)
        }

    def _check_lengths(self, requests: Sequence[Request]) -> None:
        limit, most = self._config.max_prompt_tokens, self._config.max_response_tokens
        long = []
        for request in requests:
            assert request.prompt and request.max_tokens > 0, f"nothing to sample: {request}"
            # Later prompts of a conversation include the part of its response that is used up.
            length = len(request.prompt) + request.max_tokens - most
            if length > limit:
                long.append(f"the prompt of response {request.request_id} has {length}")
        if long:
            raise ValueError(f"rollout.max_prompt_tokens={limit}, but {', '.join(long)} tokens")

    def _answer(self, batch: Requests, responses: Sequence[Response], version: int) -> RolloutBatch:
        rows = [torch.from_numpy(one.tokens) for one in responses]
        log_probs = [torch.from_numpy(one.log_probs) for one in responses]
        tokens = Ragged.from_rows(rows, torch.int32)
        recorded = self._engine.take_recorded([one.request.request_id for one in responses])
        if not batch.returns_recorded:
            recorded = {}
        elif "kept_ids" not in recorded and any(one.request.params.top_p < 1 for one in responses):
            raise ValueError(
                "rollout.top_p is below 1, but take_recorded of the engine returns no kept tokens, "
                "over which the trainer's log-probs are normalised"
            )
        is_open = torch.tensor([not one.reason for one in responses], dtype=torch.bool)
        answer = RolloutBatch(
            prompts=batch.prompts,
            responses=tokens,
            response_mask=tokens.like(torch.ones_like(tokens.values).bool()),
            rollout_log_probs=Ragged.from_rows(log_probs, torch.float32),
            group_id=batch.group_id,
            weight_version=torch.full((len(batch),), version),
            truncated=torch.tensor([one.reason == LENGTH for one in responses], dtype=torch.bool),
            added={"unfinished": is_open},
        )
        return RolloutBatch.of({**answer.tensors(), **recorded})
