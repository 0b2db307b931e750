"""Responses over several steps: what they need and exclude."""

import pytest
from composing import examined, problems

GRPO = ("+recipe=gsm8k_grpo", "hardware=cpu")
PARTIAL = "rollout.schedule=partial"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.max_versions=2"], ["rollout.max_versions", "no effect", "rollout.schedule"]),
        ([PARTIAL, "algorithm.max_sampling_rounds=2"], ["rollout.schedule = partial", "rounds"]),
        ([PARTIAL, "environment=calculator"], ["rollout.schedule = partial", "conversations"]),
        (
            [PARTIAL, "algorithm.rollout_correction.method=none"],
            ["rollout_correction.method = none", "earlier weights", "method=truncate"],
        ),
        (
            [PARTIAL, "rollout.max_in_flight=200", "rollout.max_versions=2"],
            ["rollout.max_in_flight = 200", "64", "192"],
        ),
        ([PARTIAL, "rollout.max_in_flight=63"], ["rollout.max_in_flight = 63", "64"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_one_mistake_gets_one_problem(overrides, words):
    found = problems(*GRPO, *overrides)
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found


@pytest.mark.parametrize(
    ("overrides", "in_flight"),
    [([], 64), ([PARTIAL], 128), ([PARTIAL, "rollout.max_in_flight=70"], 70)],
)
def test_twice_a_steps_prompts_are_in_flight_by_default(overrides, in_flight):
    """An engine decodes a step's responses at once; the others wait for a place, oldest first."""
    found = examined([*GRPO, "rollout.max_num_seqs=null", *overrides])
    assert not found.report.problems
    rollout = found.config.rollout
    assert (rollout.max_in_flight, rollout.max_num_seqs) == (in_flight, 512)
