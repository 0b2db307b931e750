"""algorithm.advantage: which roles and keys a run has by it, and what is refused."""

import pytest
from rich.console import Console

from hybridrl.config.estimators import BUILT_IN_ESTIMATORS, uses_critic
from hybridrl.config.planner.memory import rank_phases
from hybridrl.plan.tables import plan
from tests.support.composing import GPU_NODE, LAPTOP, examined, made, mistakes, named, problems

GRPO = ("+recipe=gsm8k_grpo", "hardware=cpu")
NAMES = tuple(BUILT_IN_ESTIMATORS)


def test_no_warm_up_of_a_critic_that_is_not_there_is_no_mistake():
    assert problems(*GRPO, "trainer.critic_warmup_steps=0") == []


MISTAKES = """
no_effect critic.optim.min_lr_ratio critic.optim.min_lr_ratio=0.1 \
    | algorithm.advantage = grpo, which needs no critic
no_effect trainer.critic_warmup_steps trainer.critic_warmup_steps=2 | set algorithm=ppo
no_effect algorithm.lam algorithm.lam=0.9 | advantage = grpo | set algorithm.advantage=gae.
no_effect algorithm.gamma algorithm.gamma=0.9 | gae or reinforce_plus_plus.
no_effect algorithm.pass_k algorithm.pass_k=2 | advantage=pass_at_k.
range algorithm.pass_k algorithm=pass_at_k algorithm.pass_k=0
pass_k algorithm.pass_k algorithm=pass_at_k algorithm.pass_k=8 \
    | rollout.responses_per_prompt = 8 | pass_k=7 or less | rollout.responses_per_prompt=9 or more
no_effect algorithm.whiten_advantages algorithm=reinforce_plus_plus \
    algorithm.whiten_advantages=true | which always whitens
group_size rollout.responses_per_prompt algorithm=rloo rollout.responses_per_prompt=1 \
    data.prompts_per_step=256 | algorithm.advantage = rloo compares
group_size rollout.responses_per_prompt rollout.responses_per_prompt=1 data.prompts_per_step=256 \
    | compares the responses | =2 or more
no_path algorithm.advantage algorithm.advantage=gro | one of gae, reinforce_plus_plus, remax, grpo
estimator_parameters algorithm.advantage algorithm.advantage=json.dumps | parameters obj
no_such_name algorithm.advantage algorithm.advantage=json.nothing | json has no nothing
function algorithm.advantage algorithm.advantage=math.pi
type algorithm.advantage algorithm.advantage=null
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_one_mistake_gets_one_problem(mistake):
    assert made(mistake, *GRPO) == [mistake]


def test_a_wrong_one_hides_no_other_mistake_where_memory_depends_on_it():
    wrong = ("algorithm.advantage=gro", "actor.optim.lr=-1")
    found = named("hardware=gpu", *wrong, machine=GPU_NODE)
    assert {("no_path", "algorithm.advantage"), ("range", "actor.optim.lr")} <= {*found}


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
