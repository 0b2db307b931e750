"""algorithm.advantage: which roles and keys a run has by it, and what is refused."""

import pytest
from composing import LAPTOP, examined, problems
from rich.console import Console

from hybridrl.config.estimators import uses_critic
from hybridrl.config.memory import rank_phases
from hybridrl.config.plan_text import plan

GRPO = ("+recipe=gsm8k_grpo", "hardware=cpu")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["critic.optim.min_lr_ratio=0.1"],
            ["critic.optim.min_lr_ratio", "algorithm.advantage = grpo, which needs no critic"],
        ),
        (["trainer.critic_warmup_steps=2"], ["trainer.critic_warmup_steps", "set algorithm=ppo"]),
        (["algorithm.lam=0.9"], ["algorithm.lam", "no effect", "algorithm.advantage = grpo"]),
        (
            ["rollout.responses_per_prompt=1", "data.prompts_per_step=256"],
            ["rollout.responses_per_prompt = 1", "compares the responses", "=2 or more"],
        ),
        (["algorithm.advantage=gro"], ["algorithm.advantage = gro", "gae, grpo", "dotted path"]),
        (["algorithm.advantage=json.dumps"], ["algorithm.advantage = json.dumps takes obj"]),
        (["algorithm.advantage=json.nothing"], ["json has no nothing"]),
        (["algorithm.advantage=null"], ["algorithm.advantage = null, expected text"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_one_mistake_gets_one_problem(overrides, words):
    found = problems(*GRPO, *overrides)
    assert len(found) == 1, found
    missing = [word for word in words if word not in found[0]]
    assert not missing, (missing, found[0])


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
