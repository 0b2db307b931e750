"""The policy as the endpoint samples from it: episodes, prompts, completions.

Runs in the thread of the endpoint's event loop. Seeds are a function of the episode and of the
request's content, not of the order in which requests arrive.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError

from hybridrl.agents.constraints import STRUCTURED
from hybridrl.agents.episode import (
    CANCELLED,
    LENGTH,
    STOP,
    Ask,
    Begun,
    Completion,
    Episode,
    RequestError,
    as_mapping,
    message_key,
    refused_parameter,
    too_long,
)
from hybridrl.agents.record import Start
from hybridrl.agents.text import ModelText, TextStream
from hybridrl.data.requests import FAILED, Progress, Request, SamplingParams
from hybridrl.data.seeds import derive_seed
from hybridrl.rollout.vllm.text import ParseTools


class Engines(Protocol):
    """Rollout engines that sample continuously."""

    def submit(self, request: Request) -> "asyncio.Queue[Progress]":
        """Begin to sample; the queue receives the progress."""
        ...

    def cancel(self, request: Request) -> None:
        """Drop a request, unless it has ended."""
        ...


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
        self._episodes[episode.name] = episode

    def close(self, names: Sequence[str]) -> list[Episode]:
        """End episodes: refuse their requests and drop open ones, whose tokens do not count."""
        episodes = [self._episodes.pop(name) for name in names]
        for episode in episodes:
            episode.is_open = False
            episode.wake()
        return episodes

    def repeat(self, name: str, attempt: str) -> None:
        """Begin another attempt of an episode; the keys of earlier ones are refused from now on."""
        if name in self._episodes:
            (earlier,) = self.close([name])
            self.open(earlier.repeated(attempt))

    def close_all(self) -> None:
        """End all episodes."""
        self.close([*self._episodes])

    def episode(self, key: str) -> Episode:
        """Return the episode of a key.

        Raises:
            RequestError: no open episode has this key, or an earlier attempt of it had.
        """
        episode = self._episodes.get(key.partition(".")[0])
        if episode is None or episode.key != key:
            raise RequestError(
                "Incorrect API key: no running episode has it.", 401, code="invalid_api_key"
            )
        return episode

    def render(self, episode: Episode, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """Render chat messages; an answer of the policy is rendered as it was sampled.

        Raises:
            RequestError: the chat template refuses them, or they are nested too deeply.
        """
        try:
            known = [self._as_sampled(episode, message) for message in messages]
            if options.get("continue_final_message"):
                known[-1] = messages[-1]
            return self.text.render(known, **options)
        except (TemplateError, RecursionError) as error:  # the latter of nested arguments of calls
            raise RequestError(f"The chat template refuses the messages: {error}") from error

    def begin(
        self, episode: Episode, ask: Ask, count: int, *, in_pieces: bool = False
    ) -> list[Begun]:
        """Begin `count` completions of a request; a stream needs their text in pieces.

        Raises:
            RequestError: the prompt leaves no room for a token.
        """
        context, text = episode.settings.context, ask.prompt.text
        # Other episodes would wait until a long text is tokenised.
        if len(text) > context * self.text.longest:
            raise too_long(context, f"more: {len(text)} characters")
        start = episode.record.start(text, ask.prompt.images)
        if not 0 < len(start.prompt) < context:
            raise too_long(context, str(len(start.prompt)))
        if any(not 0 <= token < self.text.size for token in ask.sampling.get("logit_bias", ())):
            why = f"The model's tokens are 0 to {self.text.size - 1}."
            raise refused_parameter("logit_bias", ask.sampling["logit_bias"], why)
        # A stop string is found while the completion is sampled.
        in_pieces = in_pieces or bool(ask.stop)
        return [self._begun(episode, start, ask, in_pieces, index) for index in range(count)]

    def _begun(
        self, episode: Episode, start: Start, ask: Ask, in_pieces: bool, index: int
    ) -> Begun:
        """Return a completion that is about to be sampled.

        Equal requests of an episode have different seeds, unless they name one.
        """
        content = json.dumps([ask.max_tokens, ask.stop, ask.seed, ask.sampling]).encode()
        content += np.asarray(start.prompt, np.int32).tobytes()
        content += "".join(image.key for image in start.images).encode()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        asked = episode.asked if ask.seed is None else episode.seeded
        count = asked.pop(digest, 0) + 1
        asked[digest] = count  # the newest comes last
        is_again = ask.seed is not None and count > 1
        number = count if ask.seed is None else index
        seed = derive_seed(*episode.seed_parts, digest.hex(), number)
        request = self._request(episode, start.prompt, seed, ask, in_pieces)
        name = f"{seed:x}n{count}" if is_again else f"{seed:x}"
        completion = Completion(index, name, len(start.prompt), is_call=ask.is_call)
        return Begun(completion, start, request, ask)

    async def complete(self, episode: Episode, begun: Sequence[Begun]) -> list[Completion]:
        """Sample completions to their end, in parallel."""

        async def to_the_end(one: Begun) -> None:
            async for _ in self._sample(episode, one, in_pieces=False):
                pass

        tasks = [asyncio.create_task(to_the_end(one)) for one in begun]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return self._ended([one.completion for one in begun])

    async def pieces(
        self, episode: Episode, begun: Sequence[Begun]
    ) -> AsyncIterator[tuple[Completion, str]]:
        """Yield the texts of completions in pieces; with the last piece one has ended."""
        queue: asyncio.Queue[tuple[Completion, str, bool] | None] = asyncio.Queue()
        held: dict[int, str] = {}

        async def forward(one: Begun) -> None:
            try:
                async for piece in self._sample(episode, one, in_pieces=True):
                    queue.put_nowait((one.completion, piece, one.completion.has_ended))
            finally:
                queue.put_nowait(None)

        tasks = [asyncio.create_task(forward(one)) for one in begun]
        try:
            for _ in tasks:
                while (sampled := await queue.get()) is not None:
                    completion, piece, is_last = sampled
                    text = held.pop(completion.index, "") + piece
                    if completion.has_ended and not is_last:  # since this piece was queued
                        held[completion.index] = text
                    else:
                        yield completion, text
                for task in tasks:
                    if task.done():  # raise its error
                        task.result()
            self._ended([one.completion for one in begun])
        finally:
            for task in tasks:
                task.cancel()

    async def _sample(
        self, episode: Episode, begun: Begun, *, in_pieces: bool
    ) -> AsyncIterator[str]:
        """Yield the text of a completion in pieces; record its tokens before the last one."""
        completion, start, request, ask = begun
        record, stream = episode.record, TextStream(self.text, ask.stop, in_pieces=in_pieces)
        context = episode.settings.context

        def end(reason: str) -> None:
            completion.reason, completion.text, completion.stop = reason, stream.text, stream.stop
            sampled = completion.tokens, completion.log_probs, completion.versions
            for values in sampled:
                del values[stream.used :]
            completion.raw = self.text.without_end(completion.tokens)
            if (tokens := completion.tokens) and episode.is_open:
                text, trained = self.text.decode(tokens, special=True), not ask.sampling
                said = {"role": "assistant", "content": completion.text}
                episode.answers[completion.name] = said
                record.add(
                    start,
                    *sampled,
                    text,
                    name=completion.name,
                    messages=ask.prompt.messages,
                    trained=trained,
                    # Not where the client's own max_tokens ended it.
                    truncated=reason == LENGTH and len(start.prompt) + len(tokens) >= context,
                )
                episode.forget_old()

        if start.images:
            assert self.text.images is not None
            images = await asyncio.to_thread(self.text.images.processed, start.images)
            request = request._replace(images=images)
        queue = episode.open[request.request_id] = self._engines.submit(request)
        try:
            while episode.is_open and not completion.has_ended:
                progress = await queue.get()
                piece = stream.add(progress.tokens)
                completion.tokens += progress.tokens
                completion.log_probs += progress.log_probs
                completion.versions += [progress.version] * len(progress.tokens)
                if progress.reason == FAILED:
                    raise RequestError(f"vLLM cannot sample by these parameters: {ask.sampling}.")
                if reason := STOP if stream.stop is not None else progress.reason.lower():
                    piece += stream.rest()
                    end(reason)
                if piece or reason:
                    yield piece
        finally:
            del episode.open[request.request_id]
            self._engines.cancel(request)
            if not completion.has_ended:
                stream.rest()
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
            call | {"function": function | {"arguments": as_mapping(function.get("arguments"))}}
            for call in calls
            if isinstance(function := call.get("function"), dict)
        ]
        return message | {"tool_calls": parsed}

    def _request(
        self, episode: Episode, prompt: list[int], seed: int, ask: Ask, in_pieces: bool
    ) -> Request:
        """Build the engine's request."""
        self._count += 1
        room = episode.settings.context - len(prompt)
        more, defaults = dict(ask.sampling), episode.settings
        # A grammar allows a stop token at its end alone.
        stop = () if STRUCTURED in more else self.text.stop_token_ids(ask.stop)
        params = SamplingParams(
            temperature=more.pop("temperature", defaults.temperature),
            top_p=more.pop("top_p", defaults.top_p),
            stop_token_ids=stop,
            more=more,
        )
        longest = min(ask.max_tokens or room, room)
        name, engine = f"live-{self._count}", episode.engine
        # vLLM would apply penalties and grammars to a rest as if it were the whole.
        must = bool(more)
        return Request(name, prompt, seed, longest, params, engine, in_pieces, must_finish=must)
