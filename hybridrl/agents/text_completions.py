"""OpenAI's completions of a text: POST /v1/completions."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import Field

from hybridrl.agents.episode import LENGTH, Ask, Completion, Episode, Prompt, RequestError
from hybridrl.agents.format import MODEL, CompletionRequest, Format, event, usage
from hybridrl.agents.policy import Policy


class TextRequest(CompletionRequest):
    """Body of a request."""

    prompt: str | list[str] = Field(min_length=1)
    logprobs: int | None = Field(None, ge=0, le=1)


class TextCompletions(Format):
    """Completions of a text as it is, without a chat template."""

    request_class = TextRequest

    def ask(self, policy: Policy, episode: Episode, request: TextRequest) -> Ask:
        """Return the prompt; special tokens in it are read as such."""
        texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        if len(texts) > 1 or not texts[0]:
            raise RequestError("The endpoint takes one text at a time.", param="prompt")
        prompt = Prompt(texts[0], [{"role": "user", "content": texts[0]}])
        return request.ask(episode, prompt, request.max_tokens)

    def answer(
        self, policy: Policy, episode: Episode, request: TextRequest, sampled: Sequence[Completion]
    ) -> dict[str, Any]:
        """Return a text_completion."""
        choices = [self._choice(policy, request, one, one.text) for one in sampled]
        return self._head(sampled[0]) | {"choices": choices, "usage": usage(sampled)}

    async def events(
        self,
        policy: Policy,
        episode: Episode,
        request: TextRequest,
        pieces: AsyncIterator[tuple[Completion, str]],
    ) -> AsyncIterator[str]:
        """Yield text_completion events."""
        begun: dict[int, Completion] = {}
        async for one, piece in pieces:
            begun[one.index] = one
            yield event(self._head(one) | {"choices": [self._choice(policy, request, one, piece)]})
        if request.streams_usage:
            yield event(self._head(begun[0]) | {"choices": [], "usage": usage([*begun.values()])})
        yield event("[DONE]")

    def _choice(
        self, policy: Policy, request: TextRequest, one: Completion, text: str
    ) -> dict[str, Any]:
        reason = None if not one.has_ended else "length" if one.reason == LENGTH else "stop"
        logprobs = None
        if request.logprobs is not None and one.has_ended:
            tokens = [policy.text.decode([token], special=True) for token in one.tokens]
            logprobs = {"tokens": tokens, "token_logprobs": one.log_probs}
        choice = {"index": one.index, "text": text, "finish_reason": reason}
        return choice | {"logprobs": logprobs, "stop_reason": one.stop}

    def _head(self, one: Completion) -> dict[str, Any]:
        head = {"id": f"cmpl-{one.name}", "object": "text_completion", "model": MODEL}
        return head | {"created": int(time.time())}
