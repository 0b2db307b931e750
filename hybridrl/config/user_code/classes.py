"""Classes and functions that the config names by dotted path."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hybridrl.config import schema
from hybridrl.config.choices import RewardSignature
from hybridrl.config.errors import ConfigError, Problem, raised_problems
from hybridrl.config.sections import DataConfig, FunctionConfig
from hybridrl.config.user_code.files import FORMS, file_of, module_and_name, module_of
from hybridrl.config.user_code.importing import check_import, check_itself, import_problem
from hybridrl.config.user_code.signatures import (
    check_arguments,
    check_signature,
    is_async,
    reads_answer,
)

# role -> its built-in worker and config class. A path instead of the class avoids importing torch.
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
CALLBACK_BASE = "hybridrl.trainer.callbacks.Callback"


def locate(key: str, path: str) -> Any:
    """Return the object at `path`, "package.module.name" or "/path/file.py:name".

    Call `check_import` first: an import may end the process or hang.

    Raises:
        ConfigError: the module cannot be imported, or has no such name.
    """
    module_name, name = module_and_name(key, path)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever a user's module raises
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(import_problem(key, path, reason)) from error
    if name not in vars(module):
        names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        has = f"it has {', '.join(names)}" if names else "it defines no function or class"
        raise ConfigError(
            f"{key} = {path}, but {file_of(module_name) or module_name} has no {name}; {has}."
        )
    return vars(module)[name]


def signature_of(
    key: str, path: str, built_in: Collection[str], group: str
) -> list[inspect.Parameter]:
    """Return the parameters of a user's function, named instead of a built-in one.

    Raises:
        ConfigError: it is neither a built-in name nor the path of a function.
    """
    if not module_of(path):
        raise ConfigError(
            f"{key} = {path}, expected one of {', '.join(built_in)} or a dotted path or file, "
            f"such as {FORMS}.\n"
            f"Set {group}=<name> for a built-in one with its settings."
        )
    function = locate(key, path)
    if not inspect.isfunction(function):
        raise ConfigError(f"{key} = {path}, expected a function.\nSet the path of one.")
    return list(inspect.signature(function).parameters.values())


def worker_config_class(role: str, path: str) -> type[schema.RoleConfig]:
    """Return the config class of the worker `path` of `role`.

    Raises:
        ConfigError: `path` is no worker class, or its config class does not fit the role.
    """
    built_in, expected = BUILT_IN[role]
    if path == built_in:
        return expected
    key = f"{role}.worker"
    for other, (other_path, _) in BUILT_IN.items():
        if path == other_path:
            raise ConfigError(f"{key} = {path} is the worker of {other}.\nSet {key}={built_in}.")
    with ThreadPoolExecutor(1) as meanwhile:
        # The trial imports torch, and so will this process: together they take half of the time.
        if _is_found(module_of(path)):
            meanwhile.submit(importlib.import_module, module_of(built_in))
        check_import(key, path)
    cls: Any = locate(key, path)
    if not inspect.isclass(cls) or WORKER_BASE not in map(_full_name, cls.__mro__):
        raise ConfigError(
            f"{key} = {path} is not a worker class.\nMake it a subclass of {built_in}."
        )
    config_class: Any = inspect.getattr_static(cls, "config_class", None)
    if not (inspect.isclass(config_class) and issubclass(config_class, expected)):
        raise ConfigError(
            f"{key} = {path} has config_class {_full_name(config_class)}, expected a subclass of "
            f"{_full_name(expected)}: other code reads its keys."
        )
    return config_class


def _is_found(module: str) -> bool:
    """Return whether a module's file or package exists; imports nothing."""
    if (file := file_of(module)) is not None:
        return os.path.exists(file)
    package = module.partition(".")[0]
    return package in sys.modules or (package != "" and find_spec(package) is not None)


def role_classes(cfg: DictConfig) -> tuple[dict[str, type[schema.RoleConfig]], list[Problem]]:
    """Return each role's dataclass, the built-in one if its worker is wrong, and the problems."""
    classes: dict[str, type[schema.RoleConfig]] = {}
    problems: list[Problem] = []
    for role, (_, built_in) in BUILT_IN.items():
        classes[role] = built_in
        path = OmegaConf.select(cfg, f"{role}.worker", throw_on_resolution_failure=False)
        if isinstance(path, str):
            try:
                classes[role] = worker_config_class(role, path)
            except ConfigError as error:
                problems += error.problems
    return classes, problems


def reward_problems(config: schema.RunConfig) -> Iterator[Problem | str]:
    """Check reward functions and the names of evaluation rules."""
    for name in config.eval.rules:
        begin = name.partition("_")[0]
        if not name.isidentifier() or begin in ("greedy", "sampled") or name == "reward":
            yield (
                f"eval.rules.{name}: expected a name of letters, digits and _ that does not begin "
                f"with greedy or sampled and is not reward: it is part of eval/accuracy_<name>.\n"
                "Rename it."
            )
    for key, rule, signature in _reward_functions(config):
        problems = raised_problems(check_reward_function, key, rule.function, rule.args, signature)
        yield from problems
        if not problems and not (key == "reward" and config.earns_rewards):
            yield from _answer_problems(config.data, key, rule)


def _answer_problems(data: DataConfig, key: str, section: FunctionConfig) -> Iterator[str]:
    """Refuse a function that reads answers which the data does not have."""
    path = section.function
    if data.lacks_answers and reads_answer(function_at(key, path), section.args):
        remedy = "name a function that reads none (docs/rewards.md)"
        if key.startswith("eval.rules."):
            remedy = f"remove the rule: '~{key}'"
        yield (
            f"{key}.function = {path} compares responses with answers, but data.answer_key = null: "
            f"the data has none.\nSet data.answer_key=<column of the answer>, or {remedy}."
        )


def _reward_functions(
    config: schema.RunConfig,
) -> Iterator[tuple[str, FunctionConfig, RewardSignature]]:
    """Yield key, section and signature of the reward function and of the evaluation rules."""
    yield "reward", config.reward, config.reward.signature
    for name, rule in config.eval.rules.items():
        yield f"eval.rules.{name}", rule, RewardSignature.auto


def callback_problems(config: schema.RunConfig) -> Iterator[Problem | str]:
    """Check the callbacks."""
    for path in config.trainer.callbacks:
        yield from raised_problems(callback_class, path)


def callback_class(path: str) -> Callable[[], Any]:
    """Return the callback class of an entry of trainer.callbacks.

    Raises:
        ConfigError: it is none, or it cannot be made without arguments.
    """
    key = "trainer.callbacks"
    check_import(key, path)
    cls: Any = locate(key, path)
    if not inspect.isclass(cls) or CALLBACK_BASE not in map(_full_name, cls.__mro__):
        raise ConfigError(f"{key} = {path}, expected a subclass of hybridrl.Callback.")
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise ConfigError(
            f"{key} = {path} cannot be made without arguments: {error}.\n"
            f"Name a subclass that passes them to super().__init__."
        ) from error
    return cls


def environment_problems(config: schema.RunConfig) -> Iterator[str]:
    """Check the section environment, if there is one."""
    environment = config.environment
    if environment is not None:
        if not environment.role:
            yield "environment.role is empty, expected a role of the chat template, such as user."
        _check_function("environment", environment, ({},), "(example, **args)")
        yield from _answer_problems(config.data, "environment", environment)


def agent_problems(config: schema.RunConfig) -> Iterator[str]:
    """Check the section agent, if there is one."""
    agent = config.agent
    if agent is None:
        return
    if config.environment is not None:
        yield "there are an environment and an agent.\nRemove environment.*, or the agent."
    if config.eval.top_k is not None:
        yield f"eval.top_k = {config.eval.top_k}: an agent's requests have none.\nRemove it."
    function = _check_function("agent", agent, (None, None), "(task, client, **args)")
    yield from _answer_problems(config.data, "agent", agent)
    if not inspect.iscoroutinefunction(function):
        yield (
            f"agent.function = {agent.function}, expected `async def run(task, client) -> reward`."
            f"\nMake it async; asyncio.to_thread runs blocking code (docs/agents.md)."
        )


def _check_function(
    key: str, section: FunctionConfig, inputs: tuple[Any, ...], call: str
) -> Callable[..., Any]:
    """Check a function that is called with `inputs` and its args; return it."""
    path, args = section.function, section.args
    check_import(f"{key}.function", path)
    function = function_at(key, path)
    check_arguments(key, path, function, args, (inputs, args), call)
    check_itself(key, path, function, args)
    return function


def check_reward_function(
    key: str,
    path: str,
    args: dict[str, Any],
    signature: RewardSignature = RewardSignature.auto,
) -> RewardSignature:
    """Check a reward function of the section `key` and its args; return its signature.

    Raises:
        ConfigError: `path` cannot be imported, has no known signature, or cannot be called with
            args, or its own checks found problems.
    """
    check_import(f"{key}.function", path)
    function = function_at(key, path)
    by_names = check_signature(key, path, function, args, signature)
    check_itself(key, path, function, args)
    return by_names


def awaits_rewards(config: schema.RunConfig) -> bool:
    """Return whether the reward or an evaluation rule is async; True if one has problems."""
    if any(reward_problems(config)):
        return True
    functions = _reward_functions(config)
    return any(is_async(locate(key, rule.function), rule.args) for key, rule, _ in functions)


def function_at(key: str, path: str) -> Callable[..., Any]:
    """Return the function or class that `path` names, of the section `key`.

    Raises:
        ConfigError: as `locate` does, or `path` names something else.
    """
    function: Callable[..., Any] = locate(f"{key}.function", path)
    if not callable(function):
        raise ConfigError(
            f"{key}.function = {path}, expected a function or class.\nSet {key}.function to one."
        )
    return function


def _full_name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}" if inspect.isclass(thing) else repr(thing)
