"""OpenAI's responses: POST /v1/responses, without state on the server."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import Field

from hybridrl.agents.chat import message_of, rendered, tools_of
from hybridrl.agents.constraints import Constraint, constraint_of
from hybridrl.agents.episode import LENGTH, Ask, Completion, Episode
from hybridrl.agents.errors import RequestError, refused_parameter
from hybridrl.agents.format import MODEL, Format, ToolsRequest, event
from hybridrl.agents.policy import Policy


class ResponsesRequest(ToolsRequest):
    """Body of a request."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    top_logprobs: int | None = None

    def constraint(self) -> Constraint | None:
        """Return the constraint of the text, if any."""
        form = (self.text or {}).get("format")
        return constraint_of("text.format", form, _chat_tools(self), self.tool_choice)


class Responses(Format):
    """Responses, streamed or not, with functions as tools."""

    request_class = ResponsesRequest

    def ask(self, policy: Policy, episode: Episode, request: ResponsesRequest) -> Ask:
        """Render the input items as chat messages."""
        if request.truncation not in (None, "disabled"):
            raise refused_parameter("truncation", request.truncation, "Nothing is left out.")
        tools = tools_of(policy, _chat_tools(request))
        messages = [{"role": "system", "content": request.instructions}]
        messages = [*(messages if request.instructions else []), *_messages(request.input)]
        return request.ask(
            episode, rendered(policy, episode, messages, tools), request.max_output_tokens
        )

    def answer(
        self,
        policy: Policy,
        episode: Episode,
        request: ResponsesRequest,
        found: Sequence[Completion],
    ) -> dict[str, Any]:
        """Return a response."""
        (one,) = found
        return self._response(request, one, self._items(policy, episode, request, one))

    async def events(
        self,
        policy: Policy,
        episode: Episode,
        request: ResponsesRequest,
        pieces: AsyncIterator[tuple[Completion, str]],
    ) -> AsyncIterator[str]:
        """Yield response.* events; with tools, the text comes at its end."""
        number, text = 0, ""
        is_begun = False

        def line(kind: str, **fields: Any) -> str:
            nonlocal number
            number += 1
            return event({"type": kind, "sequence_number": number - 1} | fields, kind)

        async for one, piece in pieces:
            if not is_begun:
                is_begun = True
                head = self._response(request, one, [])
                yield line("response.created", response=head)
                yield line("response.in_progress", response=head)
                item = self._message(one, "", "in_progress")
                place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
                if not request.tools:
                    yield line("response.output_item.added", output_index=0, item=item)
                    part = _text_part("")
                    yield line("response.content_part.added", part=part, **place)
            text += piece
            if not request.tools and piece:
                yield line("response.output_text.delta", delta=piece, logprobs=[], **place)
            if not one.has_ended:
                continue
            items = self._items(policy, episode, request, one)
            if not request.tools:
                yield line("response.output_text.done", text=text, logprobs=[], **place)
                yield line("response.content_part.done", part=_text_part(text), **place)
                yield line("response.output_item.done", output_index=0, item=items[0])
            for index, item in enumerate(items if request.tools else ()):
                yield line("response.output_item.added", output_index=index, item=item)
                yield line("response.output_item.done", output_index=index, item=item)
            done = self._response(request, one, items)
            yield line(f"response.{done['status']}", response=done)

    def _items(
        self, policy: Policy, episode: Episode, request: ResponsesRequest, one: Completion
    ) -> list[dict[str, Any]]:
        """Return the output: a message, unless it is empty, and the calls of functions."""
        message, _ = message_of(policy, episode, one, _chat_tools(request))
        calls = [
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
            for call in message.get("tool_calls", ())
        ]
        if calls and not message["content"]:
            return calls
        return [self._message(one, message["content"], "completed"), *calls]

    def _message(self, one: Completion, text: str, status: str) -> dict[str, Any]:
        item = {"type": "message", "id": f"msg_{one.name}", "role": "assistant", "status": status}
        return item | {"content": [_text_part(text)] if status == "completed" else []}

    def _response(
        self, request: ResponsesRequest, one: Completion, items: list[dict[str, Any]]
    ) -> dict[str, Any]:
        status = "in_progress"
        if one.has_ended:
            status = "incomplete" if one.reason == LENGTH else "completed"
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        sampled = len(one.tokens)
        usage = {
            "input_tokens": one.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": one.prompt_tokens + sampled,
        }
        return {
            "id": f"resp_{one.name}",
            "object": "response",
            "created_at": int(time.time()),
            "model": MODEL,
            "status": status,
            "incomplete_details": why,
            "error": None,
            "output": items,
            "instructions": request.instructions,
            "metadata": {},
            "parallel_tool_calls": True,
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "temperature": request.temperature,
            "top_p": request.top_p,
            "usage": usage if one.has_ended else None,
        }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _chat_tools(request: ResponsesRequest) -> list[dict[str, Any]] | None:
    """Return the tools in the form of chat completions.

    Raises:
        RequestError: one is no function.
    """
    for tool in request.tools or ():
        if tool.get("type") != "function":
            raise refused_parameter("tools", tool.get("type"), "The policy calls functions only.")
    fields = ("name", "description", "parameters")
    return [
        {"type": "function", "function": {name: tool[name] for name in fields if tool.get(name)}}
        for tool in request.tools or ()
    ] or None


def _messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return input items as chat messages; calls of functions join the message before them.

    Raises:
        RequestError: an item is of another kind.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        match item.get("type", "message"):
            case "message":
                messages.append({"role": item.get("role"), "content": item.get("content")})
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = {"role": "tool", "tool_call_id": item.get("call_id")}
                messages.append(content | {"content": item.get("output")})
            case "reasoning":
                pass
            case other:
                raise RequestError(
                    f"The policy does not read items of type {other}.", param="input"
                )
    return messages
