"""Tasksets of verifiers 0.4 (https://github.com/PrimeIntellect-ai/verifiers).

verifiers plays an episode: a harness asks its interception server, and that the endpoint. One
environment serves all episodes of a process. verifiers_chat.py has what differs from verifiers.
"""

import asyncio
import functools
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from hybridrl.config.errors import ConfigError, Problem
from hybridrl.environments.others.base import EpisodeFailed, needs, unusable
from hybridrl.environments.others.verifiers_chat import KEY, adapt
from hybridrl.environments.programs import Task

Config = dict[str, Any]
REMEDY = "Install it, or name its file: agent.args.env=/path/taskset.py"
# A seat that is not configured: a chat, on this machine.
SEAT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


@needs("verifiers", "verifiers", "env", REMEDY)
def rows(
    split: str, *, env: str, config: Config, eval_config: Config | None, num_tasks: int | None
) -> list[Config] | None:
    """Return the tasks of a taskset; None held out without `eval_config`.

    Raises:
        ConfigError: there is no such taskset, or its tasks have no end.
    """
    chosen = config if split == "train" else eval_config
    if chosen is None:
        return None
    try:
        tasks = loaded(env, json.dumps(chosen)).taskset
    except (ImportError, OSError, AttributeError, TypeError, ValueError) as error:
        raise unusable("env", env, "a taskset of verifiers 0.4", error, REMEDY) from error
    tasks = tasks if num_tasks is None else tasks.take(num_tasks)
    if not tasks.bounded:
        why, remedy = f"the tasks of {env} have no end", "Set agent.args.num_tasks=1000"
        raise ConfigError(Problem("endless", "agent.args.num_tasks", None, "a number", why, remedy))
    return [_row(task.data, index) | {"dataset": env} for index, task in enumerate(tasks)]


def _row(data: Any, index: int) -> Config:
    # Another seat may open the conversation instead.
    texts = {"system": data.system_prompt, "user": data.prompt_text or f"task {index}"}
    question = [{"role": role, "content": text} for role, text in texts.items() if text]
    return {"question": question, "task": data.model_dump(mode="json")}


@functools.cache
def loaded(env: str, config: str) -> Any:
    """Return the environment of a taskset: an id, a module or a file; `config` is JSON."""
    import verifiers.v1 as vf

    own = json.loads(config)
    own["taskset"] = own.get("taskset", {}) | {"id": (name := _plugged_in(env))}
    for seat, field in vf.env_config_type(name, own.get("id", "")).model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            theirs = {"harness"} if vf.default_harness_id(name) == name else set()
            theirs |= field.default.model_fields_set
            ours = {key: value for key, value in SEAT.items() if key not in theirs}
            own[seat] = ours | own.get(seat, {})
    return vf.load_environment(vf.resolve_env_config(own))


def _plugged_in(env: str) -> str:
    """Return a taskset's id; of a file, or a module of a package, one by which it is found.

    Servers of tools, which are other processes, find the same modules.
    """
    name, path = env, Path(env).resolve()
    if env.endswith(".py"):
        sys.path.insert(0, str(path.parent))
        name = path.stem
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    if env == name and "." not in env:
        return env
    module, name = importlib.import_module(name), name.rpartition(".")[2]
    if env.endswith(".py") and Path(str(module.__file__)) != path:
        raise ImportError(f"its name is that of another module, {module.__file__}")
    sys.modules[f"verifiers.v1.tasksets.{name.lower()}"] = module
    return name


async def run(
    task: Task, client: Any, *, env: str, config: Config, eval_config: Any, num_tasks: int | None
) -> float:
    """Play a task; return its reward, of several trained seats the mean.

    Raises:
        EpisodeFailed: something in it failed, or the policy has a seat that is not trained.
    """
    import verifiers.v1 as vf

    environment = loaded(env, json.dumps(config))
    serving, up = _serving(environment)
    await asyncio.wait((serving, up), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    kind, url = type(environment.taskset).task_type(), str(client.base_url).rstrip("/")
    data = kind.data_type().model_validate(task.example["task"])
    endpoint = vf.EvalClientConfig(base_url=url, headers={KEY: client.api_key})
    context = vf.ModelContext("policy", endpoint)
    episode = await environment.run_episode(kind(data, environment.config.taskset.task), context)
    if not episode.ok:
        errors = [e for part in (*episode.traces, episode) for e in part.errors]
        raise EpisodeFailed("".join(f"{e.type}: {e.message}" for e in errors[-1:]))
    for seat in (trace.agent for trace in episode.traces):
        if not seat.trainable and seat.config.client.base_url == url:
            key = f"agent.args.config.{seat.name}"
            raise EpisodeFailed(f"{key} is not trained and has no model: set its client and model")
    rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
    return sum(rewards) / len(rewards)


@functools.cache
def _serving(environment: Any) -> "tuple[asyncio.Task[None], asyncio.Future[None]]":
    """Serve an environment up to the end of the process; the second is done when it is up."""
    up = asyncio.get_running_loop().create_future()
    adapt()

    async def serve() -> None:
        async with environment.serving():
            up.set_result(None)
            await asyncio.Event().wait()

    return asyncio.create_task(serve()), up
