"""Which texts of the policy are tool calls."""

from functools import reduce

import pytest

from hybridrl.agents.constraints import constraint_of, is_json_object, parsed_call


@pytest.mark.parametrize(
    ("arguments", "is_call"),
    [
        ('{"x": 1}', True),
        ('{"s": "数"}', True),
        ('{"x": NaN}', False),
        ('{"x": 1e999}', False),
        ('{"s": "\\ud83d"}', False),
        ("[1]", False),
        ('{"x"', False),
        ("[" * 100_000, False),
    ],
)
def test_arguments_that_some_client_cannot_read_are_text(arguments, is_call):
    assert is_json_object(arguments) is is_call


def test_a_forced_call_with_half_a_letter_is_text():
    text = '{"name": "f", "arguments": {"s": "\\ud83d"}}'
    assert parsed_call(text).calls == [] and parsed_call(text).content == text
    assert parsed_call('{"name": "f", "arguments": {"s": 1}}').calls == [("f", '{"s": 1}')]


def test_tools_with_definitions_of_one_name_keep_their_own():
    items = [{"type": "integer"}, {"enum": ["p", "q"]}]
    calls = [{"properties": {"x": {"$ref": "#/$defs/Item"}}, "$defs": {"Item": i}} for i in items]
    tools = [{"function": {"name": f"f{k}", "parameters": call}} for k, call in enumerate(calls)]
    schema = constraint_of("response_format", None, tools, "required").fields["json"]
    for item, call in zip(items, schema["anyOf"], strict=True):
        arguments = followed(schema, call["properties"]["arguments"]["$ref"])
        assert followed(schema, arguments["properties"]["x"]["$ref"]) == item


def followed(schema, reference):
    return reduce(lambda part, key: part[key], reference.split("/")[1:], schema)
