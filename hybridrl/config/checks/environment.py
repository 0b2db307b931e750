"""Checks of the environment: its role, and the call of its class or function."""

from collections.abc import Iterator

from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import RunConfig
from hybridrl.config.user_code.classes import check_call

KEY = "environment"


def environment_problems(config: RunConfig) -> Iterator[str]:
    """Check the section environment, if there is one."""
    environment = config.environment
    if environment is None:
        return
    if not environment.role:
        yield f"{KEY}.role is empty, expected a role of the chat template, such as user."
    try:
        check_call(KEY, environment.function, ({},), environment.args, "(example, **args)")
    except ConfigError as error:
        yield from error.problems
