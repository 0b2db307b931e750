"""Environments of OpenEnv (https://github.com/meta-pytorch/OpenEnv), each a server at a URL.

An episode is a session of its own: JSON over a WebSocket. The package openenv, which excludes
packages of vLLM's, is needed where the server runs, and not here.
"""

import json
from contextlib import suppress
from typing import Any
from urllib.request import urlopen

from hybridrl.environments.base import StepResult
from hybridrl.environments.others.base import EpisodeFailed, needs, play, seeds, unusable
from hybridrl.environments.programs import Reward, Task

REMEDY = "Start it, or set its address: agent.args.url=http://127.0.0.1:8000"
TIMEOUT_S = 10.0


@needs("websockets", "openenv", "url", REMEDY)
def rows(split: str, *, url: str, num_tasks: int, **_: object) -> list[dict[str, Any]] | None:
    """Return seeds of an environment; the last ones are held out.

    Raises:
        ConfigError: no server of OpenEnv answers.
    """
    if split != "train":
        return None
    try:
        with urlopen(f"{url.rstrip('/')}/schema", timeout=TIMEOUT_S) as reply:
            schema = json.load(reply)["action"]
    except (OSError, ValueError, KeyError) as error:
        raise unusable("url", url, "a running server of OpenEnv", error, REMEDY) from error
    return seeds(url, num_tasks, schema=schema)


async def run(
    task: Task, client: Any, *, url: str, reset: dict[str, Any], num_tasks: int, **limits: Any
) -> Reward:
    """Play an episode; an action is JSON, or the text of the one field that it needs.

    Raises:
        EpisodeFailed: the environment failed, or the server has no more sessions.
    """
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed

    schema = task.example["schema"]
    field: Any = schema["required"][0] if len(schema.get("required", [])) == 1 else None
    async with connect(f"ws{url.rstrip('/').removeprefix('http')}/ws", max_size=None) as socket:

        async def ask(kind: str, data: dict[str, Any]) -> StepResult:
            with suppress(ConnectionClosed):  # what it sent before is an error
                await socket.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(await socket.recv())
            if reply["type"] == "error":
                return _mistake(**reply["data"])
            seen: dict[str, Any] = reply["data"]["observation"]
            seen.pop("metadata", None)
            texts = [value for value in seen.values() if len(seen) == 1 and isinstance(value, str)]
            text = texts[0] if texts else json.dumps(seen)
            return StepResult(text, float(reply["data"]["reward"] or 0), reply["data"]["done"])

        async def step(text: str) -> StepResult:
            try:
                action = json.loads(text)
            except ValueError:
                action = text
            return await ask("step", action if isinstance(action, dict) else {field: text})

        first = (await ask("reset", {**reset, "seed": task.example["seed"]})).text
        first = first if field else json.dumps({"observation": first, "action": schema})
        return await play(task, client, first, step, **limits)


def _mistake(code: str, message: str, **more: Any) -> StepResult:
    """Return the answer to an action that does not fit its schema; raise other errors."""
    if code == "VALIDATION_ERROR":
        return StepResult(json.dumps({"error": message, **more}), 0.0, False)
    remedy = "; set agent.concurrency to its sessions" * (code == "CAPACITY_REACHED")
    raise EpisodeFailed(f"{code}: {message}{remedy}")
