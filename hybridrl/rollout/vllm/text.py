"""Parts of vLLM for agents: parsers of tool calls, checks of sampling parameters and grammars."""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from hybridrl.config.errors import ConfigError
from hybridrl.rollout.vllm import compat as vllm_compat

# Schemas whose check is remembered.
SCHEMAS = 256


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
            extracted = extract(text)
        except Exception:  # some parsers raise any class at a malformed call
            return Parsed(text, [])
        calls = [(call.function.name, call.function.arguments) for call in extracted.tool_calls]
        return Parsed(extracted.content or "", calls)

    try:  # a parser that fails at any text must not pass for one that finds no calls
        parser_of([{"type": "function", "function": {"name": "any"}}])("")
    except NotImplementedError as error:
        raise ConfigError(
            f"agent.tool_parser = {name} does not read whole texts, only streams of tokens: take "
            "another parser."
        ) from error
    return parse


def check_sampling(name: str, value: Any) -> None:
    """Check a field of vLLM's SamplingParams.

    Raises:
        ValueError: vLLM refuses the value.
    """
    vllm_compat.set_environment("cpu", enforce_eager=False)
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        SamplingParams(**{name: value})
    except VLLMValidationError as error:
        raise ValueError(str(error)) from error


def check_constraint(fields: dict[str, Any]) -> None:
    """Check fields of vLLM's StructuredOutputsParams.

    Raises:
        ValueError: xgrammar does not support the schema, or it is none, or refers to another file.
    """
    if (reference := _foreign_reference(fields.get("json"))) is not None:
        raise ValueError(
            f"$ref = {reference!r}, expected a part of the same schema (#/...): nothing is "
            "downloaded, and without it the text would not be constrained."
        )
    _check(json.dumps(fields))


@lru_cache(SCHEMAS)
def _check(fields: str) -> None:
    vllm_compat.set_environment("cpu", enforce_eager=False)
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    params = vllm_compat.structured_outputs(json.loads(fields))
    try:
        validate_xgrammar_grammar(SamplingParams(structured_outputs=params))
    except VLLMValidationError as error:
        raise ValueError(str(error)) from error


def _foreign_reference(schema: Any) -> str | None:
    """Return a reference to something outside of a schema, if it has one."""
    if isinstance(schema, dict):
        own = schema.get("$ref")
        if isinstance(own, str) and not own.startswith("#"):
            return own
        schema = list(schema.values())
    parts = schema if isinstance(schema, list) else ()
    return next((one for one in map(_foreign_reference, parts) if one is not None), None)
