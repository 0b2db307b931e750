"""trainer.epochs: steps from the data, where they go, and beside trainer.total_steps."""

import pytest

from hybridrl.app.data import examine_data
from hybridrl.config.errors import Report
from hybridrl.config.validate import set_steps
from tests.support.composing import examined, named, problems

BASE = ["+recipe=gsm8k_grpo", "hardware=cpu"]


def lengths(config):
    return (
        config.trainer.total_steps,
        config.actor.total_steps,
        config.critic.total_steps,
        config.data.curriculum_steps,
    )


@pytest.mark.parametrize(
    ("epochs", "prompts", "per_step", "steps"),
    [(1, 640, 64, 10), (3, 641, 64, 31), (0.5, 640, 64, 5), (0.1, 7, 7, 1), (0.3, 70, 7, 3)],
)
def test_steps_are_epochs_times_prompts_by_those_of_a_step_rounded_up(
    epochs, prompts, per_step, steps
):
    given = [f"trainer.epochs={epochs}", f"data.prompts_per_step={per_step}"]
    config, report = examined([*BASE, *given]).config, Report()
    for _ in range(2):  # as in a restart
        set_steps(config, prompts, report)
        assert lengths(config) == (steps,) * 4 and report.problems == []


def test_a_length_of_its_own_stays():
    config = examined([*BASE, "trainer.epochs=2", "actor.total_steps=70"]).config
    set_steps(config, 6400, Report())
    assert lengths(config) == (200, 70, 200, 200)


@pytest.mark.parametrize("method", [[], ["algorithm=sft", "rollout.responses_per_prompt=1"]])
def test_the_data_that_a_run_reads_counts(method):
    """The embedded problems are 8,192; those that are dropped do not count."""
    few = ["data.num_eval_problems=4", "trainer.epochs=1.5", *method]
    result = examined([*BASE, *few])
    prompts = examine_data(result)
    assert prompts is not None and result.report.problems == []
    assert lengths(result.config) == (-(-len(prompts.train) * 3 // 2 // 64),) * 4


def test_what_depends_on_the_length_is_checked_once_it_is_known():
    result = examined([*BASE, "trainer.epochs=0.5", "actor.optim.warmup_steps=50"])
    assert result.report.problems == []
    set_steps(result.config, 6400, result.report)
    (problem,) = result.report.problems
    assert (problem.id, problem.value) == ("warm_up", 50) and "total_steps = 50" in str(problem)


def test_it_is_refused_beside_total_steps(tmp_path):
    found = named(*BASE, "trainer.epochs=2", "trainer.total_steps=60")
    assert found == [("no_effect", "trainer.total_steps")]
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\ntrainer: {total_steps: 60}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    own = ["+recipe=mine", "hardware=cpu"]
    assert problems(*own, "trainer.epochs=2", config_dir=tmp_path) == []
    assert problems(*own, "trainer.epochs=null", config_dir=tmp_path) == []


@pytest.mark.parametrize(("value", "id_"), [("0", "range"), ("-1", "range"), ("two", "type")])
def test_wrong_epochs_are_refused(value, id_):
    assert named(*BASE, f"trainer.epochs={value}") == [(id_, "trainer.epochs")]
