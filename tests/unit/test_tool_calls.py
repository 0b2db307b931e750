"""Which texts of the policy are tool calls."""

import pytest

from hybridrl.agents.constraints import is_json_object, parsed_call


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
