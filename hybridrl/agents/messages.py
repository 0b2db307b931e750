"""Anthropic's messages: POST /v1/messages."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import Field

from hybridrl.agents.chat import message_of, rendered, tools_of
from hybridrl.agents.constraints import Constraint, constraint_of
from hybridrl.agents.episode import (
    LENGTH,
    Ask,
    Completion,
    Episode,
    RequestError,
    refused_parameter,
)
from hybridrl.agents.format import MODEL, Format, ToolsRequest, checked_stops, event
from hybridrl.agents.policy import Policy


class MessagesRequest(ToolsRequest):
    """Body of a request."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return checked_stops("stop_sequences", self.stop_sequences)

    def constraint(self) -> Constraint | None:
        """Return the constraint of the text, if any."""
        form = (self.output_config or {}).get("format")
        return constraint_of("output_config.format", form, _chat_tools(self), self.tool_choice)


class Messages(Format):
    """Messages, streamed or not, with tools; a last message of the assistant is continued."""

    request_class = MessagesRequest

    def ask(self, policy: Policy, episode: Episode, request: MessagesRequest) -> Ask:
        """Render the messages by the chat template."""
        if (request.thinking or {}).get("type", "disabled") != "disabled":
            raise refused_parameter("thinking", request.thinking, "The chat template decides it.")
        tools = tools_of(policy, _chat_tools(request))
        system = [{"role": "system", "content": request.system}] if request.system else []
        messages = [*system, *(part for one in request.messages for part in _chat_messages(one))]
        continues = messages[-1]["role"] == "assistant"
        options = {"continue_final_message": continues, "add_generation_prompt": not continues}
        prompt = rendered(policy, episode, messages, tools, **options)
        return request.ask(episode, prompt, request.max_tokens)

    def answer(
        self,
        policy: Policy,
        episode: Episode,
        request: MessagesRequest,
        sampled: Sequence[Completion],
    ) -> dict[str, Any]:
        """Return a message."""
        (one,) = sampled
        return self._message(one, self._blocks(policy, episode, request, one))

    async def events(
        self,
        policy: Policy,
        episode: Episode,
        request: MessagesRequest,
        pieces: AsyncIterator[tuple[Completion, str]],
    ) -> AsyncIterator[str]:
        """Yield the events of a message; with tools, the text comes at its end."""
        is_begun = False
        async for one, piece in pieces:
            if not is_begun:
                is_begun = True
                yield _event("message_start", message=self._message(one.begun(), []))
                if not request.tools:
                    yield _begin(0, {"type": "text", "text": ""})
            if not request.tools and piece:
                yield _delta(0, {"type": "text_delta", "text": piece})
            if not one.has_ended:
                continue
            blocks = self._blocks(policy, episode, request, one)
            for index, block in enumerate(blocks if request.tools else ()):
                if block["type"] == "text":
                    yield _begin(index, {"type": "text", "text": ""})
                    yield _delta(index, {"type": "text_delta", "text": block["text"]})
                else:
                    yield _begin(index, block | {"input": {}})
                    part = json.dumps(block["input"])
                    yield _delta(index, {"type": "input_json_delta", "partial_json": part})
                yield _event("content_block_stop", index=index)
            if not request.tools:
                yield _event("content_block_stop", index=0)
            message = self._message(one, blocks)
            delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
            yield _event("message_delta", delta=delta, usage=message["usage"])
            yield _event("message_stop")

    def error(self, error: RequestError) -> dict[str, Any]:
        """Return the body of an error in Anthropic's form."""
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
        kind = kinds.get(error.status, "invalid_request_error")
        kind = "api_error" if error.status >= 500 else kind
        return {"type": "error", "error": {"type": kind, "message": error.message}}

    def _blocks(
        self, policy: Policy, episode: Episode, request: MessagesRequest, one: Completion
    ) -> list[dict[str, Any]]:
        """Return the content: a text, unless it is empty, and the uses of tools."""
        message, _ = message_of(policy, episode, one, _chat_tools(request))
        uses = [
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": json.loads(call["function"]["arguments"]),
            }
            for call in message.get("tool_calls", ())
        ]
        text = message["content"] or ""
        return [*([{"type": "text", "text": text}] if text or not uses else []), *uses]

    def _message(self, one: Completion, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        reason = None
        if one.has_ended:
            uses = any(block["type"] == "tool_use" for block in blocks)
            reason = "tool_use" if uses else "end_turn"
            reason = "stop_sequence" if one.stop is not None else reason
            reason = "max_tokens" if one.reason == LENGTH else reason
        return {
            "id": f"msg_{one.name}",
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": one.stop,
            "usage": {"input_tokens": one.prompt_tokens, "output_tokens": len(one.tokens)},
        }


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind} | fields, kind)


def _begin(index: int, block: dict[str, Any]) -> str:
    return _event("content_block_start", index=index, content_block=block)


def _delta(index: int, delta: dict[str, Any]) -> str:
    return _event("content_block_delta", index=index, delta=delta)


def _chat_tools(request: MessagesRequest) -> list[dict[str, Any]] | None:
    """Return the tools in the form of chat completions.

    Raises:
        RequestError: one is a tool of Anthropic's servers.
    """
    for tool in request.tools or ():
        if tool.get("type") not in (None, "custom"):
            raise refused_parameter("tools", tool["type"], "The policy calls your own tools only.")
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema", {}),
            },
        }
        for tool in request.tools or ()
    ] or None


def _chat_messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message as chat messages: results of tools become messages of their own.

    Raises:
        RequestError: a block is of another kind.
    """
    role, content = message.get("role"), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise RequestError(f"This content is neither a text nor blocks: {content!r}.")
    texts, calls, results = [], [], []
    for block in blocks:
        match block.get("type"):
            case "text":
                if not isinstance(block.get("text"), str):
                    raise RequestError(f"This block of a text has none: {block}.")
                texts.append(block)
            case "image":
                texts.append(block)
            case "tool_use":
                arguments = json.dumps(block.get("input"))
                function = {"name": block.get("name"), "arguments": arguments}
                call = {"id": block.get("id"), "type": "function", "function": function}
                calls.append(call)
            case "tool_result":
                result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
                results.append(result | {"content": block.get("content")})
            case other:
                raise RequestError(f"The policy does not read blocks of type {other}.")
    said = {"role": role, "content": texts} | ({"tool_calls": calls} if calls else {})
    return [*results, *([said] if texts or calls or not results else [])]
