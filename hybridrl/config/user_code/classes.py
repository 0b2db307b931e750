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
from hybridrl.config.errors import ABSENT, ConfigError, Problem, raised_problems
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
    "teacher": ("hybridrl.workers.teacher.TeacherWorker", schema.TeacherConfig),
}
# Roles whose section a run may leave out.
OPTIONAL = ("reward_model", "teacher")
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
        why = f"{file_of(module_name) or module_name} has no {name}; {has}"
        raise ConfigError(Problem("no_such_name", key, path, why=why))
    return vars(module)[name]


def signature_of(
    key: str, path: str, built_in: Collection[str], group: str
) -> list[inspect.Parameter]:
    """Return the parameters of a user's function, named instead of a built-in one.

    Raises:
        ConfigError: it is neither a built-in name nor the path of a function.
    """
    if not module_of(path):
        expected = f"one of {', '.join(built_in)} or a dotted path or file, such as {FORMS}"
        remedy = f"Set {group}=<name> for a built-in one with its settings"
        raise ConfigError(Problem("no_path", key, path, expected, remedy=remedy))
    function = locate(key, path)
    if not inspect.isfunction(function):
        raise ConfigError(Problem("function", key, path, "a function", "", "Set the path of one"))
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
            why, remedy = f"it is the worker of {other}", f"Set {key}={built_in}"
            raise ConfigError(Problem("worker", key, path, why=why, remedy=remedy))
    with ThreadPoolExecutor(1) as meanwhile:
        # The trial imports torch, and so will this process: together they take half of the time.
        if _can_be_imported(module_of(path)):
            meanwhile.submit(importlib.import_module, module_of(built_in))
        check_import(key, path)
    cls: Any = locate(key, path)
    if not inspect.isclass(cls) or WORKER_BASE not in map(_full_name, cls.__mro__):
        remedy = f"Make it a subclass of {built_in}"
        raise ConfigError(Problem("worker", key, path, "a worker class", remedy=remedy))
    config_class: Any = inspect.getattr_static(cls, "config_class", None)
    if not (inspect.isclass(config_class) and issubclass(config_class, expected)):
        needed = f"one whose config_class is a subclass of {_full_name(expected)}"
        why = f"other code reads its keys, and it has config_class {_full_name(config_class)}"
        raise ConfigError(Problem("config_class", key, path, needed, why))
    return config_class


def _can_be_imported(module: str) -> bool:
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


def reward_problems(config: schema.RunConfig) -> Iterator[Problem]:
    """Check reward functions and the names of evaluation rules."""
    for name in config.eval.rules:
        begin = name.partition("_")[0]
        if not name.isidentifier() or begin in ("greedy", "sampled") or name == "reward":
            expected = "a name of letters, digits and _ that does not begin with greedy or sampled "
            expected, why = f"{expected}and is not reward", "it is part of eval/accuracy_<name>"
            yield Problem("rule_name", f"eval.rules.{name}", ABSENT, expected, why, "Rename it")
    for key, rule, signature in _reward_functions(config):
        problems = raised_problems(check_reward_function, key, rule.function, rule.args, signature)
        yield from problems
        if not problems and not (key == "reward" and config.earns_rewards):
            yield from _answer_problems(config.data, key, rule)


def _answer_problems(data: DataConfig, key: str, section: FunctionConfig) -> Iterator[Problem]:
    """Refuse a function that reads answers which the data does not have."""
    path = section.function
    if data.lacks_answers and reads_answer(function_at(key, path), section.args):
        remedy = "name a function that reads none (docs/rewards.md)"
        if key.startswith("eval.rules."):
            remedy = f"remove the rule: '~{key}'"
        why = "it compares responses with answers, but data.answer_key = null: the data has none"
        remedy = f"Set data.answer_key=<column of the answer>, or {remedy}"
        yield Problem("no_answers", f"{key}.function", path, why=why, remedy=remedy)


def _reward_functions(
    config: schema.RunConfig,
) -> Iterator[tuple[str, FunctionConfig, RewardSignature]]:
    """Yield key, section and signature of the reward function and of the evaluation rules."""
    yield "reward", config.reward, config.reward.signature
    for name, rule in config.eval.rules.items():
        yield f"eval.rules.{name}", rule, RewardSignature.auto


def callback_problems(config: schema.RunConfig) -> Iterator[Problem]:
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
        raise ConfigError(Problem("callback", key, path, "a subclass of hybridrl.Callback"))
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        why = f"it cannot be made without arguments: {error}"
        remedy = "Name a subclass that passes them to super().__init__"
        raise ConfigError(Problem("callback", key, path, why=why, remedy=remedy)) from error
    return cls


def environment_problems(config: schema.RunConfig) -> Iterator[Problem]:
    """Check the section environment, if there is one."""
    environment = config.environment
    if environment is not None:
        if not environment.role:
            expected = "a role of the chat template, such as user"
            yield Problem("role", "environment.role", ABSENT, expected, "it is empty")
        _check_function("environment", environment, ({},), "(example, **args)")
        yield from _answer_problems(config.data, "environment", environment)


def agent_problems(config: schema.RunConfig) -> Iterator[Problem]:
    """Check the section agent, if there is one."""
    agent = config.agent
    if agent is None:
        return
    if config.environment is not None:
        why, remedy = "there is an environment, too", "Remove environment.*, or the agent"
        yield Problem("agent", "agent", why=why, remedy=remedy)
    if (top_k := config.eval.top_k) is not None:
        why = "an agent's requests have none"
        yield Problem("agent", "eval.top_k", top_k, why=why, remedy="Remove it")
    function = _check_function("agent", agent, (None, None), "(task, client, **args)")
    yield from _answer_problems(config.data, "agent", agent)
    if not inspect.iscoroutinefunction(function):
        expected = "`async def run(task, client) -> reward`"
        remedy = "Make it async; asyncio.to_thread runs blocking code (docs/agents.md)"
        yield Problem("coroutine", "agent.function", agent.function, expected, remedy=remedy)


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
        key, expected = f"{key}.function", "a function or class"
        raise ConfigError(Problem("function", key, path, expected, "", f"Set {key} to one"))
    return function


def _full_name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}" if inspect.isclass(thing) else repr(thing)
