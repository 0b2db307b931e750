"""The calculator's arithmetic: exact, compared with Python's fractions on random expressions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.environments.calculator import MAX_DEPTH, as_text, evaluate, expression_at_end


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("16 + 4", "20"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("20 - 3 - 4", "13"),
        ("24 / 4 / 3", "2"),
        ("-3 * -(2 - 5)", "-9"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 8", "0.125"),
        ("-1 / 8", "-0.125"),
        ("7 / 3", "7/3"),
        ("1 / 3 * 3", "1"),
        ("12.50 * 2", "25"),
        ("99999999999999999999 + 1", "100000000000000000000"),
    ],
)
def test_values_are_exact(expression, value):
    assert as_text(evaluate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    ["", "+", "3 +", "* 4", "3 4", "(3", "3)", "()", "3 ** 4", "1.", ".5", "1e3", "a", "3 % 2"],
)
def test_what_is_no_expression_is_refused(expression):
    with pytest.raises(ValueError):
        evaluate(expression)


def test_division_by_zero_and_deep_nesting_are_refused():
    with pytest.raises(ZeroDivisionError):
        evaluate("3 / (2 - 2)")
    for deep in ("(" * 1000 + "1" + ")" * 1000, "-" * 100_000 + "1"):
        with pytest.raises(ValueError, match="nested"):
            evaluate(deep)
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == 1


NUMBERS = st.decimals(min_value=0, max_value=10**6, places=2, allow_nan=False).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(" ".join),
        inner.map("({})".format),
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_random_expressions_have_the_value_that_python_gives_their_fractions(expression):
    pieces = expression.replace("(", "( ").replace(")", " )").split()
    source = " ".join(f"Fraction('{p}')" if p[0].isdigit() else p for p in pieces)
    try:
        expected = eval(source, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            evaluate(expression)
        return
    assert evaluate(expression) == expected


@given(st.fractions(max_denominator=2000))
def test_a_number_as_text_is_the_number(value):
    assert Fraction(as_text(value)) == value


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("16 + 4 ", "16 + 4"),
        ("So there are 16 + 4 ", "16 + 4"),
        ("He has $5 + $3", "5 + 3"),
        ("<<48/2", "48/2"),
        ("x = \u22123 + 5 ", "-3 + 5"),
        ("16 \u00d7 4", "16 * 4"),
        ("16 \u00f7 4", "16 / 4"),
        ("16 \u2013 4", "16 - 4"),
        ("2^3", ""),
        (r"16 \times 4", ""),
        ("\u221a16 + 2", ""),
        ("16 eggs - 3", ""),
        ("16 x 4", ""),
        ("That is 3. Then 2 * (1 + 1)", "2 * (1 + 1)"),
        ("It was 3. 2 * 2", "2 * 2"),
        ("x2 + 3", ""),
        ("1,234 + 5", ""),
        ("nothing", ""),
    ],
)
def test_the_expression_at_the_end_of_a_text(text, expression):
    assert expression_at_end(text) == expression
