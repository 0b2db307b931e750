"""Requests of continuous sampling, and the connection over which an engine gets them.

The driver listens; the first rank of each engine connects when it begins to serve.

    engine -> driver    its index; then lists of Progress, until it closes the connection
    driver -> engine    LiveRequest: sample it; a request's id: drop it; None: end
"""

import os
import socket
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple


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


class Progress(NamedTuple):
    """Further tokens of one request, with their log-probs in nats.

    `reason` at its end is STOP (by the last token, an end or stop token) or LENGTH (max_tokens);
    before that it is empty. `version` is the number of the weights that sampled them.
    """

    request_id: str
    tokens: list[int]
    log_probs: list[float]
    reason: str
    version: int = 0


class Meeting(NamedTuple):
    """Where the driver listens, and the secret that both sides prove to know."""

    address: tuple[str, int]
    secret: bytes


def send_at_once(connection: Connection) -> None:
    """Send small messages without waiting for the receipt of earlier ones (Nagle's algorithm)."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
