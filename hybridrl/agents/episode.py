"""Episodes of the endpoint, and what is asked and answered in them."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from hybridrl.agents.record import EpisodeRecord, Images, Start
from hybridrl.config.choices import OtherSampling
from hybridrl.config.schema import RolloutConfig
from hybridrl.data.requests import Progress, Request

# Answers that are remembered, times the token sequences that are, where not all sequences are.
ANSWERS = 32
# Ends of a completion.
STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"


@dataclass(frozen=True)
class Settings:
    """Sampling of a phase: a training step or an evaluation.

    Attributes:
        temperature, top_p: with which every completion is sampled.
        training_temperature, training_top_p: of training steps; requests may name only these.
        context: longest prompt and completion together, tokens.
        other_sampling: of requests with other parameters, as agent.other_sampling.
    """

    temperature: float
    top_p: float
    training_temperature: float
    training_top_p: float
    context: int
    other_sampling: OtherSampling

    @classmethod
    def of(cls, rollout: RolloutConfig, other_sampling: OtherSampling) -> Self:
        """Return the sampling of training steps."""
        usual = rollout.temperature, rollout.top_p
        context = rollout.max_prompt_tokens + rollout.max_response_tokens
        return cls(*usual, *usual, context, other_sampling)


@dataclass
class Episode:
    """One run of a program.

    Attributes:
        key: authorises requests: the episode's name, and in a repeated attempt `.<attempt>`.
        seed_parts: from which its seeds derive: run seed, step, prompt, sample.
        engine: index of the engine that samples all its requests.
        raw: sampled text by the assistant message that was returned for it.
        answers: messages that were returned, by the completion's name.
        asked: how often each request was made, and `seeded` each with a seed of its own.
        open: progress of the requests that are being sampled.
        is_open: accepts requests.
    """

    key: str
    seed_parts: tuple[int | str, ...]
    engine: int
    settings: Settings
    record: EpisodeRecord
    raw: dict[str, str] = field(default_factory=dict)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: Counter[bytes] = field(default_factory=Counter)
    seeded: Counter[bytes] = field(default_factory=Counter)
    open: "dict[str, asyncio.Queue[Progress]]" = field(default_factory=dict)
    is_open: bool = True

    @property
    def name(self) -> str:
        """Key of the first attempt."""
        return self.key.partition(".")[0]

    def repeated(self, attempt: str) -> "Episode":
        """Return the episode for another attempt of its program: nothing is recorded."""
        fixed = self.seed_parts, self.engine, self.settings
        record = EpisodeRecord(self.record.encode, self.record.most)
        return Episode(f"{self.name}.{attempt}", *fixed, record)

    def forget_old(self) -> None:
        """Forget the oldest answers and requests, unless all token sequences are remembered."""
        if (most := self.record.most) is not None:
            last = {sequence.turns[-1].name for sequence in self.record.sequences}
            for known in (self.raw, self.answers, self.asked, self.seeded):
                for key in [*known][: -ANSWERS * most]:
                    if key not in last:
                        del known[key]

    def transcript(self) -> list[list[Mapping[str, Any]]]:
        """Return the messages of each token sequence: of its last request, and the answer."""
        return [[*one.messages, self.answers[one.turns[-1].name]] for one in self.record.sequences]

    def wake(self) -> None:
        """End open requests at once."""
        for request_id, queue in self.open.items():
            queue.put_nowait(Progress(request_id, [], [], CANCELLED))


class Prompt(NamedTuple):
    """Rendered text of a request, its messages in OpenAI's form, and the images in them."""

    text: str
    messages: Sequence[Mapping[str, Any]]
    images: Images = ()


@dataclass(frozen=True)
class Ask:
    """A request in no format: what to sample after a prompt.

    Attributes:
        max_tokens: null: as many as the context has room for.
        sampling: parameters other than the run's, passed to vLLM; these are not trained.
        is_call: the text is constrained to the JSON of a tool call.
    """

    prompt: Prompt
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    is_call: bool = False


@dataclass
class Completion:
    """One sampled completion; complete with its last piece.

    Attributes:
        name: for ids in answers; a function of the request, as its seed is.
        text: without special tokens and stop string.
        raw: with both, but without its end token.
        reason: STOP or LENGTH at its end, before that CANCELLED.
        stop: the stop string that ended it, if any.
        is_call: its text is the JSON of a tool call.
    """

    index: int
    name: str
    prompt_tokens: int
    text: str = ""
    raw: str = ""
    reason: str = CANCELLED
    stop: str | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    is_call: bool = False

    @property
    def has_ended(self) -> bool:
        """True if it is complete."""
        return self.reason != CANCELLED

    def begun(self) -> "Completion":
        """Return it as it was before its end, for the first event of a stream."""
        return replace(self, reason=CANCELLED, stop=None)


class Begun(NamedTuple):
    """A completion that is about to be sampled, the tokens before it and the engine's request."""

    completion: Completion
    start: Start
    request: Request
    ask: Ask


def message_key(message: dict[str, Any]) -> str:
    """Return what identifies an assistant message: its text and tool calls."""
    functions = [call.get("function") or {} for call in message.get("tool_calls") or []]
    calls = [[one.get("name"), as_mapping(one.get("arguments"))] for one in functions]
    return json.dumps([message.get("content") or "", calls], sort_keys=True)


def as_mapping(text: Any) -> Any:
    """Return the arguments of a tool call as a mapping, or the text itself if it is none."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


class RequestError(Exception):
    """Refusal of a request.

    Args:
        message: what is wrong, for the program's author.
        status: HTTP status; 400: the request, 401: the key, 404: the model, 413: its size.
        param: the parameter at fault.
        code: of the OpenAI API, such as unsupported_parameter.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code


def refused_parameter(name: str, value: object, why: str) -> RequestError:
    """Return the error of a parameter that cannot be honoured."""
    message = f"Unsupported parameter: {name} = {value!r}. {why}"
    return RequestError(message, param=name, code="unsupported_parameter")


def too_long(context: int, has: str) -> RequestError:
    """Return the error of a prompt that leaves no room for a token, of which it `has` so many."""
    return RequestError(
        f"This model's maximum context length is {context} tokens (rollout.max_prompt_tokens + "
        f"max_response_tokens); the prompt has {has}.",
        param="messages",
        code="context_length_exceeded",
    )
