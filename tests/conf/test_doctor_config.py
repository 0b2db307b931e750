"""doctor: its choices compose, and a recipe shrunk to two steps passes every check."""

import pytest
from composing import LAPTOP, TINY, examined
from test_files import RECIPES

from hybridrl.config.choices import DoctorChecks
from hybridrl.config.model_shape import model_shape
from hybridrl.controller.agents import LocalAgents
from hybridrl.doctor.stages import Case
from hybridrl.doctor.training import shrunk


@pytest.mark.parametrize(
    ("override", "checks"),
    [
        ("doctor=quick", DoctorChecks.quick),
        ("doctor=full", DoctorChecks.full),
        ("doctor=off", DoctorChecks.none),
    ],
)
def test_the_choices_are_quick_full_and_off(override, checks):
    assert examined(["hardware=cpu", override]).config.doctor.checks is checks
    assert examined(["hardware=cpu"]).config.doctor.checks is DoctorChecks.quick


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_steps_of_every_recipe_can_be_had(recipe, ranks, tmp_path):
    overrides = [f"+recipe={recipe}", "hardware=cpu", f"cluster.gpus_per_node={ranks}"]
    whole = examined(overrides)
    case = Case(
        config=whole.config,
        machine=LAPTOP,
        shape=model_shape(TINY),
        reward_shape=None,
        overrides=overrides,
        agents=LocalAgents("here"),
        quick=False,
    )
    small = examined([*overrides, *shrunk(case, tmp_path)])
    assert small.report.problems == []
    assert small.config.trainer.total_steps == 2
    assert small.config.data.prompts_per_step == ranks
