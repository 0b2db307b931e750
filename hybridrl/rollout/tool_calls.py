"""Tool calls in sampled text, found by vLLM's parsers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hybridrl.config.errors import ConfigError
from hybridrl.rollout import vllm_compat


class Parsed(NamedTuple):
    """Text of a completion without its tool calls, and these: (name, arguments as JSON)."""

    content: str
    calls: list[tuple[str, str]]


# (sampled text, tools of the request in OpenAI's form) -> its parts
ParseTools = Callable[[str, Sequence[dict[str, Any]]], Parsed]


def load_parser(name: str, tokenizer: Any) -> ParseTools:
    """Return vLLM's parser of this name, such as hermes, for the tokenizer of a model.

    Raises:
        ConfigError: there is no such parser, or it needs tokens that the model lacks.
    """
    vllm_compat.set_environment("cpu", enforce_eager=False)
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    if name not in (known := ToolParserManager.list_registered()):
        raise ConfigError(
            f"agent.tool_parser = {name}, expected a parser of vLLM: {', '.join(known)}."
        )
    parser_class = ToolParserManager.get_tool_parser(name)
    try:
        parser_class(tokenizer)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"agent.tool_parser = {name} does not fit the model: {error}") from error

    def parser_of(tools: Sequence[dict[str, Any]]) -> Callable[[str], Any]:
        request = ChatCompletionRequest(messages=[], tools=list(tools))
        parser = parser_class(tokenizer, request.tools)
        return lambda text: parser.extract_tool_calls(text, request)

    def parse(text: str, tools: Sequence[dict[str, Any]]) -> Parsed:
        extract = parser_of(tools)
        try:
            found = extract(text)
        except Exception:  # some parsers raise any class at a malformed call
            return Parsed(text, [])
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return Parsed(found.content or "", calls)

    try:  # a parser that fails at any text must not pass for one that finds no calls
        parser_of([{"type": "function", "function": {"name": "any"}}])("")
    except NotImplementedError as error:
        raise ConfigError(
            f"agent.tool_parser = {name} does not read whole texts, only streams of tokens: take "
            "another parser."
        ) from error
    return parse
