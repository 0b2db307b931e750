"""Requests to the rollout engines, in batches or while others decode.

A batch of requests (`Requests`) is partitioned over the engines, and their answer is a
`RolloutBatch`. Live requests come and go: in each call that serves them, the first rank of an
engine connects with the driver, which listens. Messages are lines of JSON:

    engine -> driver    the secret and its index; then lists of Progress
    driver -> engine    Request: sample it; a request's id: drop it; None: end

At the end, an engine finishes requests that must finish, returns the tokens of the others and
closes the connection. `TICK` comes while no engine has a request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pydantic_core
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridrl.data.batch import CallStats, EngineStats, RolloutBatch
from hybridrl.data.images import HeldImages, PromptImages, image_rows
from hybridrl.data.partition import balance
from hybridrl.data.ragged import Ragged
from hybridrl.data.shardable import Piece, Shardable


@dataclass(frozen=True)
class SamplingParams:
    """Distribution from which tokens are sampled, and its ends; shared by many requests.

    Attributes:
        temperature: divides the logits; 0 decodes greedily.
        top_p: probability mass of nucleus sampling; 1 samples from the whole distribution.
        top_k: number of most probable tokens to sample from; None: all.
        stop_token_ids: tokens that end a response, besides the model's end tokens; they are part
            of it.
        more: further fields of vLLM's SamplingParams, such as penalties or a grammar.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)


# Engine of requests that may go to any.
ANY = -1


class Request(NamedTuple):
    """One response to sample.

    Attributes:
        request_id: unique among the open requests of the engine.
        prompt: token ids; of a response that goes on, also its tokens so far.
        seed: of its sampling.
        max_tokens: longest response, at least 1.
        params: distribution of its tokens.
        engine: index of the engine that samples it, or ANY.
        in_pieces: its tokens are returned as they are sampled, not at its end alone.
        must_finish: it is sampled to its end, whatever ends the other requests of the call.
        images: of `prompt`, which has their placeholders expanded.
    """

    request_id: str
    prompt: list[int]
    seed: int
    max_tokens: int
    params: SamplingParams
    engine: int = ANY
    in_pieces: bool = False
    must_finish: bool = False
    images: PromptImages | None = None


@dataclass(frozen=True)
class Requests(Shardable):
    """Responses to sample in one call of the engines, those of each prompt together.

    Attributes:
        requests: with the same params, and with or without an engine.
        group_id: [B] int64, that of the answer.
        each: consecutive requests that share a prompt and thus an engine.
        expected_tokens: [B / each], cost by which prompts are partitioned over the engines
            (data/lengths.py); None: their lengths.
        token_budget: an engine stops once it has sampled this many tokens per request in the mean;
            responses without an end are `unfinished` then. None: every response is finished.
        enough_ended: an engine also stops once this share of its responses has ended; None: not.
        holds: engines hold unfinished requests with their keys and values, and go on with those of
            the next call that have the same id and tokens.
        returns_recorded: the answer needs what the engine records of the responses, if it does.
    """

    requests: Sequence[Request]
    group_id: Tensor
    each: int = 1
    expected_tokens: Sequence[float] | None = None
    token_budget: float | None = None
    enough_ended: float | None = None
    holds: bool = False
    returns_recorded: bool = False

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def prompts(self) -> Ragged:
        """Ragged int32, the prompt of each request."""
        prompts, _, rows = _distinct(self.requests)
        return prompts.select(torch.from_numpy(rows))

    def pieces(self, num_shards: int) -> list[list[Piece]]:
        """Return each engine's requests: by `engine`, or in equal counts with balanced cost."""
        return [[partial(self._packed, part)] for part in self._partition(num_shards)]

    def join(self, results: Sequence[RolloutBatch]) -> RolloutBatch:
        """Return the engines' responses in the order of `requests`."""
        rows = torch.tensor([row for part in self._partition(len(results)) for row in part])
        batches = [
            result.adding(engine=torch.full((len(result),), engine))
            for engine, result in enumerate(results)
        ]
        joined = RolloutBatch.concat(batches, rows.argsort())
        images = image_rows(one.images for one in self.requests)  # the driver's: none came back
        return replace(
            joined,
            images=images,
            engines=tuple(stats for batch in results for stats in batch.engines),
        )

    @staticmethod
    def assemble(contents: Sequence["_Packed"]) -> "Requests":
        """Return the requests of an engine."""
        (packed,) = contents
        prompts = [row.tolist() for row in packed.prompts.rows()]
        columns = packed.rows, packed.ids, packed.seeds, packed.max_tokens, packed.must_finish
        rows = zip(*(column.tolist() for column in columns), strict=True)
        requests = [
            Request(
                name,
                prompts[row],
                seed,
                longest,
                packed.params,
                must_finish=must,
                images=packed.images[row],
            )
            for row, name, seed, longest, must in rows
        ]
        return replace(packed.call, requests=requests)

    def _packed(self, part: list[int]) -> "_Packed":
        """Return some requests as tensors; a prompt that requests share is packed once."""
        requests = [self.requests[row] for row in part]
        params = self.requests[0].params if self.requests else SamplingParams(temperature=1.0)
        assert all(one.params is params for one in requests), "requests of a batch share params"
        prompts, images, rows = _distinct(requests)
        return _Packed(
            call=replace(self, requests=(), group_id=self.group_id[part], expected_tokens=None),
            params=params,
            prompts=prompts,
            images=images,
            rows=rows,
            ids=np.array([one.request_id for one in requests], str),
            seeds=np.array([one.seed for one in requests], np.int64),
            max_tokens=np.array([one.max_tokens for one in requests], np.int64),
            must_finish=np.array([one.must_finish for one in requests], bool),
        )

    def _partition(self, num_shards: int) -> list[list[int]]:
        """Return the rows of each engine."""
        if self.requests and self.requests[0].engine != ANY:
            engines = [one.engine for one in self.requests]
            return [[r for r, e in enumerate(engines) if e == k] for k in range(num_shards)]
        each = self.each
        cost = self.expected_tokens or [len(one.prompt) for one in self.requests[::each]]
        parts = balance(range(len(cost)), cost, num_shards)
        return [[prompt * each + k for prompt in part for k in range(each)] for part in parts]


class _Packed(NamedTuple):
    """Requests of an engine as arrays; `rows` are those of their prompts and images."""

    call: Requests
    params: SamplingParams
    prompts: Ragged
    images: list[PromptImages | None]
    rows: NDArray[np.int64]
    ids: NDArray[np.str_]
    seeds: NDArray[np.int64]
    max_tokens: NDArray[np.int64]
    must_finish: NDArray[np.bool_]


def _distinct(
    requests: Sequence[Request],
) -> tuple[Ragged, list[PromptImages | None], NDArray[np.int64]]:
    """Return the prompts of requests, one that they share once, its images, each request's row."""
    distinct = {id(one.prompt): one for one in requests}
    index = {key: row for row, key in enumerate(distinct)}
    rows = np.array([index[id(one.prompt)] for one in requests], np.int64)
    prompts = Ragged.from_rows([one.prompt for one in distinct.values()], torch.int32)
    return prompts, [one.images for one in distinct.values()], rows


# Samples responses.
Generate = Callable[[Requests], RolloutBatch]
Message = Request | str | None
# Id of no request.
TICK = ""
# Reasons for which a response ends: its last token, the length limit, parameters that the engine
# cannot sample by.
STOP, LENGTH, FAILED = "STOP", "LENGTH", "FAILED"


class Progress(NamedTuple):
    """Further tokens of one request, with their log-probs in nats.

    `reason` is STOP, LENGTH or FAILED at its end, and empty before. `version` is the number of the
    weights that sampled the tokens.
    """

    request_id: str
    tokens: list[int]
    log_probs: list[float]
    reason: str
    version: int = 0


class DriverAddress(NamedTuple):
    """Address at which the driver listens, and the secret that an engine sends first."""

    address: tuple[str, int]
    secret: str


class Served(NamedTuple):
    """Result of one run of an engine: throughput, seconds without a request, weights' number."""

    stats: EngineStats
    idle_s: float
    weight_version: int


def total_stats(
    calls: Sequence[CallStats], first_token: Callable[[Sequence[float]], float] = itemgetter(0)
) -> CallStats:
    """Sum each engine over calls; `first_token` picks among the times of its first tokens."""
    return tuple(
        EngineStats(
            tokens=sum(stats.tokens for stats in of_engine),
            seconds=sum(stats.seconds for stats in of_engine),
            first_token_s=first_token([stats.first_token_s for stats in of_engine]),
            old_kv_tokens=sum(stats.old_kv_tokens for stats in of_engine),
        )
        for of_engine in zip(*calls, strict=True)
    )


def encode(message: Message | list[Progress] | int, held: HeldImages | None = None) -> bytes:
    """Return a message as a line; floats keep their bits. `held` are images of both ends."""
    content: object = message
    if isinstance(message, Request):
        images = message.images and (held or HeldImages()).packed(message.images)
        content = message._asdict() | {"images": images}
    return pydantic_core.to_json(content, bytes_mode="base64") + b"\n"


def decode_message(line: bytes, held: HeldImages | None = None) -> Message:
    """Return a message of the driver."""
    content = pydantic_core.from_json(line)
    if not isinstance(content, dict):
        return content
    params = content["params"]
    if bias := params["more"].get("logit_bias"):  # JSON has texts as keys
        params["more"]["logit_bias"] = {int(token): value for token, value in bias.items()}
    params["stop_token_ids"] = tuple(params["stop_token_ids"])
    images = content["images"] and (held or HeldImages()).unpacked(*content["images"])
    return Request(**content | {"params": SamplingParams(**params), "images": images})


def decode_progress(line: bytes) -> list[Progress]:
    """Return a message of an engine."""
    return [Progress(*one) for one in pydantic_core.from_json(line)]
