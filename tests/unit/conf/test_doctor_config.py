"""doctor: its choices compose, and a recipe shrunk to two steps passes every check."""

import pytest
from test_files import RECIPES, asked_for

from hybridrl.config.choices import DoctorChecks
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.controller.ray.node_probes import LocalProbes
from hybridrl.doctor.stages import CheckContext
from hybridrl.doctor.training import shrunk
from tests.support.composing import LAPTOP, TINY, examined


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
    small = two_steps_of([*asked_for(recipe), f"cluster.gpus_per_node={ranks}"], tmp_path)
    assert small.trainer.total_steps == 2
    assert small.data.prompts_per_step == ranks


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.critic_warmup_steps=5"],
        ["actor.optim.warmup_steps=10", "critic.optim.warmup_steps=10"],
        ["actor.optim.warmup_steps=10", "trainer.critic_warmup_steps=5"],
        ["algorithm.overlong.buffer_tokens=40"],
        ["checkpoint.keep_best=eval/accuracy_greedy"],
        ["checkpoint.keep_best=eval/accuracy", "checkpoint.every_steps=5", "eval.every_steps=5"],
        ["algorithm.kl.target=0.1", "algorithm.kl.horizon=10000"],
        ["trainer.profile_steps=[3]"],
        ["trainer.max_restarts=2", "checkpoint.every_steps=5"],
        ["algorithm.max_sampling_rounds=4"],
        ["algorithm=grpo", "trainer.total_steps=5"],
        ["rollout.schedule=partial", "rollout.max_in_flight=100"],
        ["rollout.schedule=partial", "rollout.max_in_flight=64", "rollout.max_versions=0"],
        [
            "rollout.schedule=split",
            "rollout.max_in_flight=100",
            "placement.rollout_gpus=3",
            "cluster.gpus_per_node=5",
        ],
    ],
)
def test_two_steps_can_be_had_of_what_belongs_to_long_runs(overrides, tmp_path):
    two_steps_of(["+recipe=gsm8k_ppo", *overrides], tmp_path)


def two_steps_of(overrides, tmp_path):
    """The config of the doctor's last stage for a run that has no problem."""
    overrides = [*overrides, "hardware=cpu"]
    whole = examined(overrides)
    case = CheckContext(
        config=whole.config,
        machine=LAPTOP,
        shape=model_shape(TINY),
        frozen=(),
        overrides=overrides,
        agents=LocalProbes("here"),
        quick=False,
    )
    assert whole.report.problems == []
    # A run.dry=true of the command line, and a temporary folder with a comma.
    small = examined([*overrides, "run.dry=true", *shrunk(case, tmp_path / "a, b")])
    assert small.report.problems == [] and not small.config.run.dry
    return small.config
