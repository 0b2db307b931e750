"""Constraints of a completion's text: JSON of a schema, and tool calls that a request forces."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hybridrl.agents.episode import RequestError, refused_parameter
from hybridrl.rollout.vllm.text import Parsed

# Name of the constraint among the sampling parameters of vLLM.
STRUCTURED = "structured_outputs"
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}


class Constraint(NamedTuple):
    """Constraint that `parameter` of a request asks for.

    Attributes:
        fields: of vLLM's StructuredOutputsParams.
        is_call: the text is a forced tool call.
        excludes_calls: the text may not be a tool call, though the request has tools.
    """

    parameter: str
    value: Any
    fields: dict[str, Any]
    is_call: bool = False
    excludes_calls: bool = False


def constraint_of(
    parameter: str,
    form: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: Any,
) -> Constraint | None:
    """Return the constraint of a request; None: its text is free.

    Args:
        parameter: name of the request's parameter with the format.
        form: the format, text, json_object or json_schema.
        tools: in the form of chat completions.
        choice: the tool_choice of any format.

    Raises:
        RequestError: the format or the choice is of another kind.
    """
    match choice:
        case None | "auto" | "none" | {"type": "auto" | "none"}:
            constraint = _of_format(parameter, form)
            calls = bool(tools) and choice not in ("none", {"type": "none"})
            return constraint and constraint._replace(excludes_calls=calls)
        case "required" | {"type": "any"}:
            return _of_calls(choice, tools or ())
        case {"type": "function", "function": {"name": str() as name}} | {
            "type": "function" | "tool",
            "name": str() as name,
        }:
            named = [tool for tool in tools or () if tool["function"]["name"] == name]
            return _of_calls(choice, named)
    raise refused_parameter("tool_choice", choice, "Use auto, none, required or a function.")


def parsed_call(text: str) -> Parsed:
    """Return the tool call that a forced text is; text that was cut off remains text."""
    try:
        call = json.loads(text)
    except ValueError:
        return Parsed(text, [])
    arguments = json.dumps(call["arguments"])
    if not is_json_object(arguments):
        return Parsed(text, [])
    return Parsed("", [(call["name"], arguments)])


def is_json_object(text: str) -> bool:
    """Return whether a text is a JSON object that every client reads: no NaN, Unicode alone."""
    try:
        content = json.loads(text)
        json.dumps(content, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(content, dict)


def _of_format(parameter: str, form: Mapping[str, Any] | None) -> Constraint | None:
    match form:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Constraint(parameter, form["type"], {"json_object": True})
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}} | {
            "type": "json_schema",
            "schema": dict() as schema,
        }:
            return Constraint(parameter, form["type"], {"json": schema})
    raise refused_parameter(parameter, form, "Use the type json_schema, json_object or text.")


def _of_calls(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Constraint:
    """Return the constraint to a call {"name", "arguments"} of one of these tools."""
    if not tools:
        raise RequestError(f"tool_choice = {choice!r}, but no tool has it.", param="tool_choice")
    calls, schemas = [], dict[str, Any]()
    for number, tool in enumerate(tools):
        function, place = tool["function"], f"#/$defs/{number}"
        schemas[str(number)] = _moved(function.get("parameters") or NO_PARAMETERS, place)
        parts = {"name": {"const": function["name"]}, "arguments": {"$ref": place}}
        calls.append(
            {
                "type": "object",
                "properties": parts,
                "required": [*parts],
                "additionalProperties": False,
            }
        )
    schema = {"anyOf": calls, "$defs": schemas}
    return Constraint("tool_choice", choice, {"json": schema}, is_call=True)


def _moved(schema: Any, place: str) -> Any:
    """Return a schema that is no longer the root, but at `place`: its references start there."""
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    return [_moved(one, place) for one in schema] if isinstance(schema, list) else schema
