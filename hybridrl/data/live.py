"""Requests of continuous sampling, and how driver and engines exchange them.

In each run of an engine its first rank connects with the driver, which listens. Messages are lines
of JSON:

    engine -> driver    the secret and its index; then lists of Progress
    driver -> engine    LiveRequest: sample it; a request's id: drop it; None: end

At the end, an engine finishes requests with sampling parameters of their own, returns the tokens of
the others and closes the connection. `TICK` comes while no engine has a request.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pydantic_core

from hybridrl.data.batch import EngineStats


@dataclass(frozen=True)
class LiveRequest:
    """One completion to sample.

    Attributes:
        request_id: unique among all requests of the engine.
        engine: index of the engine that samples it.
        prompt: token ids.
        seed: of its sampling.
        max_tokens: longest completion, at least 1.
        temperature: divides the logits; 0 decodes greedily.
        top_p: probability mass of nucleus sampling.
        stop_token_ids: tokens that end it, besides the model's end tokens; they are part of it.
        in_pieces: its tokens are returned as they are sampled, not at its end alone.
        sampling: further fields of vLLM's SamplingParams.
    """

    request_id: str
    engine: int
    prompt: list[int]
    seed: int
    max_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: tuple[int, ...] = ()
    in_pieces: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)


Message = LiveRequest | str | None
# Id of no request.
TICK = ""
# Reason of a request whose parameters vLLM cannot sample by.
FAILED = "FAILED"


class Progress(NamedTuple):
    """Further tokens of one request, with their log-probs in nats.

    `reason` at its end is STOP (by the last token, an end or stop token), LENGTH (max_tokens) or
    `FAILED`; before that it is empty. `version` is the number of the weights that sampled them.
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


def encode(message: Message | list[Progress] | int) -> bytes:
    """Return a message as a line; floats keep their bits."""
    return pydantic_core.to_json(message) + b"\n"


def decode_message(line: bytes) -> Message:
    """Return a message of the driver."""
    found = pydantic_core.from_json(line)
    if not isinstance(found, dict):
        return found
    if bias := found["sampling"].get("logit_bias"):  # JSON has texts as keys
        found["sampling"]["logit_bias"] = {int(token): value for token, value in bias.items()}
    return LiveRequest(**found | {"stop_token_ids": tuple(found["stop_token_ids"])})


def decode_progress(line: bytes) -> list[Progress]:
    """Return a message of an engine."""
    return [Progress(*one) for one in pydantic_core.from_json(line)]
