"""OpenAI's responses: POST /v1/responses, without state on the server."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from pydantic import Field

from hybridrl.agents.chat import message_of, rendered, token_log_probs, tools_of
from hybridrl.agents.constraints import Constraint, constraint_of
from hybridrl.agents.episode import (
    LENGTH,
    Ask,
    Completion,
    Episode,
    RequestError,
    refused_parameter,
)
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
    include: list[str] | None = None

    @property
    def has_log_probs(self) -> bool:
        """True if the answer has the log-probs of its tokens."""
        return "message.output_text.logprobs" in (self.include or ())

    def constraint(self) -> Constraint | None:
        """Return the constraint of the text, if any."""
        form = (self.text or {}).get("format")
        return constraint_of("text.format", form, _chat_tools(self), self.tool_choice)


class Responses(Format):
    """Responses, streamed or not, with functions as tools."""

    request_class = ResponsesRequest

    def ask(self, policy: Policy, episode: Episode, request: ResponsesRequest) -> Ask:
        """Render the input items as chat messages."""
        if request.top_logprobs:
            raise refused_parameter("top_logprobs", request.top_logprobs, "Use include alone.")
        if request.truncation not in (None, "disabled"):
            raise refused_parameter("truncation", request.truncation, "Nothing is left out.")
        tools = tools_of(policy, _chat_tools(request))
        messages = [{"role": "system", "content": request.instructions}]
        messages = [*(messages if request.instructions else []), *_messages(request.input)]
        prompt = rendered(policy, episode, messages, tools)
        return request.ask(episode, prompt, request.max_output_tokens or request.max_tokens)

    def answer(
        self,
        policy: Policy,
        episode: Episode,
        request: ResponsesRequest,
        sampled: Sequence[Completion],
    ) -> dict[str, Any]:
        """Return a response."""
        (one,) = sampled
        return self._response(request, one, self._items(policy, episode, request, one))

    async def events(
        self,
        policy: Policy,
        episode: Episode,
        request: ResponsesRequest,
        pieces: AsyncIterator[tuple[Completion, str]],
    ) -> AsyncIterator[str]:
        """Yield response.* events; with tools, the text comes at its end."""
        number, is_begun = 0, False

        def line(kind: str, **fields: Any) -> str:
            nonlocal number
            number += 1
            kind = f"response.{kind}"
            return event({"type": kind, "sequence_number": number - 1} | fields, kind)

        def opened(item: dict[str, Any], place: dict[str, Any]) -> Iterator[str]:
            yield line("output_item.added", item=item, **place)
            if item["type"] == "message":
                yield line("content_part.added", part=_text_part(""), **_in(item, place))

        def closed(item: dict[str, Any], place: dict[str, Any]) -> Iterator[str]:
            if item["type"] == "message":
                (part,), within = item["content"], _in(item, place)
                values = {name: part[name] for name in ("text", "logprobs")}
                yield line("output_text.done", **values, **within)
                yield line("content_part.done", part=part, **within)
            yield line("output_item.done", item=item, **place)

        def at_once(item: dict[str, Any], place: dict[str, Any]) -> Iterator[str]:
            within = {"item_id": item["id"]} | place
            if item["type"] == "message":
                yield from opened(item | {"status": "in_progress", "content": []}, place)
                text = item["content"][0]["text"]
                yield line("output_text.delta", delta=text, logprobs=[], **_in(item, place))
            else:
                yield from opened(item | {"status": "in_progress", "arguments": ""}, place)
                values, kind = {"arguments": item["arguments"]}, "function_call_arguments"
                yield line(f"{kind}.delta", delta=item["arguments"], **within)
                yield line(f"{kind}.done", name=item["name"], **values, **within)
            yield from closed(item, place)

        first = {"output_index": 0}
        async for one, piece in pieces:
            message = self._message(one, "", "in_progress")
            if not is_begun:
                is_begun = True
                head = self._response(request, one.begun(), [])
                yield line("created", response=head)
                yield line("in_progress", response=head)
                for text in opened(message, first) if not request.tools else ():
                    yield text
            if not request.tools and piece:
                yield line("output_text.delta", delta=piece, logprobs=[], **_in(message, first))
            if not one.has_ended:
                continue
            items = self._items(policy, episode, request, one)
            for index, item in enumerate(items):
                lines = at_once if request.tools else closed
                for text in lines(item, {"output_index": index}):
                    yield text
            done = self._response(request, one, items)
            yield line(done["status"], response=done)

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
        said = self._message(one, message["content"], "completed")
        if request.has_log_probs and not calls:
            said["content"][0]["logprobs"] = token_log_probs(policy, one)
        return [said, *calls]

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


def _in(item: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """Return the place of the text of a message."""
    return {"item_id": item["id"], "content_index": 0} | place


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
