"""The loop's own state: written after each step, and enough to go on from."""

import json

import pytest
from test_kl_control import control, scored

from hybridrl.trainer.kl_control import NoReference
from hybridrl.trainer.state import STATE_FILE, LoopState, read_state, write_state


def test_an_adaptive_coefficient_goes_on_as_if_nothing_had_happened():
    """Two steps in one run, and one step in each of two: the same bits."""
    whole, first, second = (control("loss", "adaptive") for _ in range(3))
    whole.adapt(scored())
    whole.adapt(scored())
    first.adapt(scored())
    second.restore(first.coef)
    assert second.adapt(scored())["actor/kl_coef"] == first.coef != 0.1
    assert second.coef == whole.coef


def test_a_fixed_coefficient_is_the_configs():
    kl = control("reward", "fixed")
    kl.restore(0.7)
    assert kl.coef == 0.1


def test_a_penalty_and_none_do_not_mix():
    with pytest.raises(ValueError, match="the state has no KL penalty"):
        control("loss", "adaptive").restore(None)
    NoReference().restore(None)
    with pytest.raises(ValueError, match="the state has a KL penalty"):
        NoReference().restore(0.1)


@pytest.mark.parametrize("coef", [None, 0.1 + 0.2])
def test_the_file_gives_back_what_was_written_last(coef, tmp_path):
    write_state(tmp_path, LoopState(step=1, prompts_taken=64, kl_coef=0.5))
    state = LoopState(step=2, prompts_taken=130, kl_coef=coef)
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    assert [file.name for file in tmp_path.iterdir()] == [STATE_FILE]


def test_a_file_with_other_fields_is_refused(tmp_path):
    (tmp_path / STATE_FILE).write_text(json.dumps({"step": 1}))
    with pytest.raises(ValueError, match=STATE_FILE):
        read_state(tmp_path)


def test_without_a_finished_step_there_is_none(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_state(tmp_path)
