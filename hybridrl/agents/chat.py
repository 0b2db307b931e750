"""OpenAI's chat completions: POST /v1/chat/completions."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from hybridrl.agents.constraints import Constraint, constraint_of, is_json_object, parsed_call
from hybridrl.agents.episode import (
    LENGTH,
    Ask,
    Completion,
    Episode,
    Prompt,
    RequestError,
    message_key,
    refused_parameter,
    too_long,
)
from hybridrl.agents.format import MODEL, CompletionRequest, Format, ToolsRequest, event, usage
from hybridrl.agents.images import FORM, url_of
from hybridrl.agents.policy import Policy
from hybridrl.config.checks.data import RESERVED
from hybridrl.rollout.vllm.text import Parsed

# Keywords of `rendered` that are not the request's.
_RESERVED = RESERVED | {"policy", "episode", "messages"}
UNSEEN_TOOLS = (
    "The model's chat template leaves tools out, so that the model would never see them. Describe "
    "them in a message and read calls from the text, or train a model whose template has tools."
)
TOOL_PARSER = "Set agent.tool_parser, or hybridrl serve --tool-parser, to the model's parser."


class ChatRequest(CompletionRequest, ToolsRequest):
    """Body of a request; the last three fields are vLLM's."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def constraint(self) -> Constraint | None:
        """Return the constraint of the text, if any."""
        return constraint_of("response_format", self.response_format, self.tools, self.tool_choice)


class Chat(Format):
    """Chat completions, streamed or not, with tools."""

    request_class = ChatRequest

    def ask(self, policy: Policy, episode: Episode, request: ChatRequest) -> Ask:
        """Render the messages by the chat template."""
        if request.top_logprobs:
            raise refused_parameter("top_logprobs", request.top_logprobs, "Use logprobs alone.")
        if known := _RESERVED & request.chat_template_kwargs.keys():
            why = "The endpoint sets it."
            raise refused_parameter("chat_template_kwargs", min(known), why)
        prompt = rendered(
            policy,
            episode,
            request.messages,
            tools_of(policy, request.tools),
            continue_final_message=request.continue_final_message,
            add_generation_prompt=request.add_generation_prompt
            and not request.continue_final_message,
            **request.chat_template_kwargs,
        )
        return request.ask(episode, prompt, request.max_completion_tokens or request.max_tokens)

    def answer(
        self, policy: Policy, episode: Episode, request: ChatRequest, sampled: Sequence[Completion]
    ) -> dict[str, Any]:
        """Return a chat.completion."""
        choices = []
        for one in sampled:
            message, reason = message_of(policy, episode, one, request.tools)
            choice = {"index": one.index, "message": message, "finish_reason": reason}
            choice |= {"stop_reason": one.stop}
            choices.append(choice | {"logprobs": self._logprobs(policy, request, one)})
        head = self._head("chat.completion", sampled[0])
        return head | {"choices": choices, "usage": usage(sampled)}

    async def events(
        self,
        policy: Policy,
        episode: Episode,
        request: ChatRequest,
        pieces: AsyncIterator[tuple[Completion, str]],
    ) -> AsyncIterator[str]:
        """Yield chat.completion.chunk events; with tools, the text comes at its end."""
        begun: dict[int, Completion] = {}
        async for one, piece in pieces:
            new = {} if one.index in begun else {"role": "assistant"}
            begun[one.index] = one
            if not one.has_ended:
                delta = new | ({} if request.tools else {"content": piece})
                if delta:
                    yield self._chunk(one, delta)
                continue
            message, reason = message_of(policy, episode, one, request.tools)
            calls = [{"index": k} | call for k, call in enumerate(message.get("tool_calls", ()))]
            content = message["content"] if request.tools else piece
            delta = new | {"content": content} | ({"tool_calls": calls} if calls else {})
            yield self._chunk(one, delta, self._logprobs(policy, request, one))
            yield self._chunk(one, {}, reason=reason)
        if request.streams_usage:
            head = self._head("chat.completion.chunk", begun[0])
            yield event(head | {"choices": [], "usage": usage([*begun.values()])})
        yield event("[DONE]")

    def _chunk(
        self,
        one: Completion,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> str:
        choice = {"index": one.index, "delta": delta, "finish_reason": reason}
        choice |= {"logprobs": logprobs}
        return event(self._head("chat.completion.chunk", one) | {"choices": [choice]})

    def _head(self, kind: str, one: Completion) -> dict[str, Any]:
        head = {"id": f"chatcmpl-{one.name}", "object": kind, "created": int(time.time())}
        return head | {"model": MODEL}

    def _logprobs(
        self, policy: Policy, request: ChatRequest, one: Completion
    ) -> dict[str, Any] | None:
        if not request.logprobs:
            return None
        return {"content": token_log_probs(policy, one), "refusal": None}


def token_log_probs(policy: Policy, one: Completion) -> list[dict[str, Any]]:
    """Return the log-prob of each sampled token, in nats."""
    texts = [policy.text.decode([token], special=True) for token in one.tokens]
    return [
        {"token": text, "logprob": value, "bytes": [*text.encode()], "top_logprobs": []}
        for text, value in zip(texts, one.log_probs, strict=True)
    ]


def rendered(
    policy: Policy,
    episode: Episode,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    **options: Any,
) -> Prompt:
    """Render messages in OpenAI's form, whose content may be in parts of text and images."""
    if tools:
        options["tools"] = list(tools)
    plain = [_plain(message) for message in messages]
    contents = [message["content"] for message in plain if isinstance(message["content"], list)]
    urls = [part["image_url"]["url"] for parts in contents for part in parts if "image_url" in part]
    if urls and policy.text.images is None:
        why = "This model takes no images: its config.json has no vision_config."
        raise RequestError(why, param="messages")
    if len(urls) >= (context := episode.settings.context):  # each has a token at least
        raise too_long(context, f"more: {len(urls)} images")
    images = tuple(policy.text.images.read(url) for url in urls) if policy.text.images else ()
    return Prompt(policy.render(episode, plain, **options), plain, images)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with a text, or with parts if there are images, and calls if any."""
    plain = dict(message)
    content, calls = plain.get("content"), plain.get("tool_calls") or []
    if not isinstance(content, str | list | None):
        raise RequestError(f"This content is no text: {content!r}.", param="messages")
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise RequestError(f"These tool_calls are no calls: {calls!r}.", param="messages")
    if not calls:  # clients send null; some templates look for the key alone
        plain.pop("tool_calls", None)
    if isinstance(content, list):
        parts = [_part(part) for part in content]
        texts = [part["text"] for part in parts if "text" in part]
        plain["content"] = parts if len(texts) < len(parts) else "".join(texts)
    plain["content"] = plain.get("content") or ""
    plain["role"] = "system" if plain.get("role") == "developer" else plain.get("role")
    return plain


def _part(part: object) -> dict[str, Any]:
    """Return a part of a message in the form of chat completions: a text or an image."""
    kind = part.get("type") if isinstance(part, dict) else part
    if isinstance(part, dict):
        if (url := url_of(part)) is not None:
            return {"type": "image_url", "image_url": {"url": url}}
        if (text := part.get("text")) is not None:
            return {"type": "text", "text": str(text)}
    raise RequestError(f"The policy reads texts and images, not {kind}. {FORM}", param="messages")


def tools_of(policy: Policy, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools to render, in the form of chat completions; None without.

    Raises:
        RequestError: one has no name, the model would not see them, or no parser finds calls.
    """
    if not tools:
        return None
    for tool in tools:
        function = tool.get("function")
        if not (
            isinstance(function, dict)
            and isinstance(function.get("name"), str)
            and isinstance(function.get("description"), str | None)
            and isinstance(function.get("parameters"), dict | None)
        ):
            why = "This tool is no function with a name, a description and a schema of parameters"
            raise RequestError(f"{why}: {tool}.", param="tools")
    if not policy.text.has_tools:
        raise refused_parameter("tools", "...", UNSEEN_TOOLS)
    if policy.parse_tools is None:
        raise refused_parameter("tools", "...", TOOL_PARSER)
    return tools


def message_of(
    policy: Policy, episode: Episode, one: Completion, tools: list[dict[str, Any]] | None
) -> tuple[dict[str, Any], str]:
    """Return the assistant's message and its finish reason; remember how it was sampled."""
    parsed = _parsed(policy, one, tools)
    content = parsed.content or (None if parsed.calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    reason = "length" if one.reason == LENGTH else "stop"
    if parsed.calls:
        reason = "tool_calls"
        message["tool_calls"] = [
            {
                "id": f"call_{one.name}_{k}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for k, (name, arguments) in enumerate(parsed.calls)
        ]
    key = message_key(message)
    episode.raw.pop(key, None)  # the newest comes last
    episode.raw[key] = one.raw
    episode.answers[one.name] = message
    return message, reason


def _parsed(policy: Policy, one: Completion, tools: list[dict[str, Any]] | None) -> Parsed:
    if one.is_call:
        return parsed_call(one.text)
    if tools and policy.parse_tools is not None:
        raw = one.raw
        if one.stop is not None and one.stop in raw:
            raw = raw[: raw.rindex(one.stop)]
        parsed = policy.parse_tools(raw, tools)
        # A call whose arguments are no JSON object is text.
        if parsed.calls and all(is_json_object(text) for _, text in parsed.calls):
            return parsed
    return Parsed(one.text, [])
