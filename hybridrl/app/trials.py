"""Trials of a run's own code on the first row of its data: reward, environment or agent."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from hybridrl.config.checks.checkpoint import NONE
from hybridrl.config.errors import Problem, as_problem
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.classes import locate
from hybridrl.environments.base import trial_problems as environment_trial
from hybridrl.rewards.calls import trial_problems as reward_trial

# Of the agents wing, which plugs in by name.
AGENT_TRIAL = "hybridrl.agents.training.trial.trial_problems"

if TYPE_CHECKING:
    from hybridrl.data.sources.prompts import Prompt


def trial_problems(config: RunConfig, prompt: "Prompt") -> list[Problem]:
    """Try what gives the rewards of a run; return the problems."""
    if config.environment is not None:
        return environment_trial(config.environment, prompt.example)
    if config.agent is None:
        return reward_trial(config.reward, prompt.text, prompt.example, prompt.answer)
    # A resume or restart goes on with a program that has run, whose servers may not be back yet.
    # The endpoint needs packages of vLLM's, which a dry run may lack.
    if config.resume != NONE or find_spec("vllm") is None:
        return []
    return [*map(as_problem, locate("agent", AGENT_TRIAL)(config, prompt))]
