"""Classes and functions that the config names by dotted path."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from hybridrl.config import schema
from hybridrl.config.errors import ConfigError
from hybridrl.config.keys import similar_siblings
from hybridrl.config.user_code.importing import check_import, own_problems

# role -> its worker in this package and the keys it reads. Naming them here keeps a check of the
# config from importing torch when no worker is extended.
BUILT_IN: dict[str, tuple[str, type[schema.RoleConfig]]] = {
    "actor": ("hybridrl.workers.actor.ActorWorker", schema.ActorConfig),
    "critic": ("hybridrl.workers.critic.CriticWorker", schema.CriticConfig),
    "ref": ("hybridrl.workers.reference.ReferenceWorker", schema.ReferenceConfig),
    "rollout": ("hybridrl.workers.rollout.RolloutWorker", schema.RolloutConfig),
    "reward_model": (
        "hybridrl.workers.reward_model.RewardModelWorker",
        schema.RewardModelConfig,
    ),
}
# Roles whose section a run may leave out.
OPTIONAL = ("reward_model",)
WORKER_BASE = "hybridrl.workers.base.Worker"
# What a module of the user's may raise while it is imported.
IMPORT_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    SystemExit,
    TypeError,
    ValueError,
)


def locate(key: str, path: str) -> Any:
    """What `path` ("package.module.name") names.

    Checks of a config call `check_import` before, as modules may end their process or hang.

    Raises:
        ConfigError: the module cannot be imported, or has no such name.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ConfigError(
            f"{key} = {path}, expected a dotted path such as my_package.my_module.MyName."
        )
    try:
        module = importlib.import_module(module_name)
    except IMPORT_ERRORS as error:
        raise ConfigError(
            f"{key} = {path}, but importing {module_name} failed: "
            f"{type(error).__name__}: {error}.\n"
            f"Modules are looked for in the current directory, PYTHONPATH and installed packages."
        ) from error
    if name not in vars(module):
        names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        raise ConfigError(
            f"{key} = {path}, but {module_name} has no {name}; it has {', '.join(names) or 'none'}."
        )
    return vars(module)[name]


def worker_config_class(role: str, path: str) -> type[schema.RoleConfig]:
    """The dataclass of keys that the worker `path` of `role` reads.

    Raises:
        ConfigError: no worker class stands there, or its keys are not those of the role.
    """
    built_in, expected = BUILT_IN[role]
    if path == built_in:
        return expected
    key = f"{role}.worker"
    for other, (other_path, _) in BUILT_IN.items():
        if path == other_path:
            raise ConfigError(f"{key} = {path} is the worker of {other}. Set {key}={built_in}.")
    check_import(key, path)
    cls: Any = locate(key, path)
    if not inspect.isclass(cls) or WORKER_BASE not in map(_full_name, cls.__mro__):
        raise ConfigError(
            f"{key} = {path} is no worker class. Let it be a subclass of {built_in}, "
            f"which it extends."
        )
    config_class: Any = inspect.getattr_static(cls, "config_class", None)
    if not (inspect.isclass(config_class) and issubclass(config_class, expected)):
        raise ConfigError(
            f"{key} = {path} has config_class {_full_name(config_class)}, expected a subclass of "
            f"{_full_name(expected)}, whose keys the rest of the program reads."
        )
    if not dataclasses.is_dataclass(config_class):
        raise ConfigError(f"{key} = {path}: mark its config_class with @dataclass(kw_only=True).")
    return config_class


def check_reward_function(key: str, path: str, args: dict[str, Any]) -> None:
    """Raise a ConfigError unless `path` names a function (prompt, response, example, **args).

    A reward that checks itself is asked for its problems, too.
    """
    check_import(f"{key}.function", path)
    function: Callable[..., Any] = locate(f"{key}.function", path)
    if not callable(function):
        raise ConfigError(f"{key}.function = {path} is no function.")
    signature = inspect.signature(function)
    try:
        signature.bind("prompt", "response", {}, **args)
    except TypeError as error:
        raise ConfigError(
            f"{key}.function = {path} cannot be called with {key}.args = {args}: {error}.\n"
            f"Its signature is {signature}; rewards are called with (prompt, response, example, "
            f"**args). {_meant(key, args, signature)}Remove or rename keys of {key}.args."
        ) from error
    if problems := own_problems(key, path, function, args):
        raise ConfigError(*problems)


def _meant(key: str, args: dict[str, Any], signature: inspect.Signature) -> str:
    """Which parameters the args that are none may have been meant to be; "" if none comes near."""
    known = list(signature.parameters)[3:]  # behind prompt, response, example
    unknown = [name for name in args if name not in known]
    near = [found for name in unknown for found in similar_siblings(f"{key}.args.{name}", known)]
    return f"Did you mean {' or '.join(near)}? " if near else ""


def _full_name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}" if inspect.isclass(thing) else repr(thing)
