"""Requests of continuous sampling, and the progress of an engine on them.

LiveRequest      one completion to sample: token ids in, with limits and a seed
LiveCall         what the driver tells all engines in one short call
EngineProgress   what one engine sampled in that call
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from hybridrl.data.shardable import Piece, Shardable


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


class EngineProgress(NamedTuple):
    """Progress of one engine in one call.

    `tokens` is the number of tokens sampled in its `seconds`; `weight_version` is that of the
    weights.
    """

    progress: list[Progress]
    tokens: int
    seconds: float
    weight_version: int = 0


@dataclass(frozen=True)
class LiveCall(Shardable):
    """One call of all engines.

    Attributes:
        new: requests to admit.
        cancelled: (engine, request id) of open requests that are dropped.
        steps: decoding steps at most; fewer if an engine has nothing left to decode.
    """

    is_stored = False

    new: Sequence[LiveRequest]
    cancelled: Sequence[tuple[int, str]]
    steps: int

    def pieces(self, num_shards: int) -> list[list[Piece]]:
        """Return each engine's part."""
        return [[partial(self._part, engine)] for engine in range(num_shards)]

    def join(self, results: Sequence[EngineProgress]) -> list[EngineProgress]:
        """Return the progress by engine."""
        return list(results)

    def _part(self, engine: int) -> "LiveCall":
        new = [request for request in self.new if request.engine == engine]
        cancelled = [(k, request_id) for k, request_id in self.cancelled if k == engine]
        return LiveCall(new, cancelled, self.steps)
