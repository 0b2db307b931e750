"""Parts that adapters of other people's environments share."""

from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from typing import Any

from hybridrl.config.errors import ConfigError, Problem
from hybridrl.environments.base import StepResult, Text
from hybridrl.environments.programs import Reward, Task
from hybridrl.rewards.base import Checked, checked_by


class EpisodeFailed(RuntimeError):
    """An episode ended without a reward."""


def needs(package: str, extra: str, name: str, remedy: str) -> Callable[[Checked], Checked]:
    """Return a decorator of an adapter's `rows` that checks a package, and the argument `name`."""

    def problems(key: str, args: dict[str, Any]) -> Iterator[Problem]:
        if find_spec(package) is None:
            why = f"it needs the package {package}, which is not installed"
            install = f"Run pip install 'hybridrl[{extra}]'"
            yield Problem("package", "environment", extra, why=why, remedy=install)
        if args[name] is None:
            yield from unusable(name, None, "an environment", "", remedy).problems

    return checked_by(problems)


def unusable(name: str, value: object, what: str, why: object, remedy: str) -> ConfigError:
    """Return the error of an environment that cannot be loaded or played."""
    why = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else str(why)
    return ConfigError(Problem("environment", f"agent.args.{name}", value, what, why, remedy))


def seeds(name: str, count: int, **more: object) -> list[dict[str, Any]]:
    """Return rows of an environment that has no tasks but its seeds."""
    shared = {"dataset": name, **more}
    return [{"question": f"{name}, seed {k}", "seed": k, **shared} for k in range(count)]


async def play(
    task: Task,
    client: Any,
    first: Text,
    step: Callable[[str], Awaitable[StepResult]],
    *,
    max_turns: int,
    turn_rewards: bool,
) -> Reward:
    """Play an episode in which the environment is the user; return the rewards of its turns.

    It also ends where it has outgrown the limit of tokens. Without `turn_rewards` the rewards are
    those of the episode.
    """
    from openai import BadRequestError

    messages = [message for message in task.messages if message["role"] == "system"]
    turns, result = dict[str, float](), StepResult(first, 0.0, False)
    while not result.done and len(turns) < max_turns:
        messages.append({"role": "user", "content": result.text})
        try:
            answer = await client.chat.completions.create(model="policy", messages=messages)
        except BadRequestError as error:
            if turns and error.code == "context_length_exceeded":
                break
            raise
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        result = await step(text)
        turns[answer.id] = result.reward
    return Reward(sum(turns.values()), turns if turn_rewards else {})
