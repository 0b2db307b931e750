"""overlong_penalty: DAPO's equation 13 by hand, piece by piece, at its joints; bad input."""

import pytest
import torch

from hybridrl.algorithms.advantages import overlong_penalty


def test_hand_worked():
    # M = 20, C = 5: free up to 15, then (15 - L) / 5 down to -1 at 20, and -1 beyond.
    lengths = torch.tensor([0, 1, 14, 15, 16, 18, 19, 20, 21, 1000])
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, -0.2, -0.6, -0.8, -1.0, -1.0, -1.0])
    penalty = overlong_penalty(lengths, max_tokens=20, buffer=5)
    torch.testing.assert_close(penalty, expected)
    assert penalty.dtype == torch.float32


def test_equals_the_equation_case_by_case():
    def equation(length: int, most: int, cache: int) -> float:
        if length <= most - cache:
            return 0.0
        return ((most - cache) - length) / cache if length <= most else -1.0

    for most in (1, 2, 7, 16):
        for cache in range(1, most + 1):
            lengths = torch.arange(most + 4, dtype=torch.float64)
            expected = [equation(length, most, cache) for length in range(most + 4)]
            found = overlong_penalty(lengths, max_tokens=most, buffer=cache)
            torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_no_responses_pay_nothing():
    assert overlong_penalty(torch.tensor([]), max_tokens=4, buffer=2).shape == (0,)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "buffer", "names"),
    [
        ([1.0], 10, 0, "buffer=0"),
        ([1.0], 10, 11, "buffer=11, max_tokens=10"),
        ([[1.0]], 10, 2, r"\(1, 1\)"),
        ([1.0, -1.0], 10, 2, r"\[-1\.0\]"),
        ([torch.nan], 10, 2, "nan"),
    ],
)
def test_bad_input_is_named(lengths, max_tokens, buffer, names):
    with pytest.raises(ValueError, match=names):
        overlong_penalty(torch.tensor(lengths), max_tokens=max_tokens, buffer=buffer)
