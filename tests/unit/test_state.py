"""What the loop remembers: as it was, bit for bit, when it is read again."""

import json
import tracemalloc
from datetime import date

import pytest
import torch
from test_kl_control import control, scored

from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.config.choices import Offload
from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.sources.prompt_source import PromptSource
from hybridrl.data.sources.prompts import Prompt
from hybridrl.trainer.episodes.responses import Group, Response
from hybridrl.trainer.nonfinite import NonFiniteGuard
from hybridrl.trainer.sampling.hybrid_engine import HybridEngine
from hybridrl.trainer.state import TrainState, read_state


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


@pytest.mark.parametrize("had_penalty", [True, False])
def test_a_run_that_goes_on_with_a_penalty_or_without_one_has_its_configs(had_penalty):
    """Other than the run before: there is no weight to go on with."""
    before, now = Run(adaptive=had_penalty), Run(adaptive=not had_penalty)
    before.steps()
    before.state.commit(1)
    now.state.restore(before.state.finished())
    assert now.kl.coef == (None if had_penalty else 0.1)


def taken(number: int, token: int = 7, answer: str = "1", difficulty: float = 0.0) -> PromptSource:
    """A run's prompts, of which some have been taken."""
    row = {"answer": answer, "tests": [{"in": 1}], "day": date(2026, 1, 2)}
    prompts = [Prompt(k, [token, k], "", "", row, {}, "", difficulty) for k in range(16)]
    source = PromptSource(prompts, 4, seed=1)
    source.take(number)
    return source


def test_the_prompts_are_known_by_tokens_and_rows_not_by_how_many_were_taken():
    first = taken(0).fingerprint
    assert taken(5).fingerprint == first
    for other, differs in (
        (taken(0, token=8), {"tokens"}),
        (taken(0, answer="2"), {"rows"}),
        (taken(0, difficulty=1.0), {"rows"}),
    ):
        known = other.fingerprint
        assert {name for name in first if known[name] != first[name]} == differs


class Engines:
    """Rollout engines that keep their weights when they sleep, or not."""

    def __init__(self, *, keep: bool) -> None:
        self.keep = keep
        self.version: int | None = None

    def call(self, method: str, *args):
        if method == "reshard":
            (self.version,) = args
            return [{"total_s": 0.0}]
        self.version = self.version if self.keep else None
        return [self.version]


class InFlight:
    """A source that holds groups."""

    groups = ()

    def state(self):
        return self.groups

    def restore(self, groups):
        self.groups = groups


class Run:
    """What a run carries from step to step, with an adaptive KL coefficient or no reference."""

    def __init__(self, num_taken: int = 0, *, adaptive: bool = True, keep: bool = False) -> None:
        self.prompts = taken(num_taken)
        self.kl = control("loss", "adaptive") if adaptive else control("loss", "fixed", coef=0.0)
        self.engine = HybridEngine(Engines(keep=keep), Offload.none)
        self.engine.reshard()
        # Is asked neither to stop the run nor to write.
        self.guard = NonFiniteGuard(config=None, run_dir=None, save_weights=None)
        self.lengths, self.source = ResponseLengths(), InFlight()
        parts = self.prompts, self.kl, self.engine, self.guard, self.lengths, self.source
        self.state = TrainState(*parts)

    def steps(self) -> None:
        """Change everything that steps change."""
        self.lengths.learn(range(3), [4, 1, 7])
        self.lengths.learn(range(2), [8, 1], in_parts=True)
        responses = (
            Response.empty().with_sampled(
                torch.tensor([7, 8]), torch.tensor([-0.1, -2e-30]), 3, turn_ends=False
            ),
            Response.empty(),
        )
        prompt = self.prompts.take(3)[1]
        self.source.groups += (Group(prompt, step=4, version=2, engine=1, responses=responses),)
        self.kl.adapt(scored())
        self.engine.weight_version += 1
        self.guard.skipped.note(5, {"actor/skipped_last": 2.0}, num_steps=2)


@pytest.mark.parametrize("keep", [True, False])
def test_a_step_after_an_evaluation_reshards_as_the_first_of_a_resumed_run(keep):
    """Also if a checkpoint puts the engines to sleep in between, which keep their weights."""
    engine = HybridEngine(Engines(keep=keep), Offload.idle_all)
    engine.reshard()
    assert engine.is_current
    engine.end_evaluation()
    engine.make_room_for_optimizer()
    assert not engine.is_current
    engine.reshard()
    assert engine.is_current


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("is_stale", [True, False])
def test_a_run_that_goes_on_stands_where_the_file_says(adaptive, keep, is_stale, tmp_path):
    """Stale weights are moved before the next step, also where the engines keep those they have."""
    first, second = Run(5, adaptive=adaptive, keep=keep), Run(adaptive=adaptive, keep=keep)
    if adaptive:
        first.steps()
    first.engine.reshard()
    if is_stale:
        first.engine.sleep()
        first.engine.weight_version += 1
    first.state.commit(6)
    (tmp_path / "driver.json").write_bytes(first.state.finished().encode())
    read = read_state(tmp_path)
    assert read == first.state.finished()
    assert read.rollout_is_current is not is_stale
    second.state.restore(read)
    assert second.state.step == 6
    assert second.state.finished() == read
    assert second.lengths == first.lengths
    assert second.prompts.take(4) == first.prompts.take(4)


def test_what_is_finished_does_not_move_with_the_step_that_runs():
    run = Run(5)
    run.state.commit(1)
    before = run.state.finished().encode()
    run.steps()
    assert run.state.finished().encode() == before
    run.state.commit(2)
    now, then = vars(run.state.finished()), json.loads(before)
    assert {name for name in then if now[name] == then[name]} == {"prompts"}


def test_a_commit_keeps_nothing_for_prompts_that_the_step_has_not_drawn():
    run = Run()
    run.lengths.learn(range(20000), [1] * 20_000)
    run.state.commit(1)
    run.lengths.learn(range(3), [4, 1, 7])
    tracemalloc.start()
    run.state.commit(2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000  # bytes; a copy has over a million


@pytest.mark.parametrize("body", [{"step": 1}, [], "x"])
def test_a_file_with_other_fields_is_refused_by_name(body, tmp_path):
    (tmp_path / "driver.json").write_text(json.dumps(body))
    with pytest.raises(DamagedCheckpoint, match=r"driver\.json"):
        read_state(tmp_path)


def test_groups_in_flight_of_another_form_are_refused(tmp_path):
    run = Run()
    run.state.commit(1)
    state = vars(run.state.finished()) | {"in_flight": [{"prompt_id": 1, "drafts": []}]}
    (tmp_path / "driver.json").write_text(json.dumps(state))
    with pytest.raises(DamagedCheckpoint, match="groups in flight without responses"):
        read_state(tmp_path)
