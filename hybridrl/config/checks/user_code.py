"""Checks of the functions and classes that give rewards and answers."""

from collections.abc import Iterator

from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.classes import check_call, check_reward_function


def reward_problems(config: RunConfig) -> Iterator[str]:
    """Check reward functions and the names of evaluation rules."""
    functions = {"reward": config.reward} | {
        f"eval.rules.{name}": rule for name, rule in config.eval.rules.items()
    }
    for name in config.eval.rules:
        if not name.isidentifier() or name.partition("_")[0] in ("greedy", "sampled"):
            yield (
                f"eval.rules.{name}: expected a name of letters, digits and _ that does not begin "
                f"with greedy or sampled: it is part of eval/accuracy_<name>.\nRename it."
            )
    for key, rule in functions.items():
        try:
            check_reward_function(key, rule.function, rule.args)
        except ConfigError as error:
            yield from error.problems


def environment_problems(config: RunConfig) -> Iterator[str]:
    """Check the section environment, if there is one."""
    environment = config.environment
    if environment is None:
        return
    if not environment.role:
        yield "environment.role is empty, expected a role of the chat template, such as user."
    try:
        function, args = environment.function, environment.args
        check_call("environment", function, ({},), args, "(example, **args)")
    except ConfigError as error:
        yield from error.problems
