"""Optimizer steps skipped in a row are counted over training steps, for each role."""

from dataclasses import asdict

from hybridrl.trainer.nonfinite import SkippedSteps


def of_actor(last: int) -> dict[str, float]:
    return {"actor/skipped_last": float(last)}


def test_a_row_goes_on_over_training_steps():
    skipped = SkippedSteps()
    for step, last in [(1, 0), (2, 1), (3, 4), (4, 4)]:
        skipped.note(step, of_actor(last), num_steps=4)
    assert (skipped.count, skipped.since) == ({"actor": 9}, {"actor": 2})


def test_a_step_that_is_taken_ends_the_row():
    skipped = SkippedSteps()
    skipped.note(1, of_actor(4), num_steps=4)
    skipped.note(2, of_actor(0), num_steps=4)
    assert (skipped.count, skipped.since) == ({"actor": 0}, {})
    # Taken, then skipped twice: a new row begins in this training step.
    skipped.note(3, of_actor(4), num_steps=4)
    skipped.note(4, of_actor(2), num_steps=4)
    assert (skipped.count, skipped.since) == ({"actor": 2}, {"actor": 4})


def test_roles_count_for_themselves_and_only_where_they_are_trained():
    skipped = SkippedSteps()
    skipped.note(1, {"critic/skipped_last": 2.0}, num_steps=2)  # the critic's warm-up
    skipped.note(2, of_actor(0) | {"critic/skipped_last": 2.0}, num_steps=2)
    assert skipped.count == {"actor": 0, "critic": 4}
    assert skipped.since == {"critic": 1}


def test_what_is_counted_comes_back_from_plain_data():
    skipped = SkippedSteps()
    skipped.note(7, of_actor(2), num_steps=2)
    assert SkippedSteps(**asdict(skipped)) == skipped
