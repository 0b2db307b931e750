r"""MATH's reward through math-verify: which answer counts, what equals it, hostile answers."""

import itertools
import subprocess
import sys
from collections import Counter

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.config.user_code.classes import check_reward_function
from hybridrl.processes.messages import FailureKind
from hybridrl.rewards.math_answer import last_boxed, reference_answer, score
from tests.support.scorers import reward_scorer

SCORE = "hybridrl.rewards.math_answer.score"
HALF = {"answer": r"Halve it: $1/2$. The answer is $\boxed{\frac{1}{2}}$."}


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        (r"so \boxed{\frac12}", 1.0, 1.0),
        (r"so \boxed{0.5}.", 1.0, 1.0),
        (r"so $\boxed{ \dfrac{2}{4} }$", 1.0, 1.0),
        (r"\boxed {1/2}", 1.0, 1.0),
        (r"\boxed{3} no, \boxed{1/2}", 1.0, 1.0),
        (r"\boxed{1/2} no, \boxed{3}", 0.0, 0.0),
        (r"\boxed{1/2} and \boxed{}", 0.0, 0.0),
        (r"\boxed{1/2} and then \boxed{1", 0.0, 0.0),  # cut off
        (r"\boxed{1/2 or so", 0.0, 0.0),
        (r"the answer is $\frac{1}{2}$", 0.0, 1.0),
        ("the answer is 1/2", 0.0, 1.0),
        ("1/2, no: the answer is 3", 0.0, 0.0),
        ("first, it is 12\n#### 1/2", 0.0, 1.0),
        ("first, it is 1/2\n#### 12", 0.0, 0.0),
        ("#### **\\frac12**", 0.0, 1.0),
        ("it is 3 #### $0.5$.", 0.0, 1.0),
        (r"the answer is \$0.50.", 0.0, 1.0),
        ("the answer is \u22120.5", 0.0, 0.0),
        ("half of it", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_which_answer_counts(response, strict, flexible):
    assert score("prompt", response, HALF, mode="strict") == strict
    assert score("prompt", response, HALF, mode="flexible") == flexible


@pytest.mark.parametrize(
    ("answer", "boxed", "expected"),
    [
        ("42", "42.0", 1.0),
        ("1000", "1,000", 1.0),
        (r"\sqrt{8}", r"2\sqrt{2}", 1.0),
        ("x^2 - 1", "(x-1)(x+1)", 1.0),
        ("5", "x = 5", 1.0),
        (r"10\text{ cm}", "10", 1.0),
        (r"\{1, 2\}", r"\{2, 1\}", 1.0),
        ("(1,2]", "(1, 2]", 1.0),
        ("(1,2]", "[1,2]", 0.0),
        ("(1,2)", "(2,1)", 0.0),
        (r"\frac{1}{3}", "0.333", 0.0),
        ("x^2 - 1", "(x-1)^2", 0.0),
        (r"\text{(C)}", "C", 1.0),
        (r"\text{(C)}", "D", 0.0),
        ("east", r"\text{east}", 1.0),
        ("east", "east", 1.0),
        ("east", "seat", 0.0),  # the same letters: as a product they would be equal
    ],
)
def test_equal_as_mathematics(answer, boxed, expected):
    assert score("", rf"\boxed{{{boxed}}}", {"answer": answer}, mode="strict") == expected


@pytest.mark.parametrize(
    "answer",
    ["42", " 42 ", "$42$", r"\(42\)", r"\boxed{42}", r"\boxed{7}, no \boxed{42}", "a\n#### 42", 42],
)
def test_the_examples_answer_may_stand_in_a_solution_or_alone(answer):
    assert reference_answer(answer)[0] == 42


# As data sets of mathematics write answers: what stands before, what it is, what stands behind.
BEFORE = ("", r"\$", "$", r"\approx ", "-", "x = ")
ANSWERS = (
    *("5", "0.5", "-3", "1,000", r"32,\!348", "3:4", r"10^{5}", r"0.\overline{3}", r"4210_5"),
    *(r"\frac{1}{2}", r"\frac12", r"1\frac{1}{2}", r"\sqrt{2}", r"2\pi", "x^2+1", "2+3i", "5!"),
    *("(1,2)", "[0,1)", r"(-\infty,3)\cup[5,\infty)", r"\{1,2\}", r"\emptyset", r"\infty"),
    *(r"\begin{pmatrix}1\\[2pt]2\end{pmatrix}", r"\text{Tuesday}", r"\text{(A)}", "C", "Monday"),
    *(r"\log_2 3", r"\binom{5}{2}", "|x|", r"\tan 30^\circ", "x=5", r"x\le 3", "\u00bd", "\u22125"),
)
BEHIND = ("", r"\%", "%", r"^\circ", "\u00b0", r"\text{ cm}^2", " miles", r"\$", "$", ".", "\n")
GOLDS = ["".join(parts) for parts in itertools.product(BEFORE, ANSWERS, BEHIND)]


def test_every_gold_answer_equals_itself_in_a_box():
    """One in five, so that each part meets each other part."""
    golds = [r"\$18.90", *GOLDS[::5]]
    scores = {
        gold: score("", rf"\boxed{{{gold}}}", {"answer": gold}, mode="strict") for gold in golds
    }
    assert [gold for gold, found in scores.items() if found != 1.0] == []


@pytest.mark.parametrize("gold", [r"\$18.90", "$18.90", r"18.90\$", r"#### \$18.90", "\\$ 18.90\n"])
def test_money_is_a_number(gold):
    assert score("", r"\boxed{18.90}", {"answer": gold}, mode="strict") == 1.0
    assert score("", r"\boxed{18.91}", {"answer": gold}, mode="strict") == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"The final answer is \$18.", "18"),
        (r"The total cost is \$1,234.50.", "1234.5"),
        ("The answer is \u22123.", "-3"),
        ("#### \u22123", "-3"),
        (r"#### \$18", "18"),
        ("#### east", "east"),
    ],
)
def test_final_answers_without_a_box(response, answer):
    assert score("", response, {"answer": answer}, mode="flexible") == 1.0


@pytest.mark.parametrize(("gold", "found"), [("50", r"50\%"), (r"50\%", "50"), ("50%", r"50\%")])
def test_percent_is_a_unit(gold, found):
    assert score("", rf"\boxed{{{found}}}", {"answer": gold}, mode="strict") == 1.0
    assert score("", r"\boxed{0.5}", {"answer": gold}, mode="strict") == 0.0


@pytest.mark.parametrize(
    "gold", ["{", "{5", "5}", r"\frac{1}{2", r"\(5", r"\[5", "5\\\\", "5\\", "\u0661\u0662", "$5$$"]
)
def test_a_gold_answer_that_is_no_mathematics_does_not_raise(gold):
    assert reference_answer(gold)


@pytest.mark.parametrize("answer", ["", "  ", "\n", "$", r"\$", "$$", r"\boxed{}", "####"])
def test_an_example_without_answer_raises(answer):
    with pytest.raises(ValueError, match=r"data\.answer_key"):
        score("", r"\boxed{1}", {"answer": answer}, mode="strict")


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{\frac{1}{2}} x", r"\frac{1}{2}"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{a \} b}", r"a \} b"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{\text{a \boxed{2}}}", "2"),
        (r"\boxed{1", None),
        (r"\boxed 1", None),
        (r"\boxed", None),
        ("1", None),
    ],
)
def test_last_boxed(text, boxed):
    assert last_boxed(text) == boxed


def test_a_long_text_is_read_at_its_end():
    lines = "so $x = 1$ and 2 3 4\n" * 5000
    assert score("", f"{lines}the answer is $0.5$", HALF, mode="flexible") == 1.0
    assert score("", rf"{lines}\boxed{{1/2}}", HALF, mode="strict") == 1.0
    assert score("", rf"\boxed{{{'1' * 2000}}}", HALF, mode="strict") == 0.0


def test_answers_that_take_for_ever_are_cut_off_and_their_process_goes_on():
    """With math-verify's own alarm, its end would take the scorer's away."""
    responses = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{1/2}", "so 1/2"]
    with reward_scorer(
        SCORE, {"mode": "flexible"}, timeout_s=1.5, num_processes=1, failed_score=-1.0
    ) as scorer:
        result = scorer.score([("", response, HALF) for response in responses])
    assert result.scores == [-1.0, 1.0, 1.0]
    assert Counter(f.kind for f in result.failures) == {FailureKind.timeout: 1}


def test_the_package_is_imported_by_the_first_call_alone():
    code = (
        "import sys; import hybridrl.rewards.math_answer as m; assert 'sympy' not in sys.modules\n"
        r"m.score('', r'\boxed{1}', {'answer': '1'}, mode='strict'); print('sympy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")  # nor does it warn


def test_bad_settings_are_named_before_a_run():
    check_reward_function("reward", SCORE, {"mode": "strict"})
    with pytest.raises(ConfigError, match=r"reward\.args\.mode = loose, expected one of strict"):
        check_reward_function("reward", SCORE, {"mode": "loose"})


def test_a_missing_package_is_named_with_what_to_type(monkeypatch):
    """None in sys.modules makes an import fail as that of a package that is not installed."""
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError) as caught:
        check_reward_function("eval.rules.math", SCORE, {"mode": "strict"})
    (problem,) = caught.value.texts
    assert "eval.rules.math.function needs the package math-verify" in problem
    assert "pip install math-verify (hybridrl's extra math)" in problem
