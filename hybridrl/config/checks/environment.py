"""Whether the environment that answers the model can be made and used as config asks."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.config.keys import similar_siblings
from hybridrl.config.schema import EnvironmentConfig, RunConfig
from hybridrl.config.user_code.classes import locate
from hybridrl.config.user_code.importing import check_import, own_problems

KEY = "environment"


def environment_problems(config: RunConfig) -> Iterator[str]:
    """What is wrong with the section environment; nothing where there is none."""
    environment = config.environment
    if environment is None:
        return
    if not environment.role:
        yield f"{KEY}.role is empty, expected a role of the chat template, such as user."
    yield from _call_problems(environment)


def _call_problems(config: EnvironmentConfig) -> Iterator[str]:
    """Whether what makes environments is there and takes the arguments."""
    try:
        check_import(f"{KEY}.function", config.function)
        make: Callable[..., Any] = locate(f"{KEY}.function", config.function)
    except ConfigError as error:
        yield from error.problems
        return
    if not callable(make):
        yield f"{KEY}.function = {config.function} is no class or function."
        return
    signature = inspect.signature(make)
    try:
        signature.bind({}, **config.args)
    except TypeError as error:
        yield (
            f"{KEY}.function = {config.function} cannot be called with {KEY}.args = "
            f"{config.args}: {error}.\nIts signature is {signature}; environments are made with "
            f"(example, **args). {_meant(config, signature)}Remove or rename keys of {KEY}.args."
        )
        return
    yield from own_problems(KEY, config.function, make, config.args)


def _meant(config: EnvironmentConfig, signature: inspect.Signature) -> str:
    """Which parameters the args that are none may have been meant to be; "" if none comes near."""
    known = list(signature.parameters)[1:]  # behind example
    unknown = [name for name in config.args if name not in known]
    near = [found for name in unknown for found in similar_siblings(f"{KEY}.args.{name}", known)]
    return f"Did you mean {' or '.join(near)}? " if near else ""
