"""Tests of the reward: `python -m pytest` in this folder."""

import pytest
from reward import score


@pytest.mark.parametrize(
    ("response", "expected"),
    [("3 + 4 = 7\n#### 7", 1.0), ("It is 1,007.", 0.0), ("8", 0.0), ("", 0.0)],
)
def test_score(response: str, expected: float) -> None:
    """The last number counts."""
    assert score("", response, {"answer": "7"}) == expected
