"""The policy as the endpoint samples from it: episodes, prompts, completions.

Runs in the thread of the endpoint's event loop. Seeds are a function of the episode and of the
request's content, not of the order in which requests arrive.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateError

from hybridrl.agents.errors import RequestError, refused_parameter
from hybridrl.agents.record import EpisodeRecord, Start
from hybridrl.agents.text import ModelText, TextStream
from hybridrl.data.live import LiveRequest, Progress
from hybridrl.data.seeds import derive_seed
from hybridrl.rollout.tool_calls import ParseTools

# Ends of a completion.
STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"


class Engines(Protocol):
    """Rollout engines that sample continuously."""

    def submit(self, request: LiveRequest) -> "asyncio.Queue[Progress]":
        """Begin to sample; the queue receives the progress."""
        ...

    def cancel(self, request: LiveRequest) -> None:
        """Drop a request, unless it has ended."""
        ...


@dataclass(frozen=True)
class Settings:
    """Sampling of a phase: a training step or an evaluation.

    Attributes:
        temperature, top_p: with which every completion is sampled.
        training_temperature, training_top_p: of training steps; requests may name only these.
        context: longest prompt and completion together, tokens.
        masks_other: accept other sampling parameters, and do not train their completions.
    """

    temperature: float
    top_p: float
    training_temperature: float
    training_top_p: float
    context: int
    masks_other: bool


@dataclass
class Episode:
    """One run of a program.

    Attributes:
        key: authorises requests and names the episode.
        seed_parts: from which its seeds derive: run seed, step, prompt, sample.
        engine: index of the engine that samples all its requests.
        raw: sampled text by the assistant message that was returned for it.
        asked: how often each request was made.
        open: progress of the requests that are being sampled.
        is_open: accepts requests.
        attempt: of the program, which may be repeated; the last one counts.
    """

    key: str
    seed_parts: tuple[int | str, ...]
    engine: int
    settings: Settings
    record: EpisodeRecord
    raw: dict[str, str] = field(default_factory=dict)
    asked: Counter[bytes] = field(default_factory=Counter)
    open: "dict[str, asyncio.Queue[Progress]]" = field(default_factory=dict)
    is_open: bool = True
    attempt: str = ""

    def begin_anew(self, attempt: str) -> None:
        """Forget what an earlier attempt of the program has sampled."""
        self.record = EpisodeRecord(self.record.encode, self.record.most)
        self.raw, self.asked, self.attempt = {}, Counter(), attempt

    def wake(self) -> None:
        """End open requests at once."""
        for request_id, queue in self.open.items():
            queue.put_nowait(Progress(request_id, [], [], CANCELLED))


@dataclass(frozen=True)
class Ask:
    """A request in no format: what to sample after a rendered text.

    Attributes:
        max_tokens: null: as many as the context has room for.
        sampling: parameters other than the run's, passed to vLLM; these are not trained.
    """

    text: str
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass
class Completion:
    """One sampled completion; complete with its last piece.

    Attributes:
        name: for ids in answers; a function of the request, as its seed is.
        text: without special tokens and stop string.
        reason: STOP or LENGTH at its end, before that CANCELLED.
        stop: the stop string that ended it, if any.
    """

    index: int
    name: str
    prompt_tokens: int
    text: str = ""
    reason: str = CANCELLED
    stop: str | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """True if it is complete."""
        return self.reason != CANCELLED


class Begun(NamedTuple):
    """A completion that is about to be sampled, the tokens before it and the engine's request."""

    completion: Completion
    start: Start
    request: LiveRequest
    ask: "Ask"


class Policy:
    """Episodes and their completions. `parse_tools` finds tool calls; None: tools are refused."""

    def __init__(
        self, text: ModelText, engines: Engines, parse_tools: ParseTools | None = None
    ) -> None:
        self.text = text
        self.parse_tools = parse_tools
        self._engines = engines
        self._episodes: dict[str, Episode] = {}
        self._count = 0

    def open(self, episode: Episode) -> None:
        """Accept the requests of an episode."""
        self._episodes[episode.key] = episode

    def close(self, keys: Sequence[str]) -> list[Episode]:
        """End episodes: refuse their requests and drop open ones, whose tokens do not count."""
        closed = [self._episodes.pop(key) for key in keys]
        for episode in closed:
            episode.is_open = False
            episode.wake()
        return closed

    def episode(self, key: str) -> Episode:
        """Return the episode of a key, `<key of the episode>.<attempt>`.

        Raises:
            RequestError: no open episode has this key.
        """
        name, _, attempt = key.partition(".")
        if name not in self._episodes:
            raise RequestError(
                "Incorrect API key: no running episode has it.", 401, code="invalid_api_key"
            )
        episode = self._episodes[name]
        if attempt != episode.attempt:
            episode.begin_anew(attempt)
        return episode

    def render(self, episode: Episode, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """Render chat messages; an answer of the policy is rendered as it was sampled.

        Raises:
            RequestError: the chat template refuses them.
        """
        known = [self._as_sampled(episode, message) for message in messages]
        if options.get("continue_final_message"):
            known[-1] = messages[-1]
        try:
            return self.text.render(known, **options)
        except TemplateError as error:
            raise RequestError(f"The chat template refuses the messages: {error}") from error

    def begin(self, episode: Episode, ask: Ask, count: int) -> list[Begun]:
        """Begin `count` completions of a request.

        Raises:
            RequestError: the prompt leaves no room for a token.
        """
        start = episode.record.start(ask.text)
        context = episode.settings.context
        if not 0 < len(start.prompt) < context:
            raise RequestError(
                f"This model's maximum context length is {context} tokens (rollout."
                f"max_prompt_tokens + max_response_tokens); the prompt has {len(start.prompt)}.",
                param="messages",
                code="context_length_exceeded",
            )
        requests = [self._request(episode, start, ask) for _ in range(count)]
        return [
            Begun(Completion(k, f"{request.seed:x}", len(start.prompt)), start, request, ask)
            for k, request in enumerate(requests)
        ]

    async def complete(self, episode: Episode, begun: Sequence[Begun]) -> list[Completion]:
        """Sample completions to their end, in parallel."""

        async def to_the_end(one: Begun) -> None:
            async for _ in self._sample(episode, one):
                pass

        await asyncio.gather(*map(to_the_end, begun))
        return self._ended([one.completion for one in begun])

    async def pieces(
        self, episode: Episode, begun: Sequence[Begun]
    ) -> AsyncIterator[tuple[Completion, str]]:
        """Yield the texts of completions in pieces; with the last piece one has ended."""
        queue: asyncio.Queue[tuple[Completion, str] | None] = asyncio.Queue()

        async def forward(one: Begun) -> None:
            async for piece in self._sample(episode, one):
                await queue.put((one.completion, piece))
            await queue.put(None)

        tasks = [asyncio.create_task(forward(one)) for one in begun]
        try:
            for _ in tasks:
                while (found := await queue.get()) is not None:
                    yield found
            self._ended([one.completion for one in begun])
        finally:
            for task in tasks:
                task.cancel()

    async def _sample(self, episode: Episode, begun: Begun) -> AsyncIterator[str]:
        """Yield the text of a completion in pieces; record its tokens before the last one."""
        completion, start, request, ask = begun
        record, stream = episode.record, TextStream(self.text, ask.stop)

        def end(reason: str) -> None:
            completion.reason, completion.text, completion.stop = reason, stream.text, stream.stop
            tokens, log_probs = completion.tokens, completion.log_probs
            del tokens[stream.used :], log_probs[stream.used :]
            if tokens and episode.is_open and episode.record is record:
                text, trained = self.text.decode(tokens, special=True), not ask.sampling
                cut = reason == LENGTH
                record.add(start, tokens, log_probs, text, trained=trained, truncated=cut)

        queue = episode.open[request.request_id] = self._engines.submit(request)
        try:
            while episode.is_open and episode.record is record and not completion.has_ended:
                progress = await queue.get()
                piece = stream.add(progress.tokens)
                completion.tokens += progress.tokens
                completion.log_probs += progress.log_probs
                if reason := STOP if stream.stop is not None else progress.reason.lower():
                    piece += stream.rest()
                    end(reason)
                if piece or reason:
                    yield piece
        finally:
            del episode.open[request.request_id]
            self._engines.cancel(request)
            if not completion.has_ended:
                end(CANCELLED)

    def _ended(self, completions: list[Completion]) -> list[Completion]:
        if not all(one.has_ended for one in completions):
            raise RequestError("The episode has ended.", 401, code="invalid_api_key")
        return completions

    def _as_sampled(self, episode: Episode, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with the text that was sampled, if the policy wrote it.

        Chat templates expect arguments of tool calls as mappings.
        """
        if message["role"] != "assistant":
            return message
        if (raw := episode.raw.get(message_key(message))) is not None:
            return {"role": "assistant", "content": raw}
        if not (calls := message.get("tool_calls")):
            return message
        parsed = [
            call | {"function": function | {"arguments": _mapping(function.get("arguments"))}}
            for call in calls
            if isinstance(function := call.get("function"), dict)
        ]
        return message | {"tool_calls": parsed}

    def _request(self, episode: Episode, start: Start, ask: Ask) -> LiveRequest:
        """Build the engine's request; equal requests of an episode have different seeds."""
        content = json.dumps([start.prompt, ask.max_tokens, ask.stop, ask.seed, ask.sampling])
        digest = hashlib.blake2b(content.encode(), digest_size=16).digest()
        episode.asked[digest] += 1
        self._count += 1
        room = episode.settings.context - len(start.prompt)
        sampling = dict(ask.sampling)
        return LiveRequest(
            request_id=f"live-{self._count}",
            engine=episode.engine,
            prompt=start.prompt,
            seed=derive_seed(*episode.seed_parts, digest.hex(), episode.asked[digest]),
            max_tokens=min(ask.max_tokens or room, room),
            temperature=sampling.pop("temperature", episode.settings.temperature),
            top_p=sampling.pop("top_p", episode.settings.top_p),
            stop_token_ids=self.text.stop_token_ids(ask.stop),
            sampling=sampling,
        )


def other_sampling(settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that differ from the run's.

    Args:
        settings: of the run.
        given: parameters of vLLM by name that a request has set.

    Raises:
        RequestError: there are some, and the run refuses them.
    """
    same = {"temperature": settings.training_temperature, "top_p": settings.training_top_p}
    neutral = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_p": 0}
    usual: dict[str, Callable[[Any], bool]] = {
        "top_k": lambda value: value in (0, -1),
        "logit_bias": lambda value: not value,
    }
    expected = same | neutral
    other = {
        name: value
        for name, value in given.items()
        if value is not None
        and not (usual[name](value) if name in usual else value == expected[name])
    }
    if other and not settings.masks_other:
        name, value = next(iter(other.items()))
        run = f"this run samples with {name} = {expected[name]}" if name in expected else ""
        raise refused_parameter(
            name,
            value,
            f"Tokens sampled otherwise cannot be trained{'; ' + run if run else ''}. Leave it out, "
            "or set agent.other_sampling=mask: then such completions are not trained.",
        )
    return other


def message_key(message: dict[str, Any]) -> str:
    """Return what identifies an assistant message: its text and tool calls."""
    functions = [call.get("function") or {} for call in message.get("tool_calls") or []]
    calls = [[one.get("name"), _mapping(one.get("arguments"))] for one in functions]
    return json.dumps([message.get("content") or "", calls], sort_keys=True)


def _mapping(text: Any) -> Any:
    """Return the arguments of a tool call as a mapping, or the text itself if it is none."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text
