"""What the loop remembers: as it was, bit for bit, when it is read again."""

import json

import pytest
from test_kl_control import control, scored

from hybridrl.checkpoint.errors import DamagedCheckpoint
from hybridrl.data.lengths import Mean, ResponseLengths
from hybridrl.data.prompt_source import PromptSource
from hybridrl.data.prompts import Prompt
from hybridrl.trainer.kl_control import NoReference
from hybridrl.trainer.nonfinite import SkippedSteps
from hybridrl.trainer.state import loop_state, read_state


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


def taken(number: int, token: int = 7) -> PromptSource:
    """A run's prompts, of which some have been taken."""
    prompts = [Prompt(k, [token, k], "", "", {}, {}) for k in range(16)]
    source = PromptSource(prompts, 4, seed=1)
    source.take(number)
    return source


def test_the_prompts_are_known_by_their_tokens_not_by_how_many_were_taken():
    assert taken(0).fingerprint == taken(5).fingerprint != taken(0, token=8).fingerprint


@pytest.mark.parametrize(("coef", "rollout_version"), [(None, 3), (0.1 + 0.2, 2)])
def test_the_file_gives_back_what_was_written(coef, rollout_version, tmp_path):
    lengths = ResponseLengths({7: Mean(4, 95), 2**40: Mean(1, 3)}, Mean(5, 98))
    skipped = SkippedSteps({"actor": 2, "critic": 0}, {"actor": 5})
    state = loop_state(6, taken(5), coef, 3, rollout_version, lengths, skipped)
    (tmp_path / "driver.json").write_bytes(state.encode())
    assert (read := read_state(tmp_path)) == state
    assert read.rollout_is_current is (rollout_version == 3)
    assert ResponseLengths.restored(read.lengths) == lengths
    assert SkippedSteps(**read.skipped) == skipped


def test_what_is_remembered_does_not_move_with_the_run():
    lengths, skipped = ResponseLengths({7: Mean(1, 9)}, Mean(1, 9)), SkippedSteps({"actor": 1})
    prompts = taken(5)
    before = loop_state(1, prompts, None, 1, 1, lengths, skipped)
    text = before.encode()
    prompts.take(3)
    lengths.seen[8] = Mean(2, 9)
    skipped.count["actor"] = 2
    assert before.encode() == text


@pytest.mark.parametrize("body", [{"step": 1}, [], "x"])
def test_a_file_with_other_fields_is_refused_by_name(body, tmp_path):
    (tmp_path / "driver.json").write_text(json.dumps(body))
    with pytest.raises(DamagedCheckpoint, match=r"driver\.json"):
        read_state(tmp_path)
