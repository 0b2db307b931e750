"""Base of the endpoint's formats: sampling parameters, refusals, answers and events."""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hybridrl.agents.constraints import STRUCTURED, Constraint
from hybridrl.agents.episode import (
    Ask,
    Completion,
    Episode,
    Prompt,
    RequestError,
    Settings,
    refused_parameter,
)
from hybridrl.agents.policy import Policy
from hybridrl.config.choices import OtherSampling
from hybridrl.rollout.vllm.text import check_constraint, check_sampling

# Most stop strings of a request, of which OpenAI takes 4, and characters of each. Longer ones and
# more would hold up all episodes while they are tokenised.
MAX_STOPS, MAX_STOP_CHARS = 16, 1000
# The only model of the endpoint.
MODEL = "policy"
# Parameters that change nothing that is sampled.
IGNORED = frozenset(
    {
        *("model", "user", "metadata", "store", "stream_options", "service_tier", "include"),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "timeout"),
        *("prompt_cache_options", "cache_control"),
        *("parallel_tool_calls", "reasoning_effort", "verbosity"),
    }
)
# Unknown parameters that change something if they are off, and values that are off.
ON = frozenset({"skip_special_tokens", "include_reasoning", "web_search_options"})
OFF: tuple[Any, ...] = (None, False, "", [], {})
# Parameters of vLLM that a run may accept for completions that are not trained.
OTHER_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "logit_bias"),
)


class SamplingRequest(BaseModel):
    """Parameters of most formats. Unknown ones are refused by name."""

    model_config = ConfigDict(extra="allow")

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    # A larger one is infinite in float32, and log-probs would be NaN.
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None

    @property
    def count(self) -> int:
        """Number of completions."""
        return 1

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return ()

    def constraint(self) -> Constraint | None:
        """Return the constraint of the text, if any."""
        return None

    def ask(self, episode: Episode, prompt: Prompt, max_tokens: int | None) -> Ask:
        """Return the request to sample after a prompt.

        Raises:
            RequestError: the run refuses a sampling parameter, or does not know one.
        """
        for name, value in (self.model_extra or {}).items():
            if name not in IGNORED and value not in ((None, True) if name in ON else OFF):
                raise refused_parameter(name, value, "The endpoint does not know it. Leave it out.")
        given = {name: vars(self)[name] for name in OTHER_SAMPLING}
        other, constraint = other_sampling(episode.settings, given), self.constraint()
        match episode.settings.other_sampling:
            case OtherSampling.refuse:
                _refuse(episode.settings, other, constraint)
            case OtherSampling.ignore:
                other, constraint = {}, None
        for name, value in other.items():
            try:
                check_sampling(name, value)
            except ValueError as error:
                raise RequestError(str(error), param=name) from error
        if constraint is None:
            return Ask(prompt, max_tokens, self.stops, self.seed, other)
        if constraint.excludes_calls:
            why = "A text constrained to JSON cannot call tools. Leave out the one or the other."
            raise refused_parameter(constraint.parameter, constraint.value, why)
        try:
            check_constraint(constraint.fields)
        except ValueError as error:
            raise RequestError(str(error), param=constraint.parameter) from error
        other[STRUCTURED] = constraint.fields
        return Ask(prompt, max_tokens, self.stops, self.seed, other, constraint.is_call)


class ToolsRequest(SamplingRequest):
    """Parameters of formats with tools, which are left out where none may be called."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None

    @model_validator(mode="after")
    def _without_forbidden_tools(self) -> Self:
        if self.tool_choice in ("none", {"type": "none"}):
            self.tools = None
        return self


class CompletionRequest(SamplingRequest):
    """Parameters of OpenAI's older formats."""

    n: int | None = Field(None, ge=1, le=128)
    stop: str | list[str] | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def count(self) -> int:
        """Number of completions."""
        return self.n or 1

    @property
    def streams_usage(self) -> bool:
        """True if a streamed answer ends with its usage."""
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return checked_stops("stop", [self.stop] if isinstance(self.stop, str) else self.stop)


class Format(ABC):
    """A format of requests: what it asks, its answer, and its events if the answer is streamed."""

    request_class: ClassVar[type[BaseModel]]

    def parse(self, body: bytes) -> Any:
        """Parse a body.

        Raises:
            RequestError: it is no JSON, or a parameter has a wrong type or value.
        """
        try:
            return self.request_class.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            message = f"{where}: {first['msg']}" if where else first["msg"]
            raise RequestError(message, param=where or None) from error

    @abstractmethod
    def ask(self, policy: Policy, episode: Episode, request: Any) -> Ask:
        """Render the request."""

    @abstractmethod
    def answer(
        self, policy: Policy, episode: Episode, request: Any, sampled: Sequence[Completion]
    ) -> dict[str, Any]:
        """Return the body of the answer."""

    @abstractmethod
    def events(
        self,
        policy: Policy,
        episode: Episode,
        request: Any,
        pieces: AsyncIterator[tuple[Completion, str]],
    ) -> AsyncIterator[str]:
        """Yield the lines of a streamed answer; `pieces` are (completion, further text)."""

    def error(self, error: RequestError) -> dict[str, Any]:
        """Return the body of an error, in OpenAI's form."""
        kind = "authentication_error" if error.status == 401 else "invalid_request_error"
        kind = "server_error" if error.status >= 500 else kind
        content = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
        return {"error": content}


def event(data: dict[str, Any] | str, name: str | None = None) -> str:
    """Return one server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


def checked_stops(name: str, stops: Sequence[str] | None) -> tuple[str, ...]:
    """Return the stop strings of the parameter `name`.

    Raises:
        RequestError: they are too many or too long.
    """
    longest = max(map(len, stops or ()), default=0)
    if longest > MAX_STOP_CHARS or len(stops or ()) > MAX_STOPS:
        has = f"{name} has {len(stops or ())} strings, the longest of {longest} characters"
        limits = f"{MAX_STOPS} strings of {MAX_STOP_CHARS} characters"
        raise RequestError(f"{has}, expected at most {limits}.", param=name)
    return tuple(stops or ())


def usage(completions: Sequence[Completion]) -> dict[str, int]:
    """Return OpenAI's count of tokens."""
    prompt, sampled = completions[0].prompt_tokens, sum(len(one.tokens) for one in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def other_sampling(settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of vLLM in `given` that differ from those of training."""
    usual = _usual(settings)
    return {
        name: value
        for name, value in given.items()
        if value is not None and value not in usual[name] and value != {}
    }


def _usual(settings: Settings) -> dict[str, tuple[Any, ...]]:
    """Return the values of sampling parameters that change nothing."""
    return {
        "temperature": (settings.training_temperature,),
        "top_p": (settings.training_top_p,),
        "top_k": (0, -1),
        "min_p": (0,),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": (),
    }


def _refuse(settings: Settings, other: dict[str, Any], constraint: Constraint | None) -> None:
    """Raise RequestError if a request would be sampled otherwise than in training."""
    if constraint is not None:
        other = other | {constraint.parameter: constraint.value}
    for name, value in other.items():
        run = "".join(
            f"; this run samples with {name} = {one}" for one in _usual(settings).get(name, ())[:1]
        )
        raise refused_parameter(
            name,
            value,
            f"Tokens sampled otherwise cannot be trained{run}. Leave it out, or set "
            "agent.other_sampling=ignore: then it is left out, or =mask: then it is honoured, and "
            "the completion is not trained.",
        )
