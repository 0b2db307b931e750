"""algorithm.advantage: which roles and keys a run has by it, and what is refused."""

import pytest
from rich.console import Console

from hybridrl.config.estimators import BUILT_IN_ESTIMATORS, uses_critic
from hybridrl.config.planner.memory import rank_phases
from hybridrl.plan.tables import plan
from tests.support.composing import GPU_NODE, LAPTOP, examined, problems

GRPO = ("+recipe=gsm8k_grpo", "hardware=cpu")
NAMES = tuple(BUILT_IN_ESTIMATORS)


def test_no_warm_up_of_a_critic_that_is_not_there_is_no_mistake():
    assert problems(*GRPO, "trainer.critic_warmup_steps=0") == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["critic.optim.min_lr_ratio=0.1"],
            ["critic.optim.min_lr_ratio", "algorithm.advantage = grpo, which needs no critic"],
        ),
        (["trainer.critic_warmup_steps=2"], ["trainer.critic_warmup_steps", "set algorithm=ppo"]),
        (
            ["algorithm.lam=0.9"],
            ["algorithm.lam", "no effect", "advantage = grpo", "set algorithm.advantage=gae."],
        ),
        (["algorithm.gamma=0.9"], ["algorithm.gamma", "no effect", "gae or reinforce_plus_plus."]),
        (["algorithm.pass_k=2"], ["algorithm.pass_k", "no effect", "advantage=pass_at_k."]),
        (["algorithm=pass_at_k", "algorithm.pass_k=0"], ["algorithm.pass_k = 0", "at least 1"]),
        (
            ["algorithm=pass_at_k", "algorithm.pass_k=8"],
            [
                "algorithm.pass_k = 8",
                "rollout.responses_per_prompt = 8",
                "algorithm.pass_k=7 or less",
                "rollout.responses_per_prompt=9 or more",
            ],
        ),
        (
            ["algorithm=reinforce_plus_plus", "algorithm.whiten_advantages=true"],
            ["algorithm.whiten_advantages", "no effect", "which always whitens"],
        ),
        (
            ["algorithm=rloo", "rollout.responses_per_prompt=1", "data.prompts_per_step=256"],
            ["rollout.responses_per_prompt = 1", "algorithm.advantage = rloo compares"],
        ),
        (
            ["rollout.responses_per_prompt=1", "data.prompts_per_step=256"],
            ["rollout.responses_per_prompt = 1", "compares the responses", "=2 or more"],
        ),
        (["algorithm.advantage=gro"], ["algorithm.advantage = gro", *NAMES, "dotted path"]),
        (
            ["algorithm.advantage=json.dumps"],
            ["algorithm.advantage = json.dumps: it has unknown parameters obj", "response_mask"],
        ),
        (["algorithm.advantage=json.nothing"], ["json has no nothing"]),
        (["algorithm.advantage=math.pi"], ["math.pi, expected a function"]),
        (["algorithm.advantage=null"], ["algorithm.advantage = null, expected text"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_one_mistake_gets_one_problem(overrides, words):
    found = problems(*GRPO, *overrides)
    assert len(found) == 1, found
    missing = [word for word in words if word not in found[0]]
    assert not missing, (missing, found[0])


def test_a_wrong_one_hides_no_other_mistake_where_memory_depends_on_it():
    mistakes = ("algorithm.advantage=gro", "actor.optim.lr=-1")
    found = "".join(problems("hardware=gpu", *mistakes, machine=GPU_NODE))
    assert "algorithm.advantage = gro" in found and "actor.optim.lr = -1" in found


@pytest.mark.parametrize("name", NAMES[1:])
def test_each_method_is_an_algorithm_of_its_name_on_the_embedded_default(name):
    found = examined([f"algorithm={name}", "hardware=cpu"])
    assert found.report.problems == []
    assert found.config.algorithm.advantage == name
    assert not uses_critic(found.config)


@pytest.mark.parametrize("name", ["remax", "reinforce_plus_plus"])
def test_one_response_to_a_prompt_is_enough_where_none_are_compared(name):
    single = ("rollout.responses_per_prompt=1", "data.prompts_per_step=256")
    assert problems(f"algorithm={name}", "hardware=cpu", *single) == []


def test_the_estimator_alone_decides_on_the_critic():
    assert problems("hardware=cpu", "algorithm.advantage=grpo") == []
    assert not uses_critic(examined(["hardware=cpu", "algorithm.advantage=grpo"]).config)
    assert uses_critic(examined(["hardware=cpu", "algorithm=ppo"]).config)


def test_plan_and_memory_leave_the_critic_out():
    with_critic = examined(["+recipe=gsm8k_ppo", "hardware=cpu"])
    without = examined(list(GRPO))
    assert with_critic.shape is not None and without.shape is not None
    phases = [rank_phases(found.config, found.shape, None) for found in (with_critic, without)]
    names = [[phase.name for phase in found] for found in phases]
    assert "update critic" in names[0]
    assert names[1] == [name for name in names[0] if name != "update critic"]
    assert not any("critic" in part for phase in phases[1] for part in phase.parts)


def test_the_dry_run_says_that_there_is_no_critic():
    found = examined(list(GRPO))
    console = Console(width=160)
    with console.capture() as captured:
        console.print(plan(found.config, found.shape, LAPTOP))
    assert "nothing: algorithm.advantage = grpo needs none" in captured.get()
