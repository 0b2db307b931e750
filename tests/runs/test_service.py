"""Primitives from Python: gradients, samples, models and states of a service."""

import pytest

from tests.support.runs import launched


@pytest.mark.parametrize("name", ["adapters", pytest.param("whole", marks=pytest.mark.slow)])
def test_calls_of_a_service_do_what_they_say(tmp_path, name):
    with launched(tmp_path, "tests.support.service_calls", name, str(tmp_path / "run")) as run:
        assert "all is as expected" in run.ended()
