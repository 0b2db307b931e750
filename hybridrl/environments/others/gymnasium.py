"""Environments of Gymnasium (https://gymnasium.farama.org) that observe and act by texts."""

from asyncio import to_thread
from typing import Any

from hybridrl.environments.base import StepResult
from hybridrl.environments.others.base import needs, play, seeds, unusable
from hybridrl.environments.programs import Reward, Task

REMEDY = "Install it, or name its module: agent.args.env=my_module:MyGame-v0"


@needs("gymnasium", "gymnasium", "env", REMEDY)
def rows(
    split: str, *, env: str, options: dict[str, Any], num_tasks: int, **_: object
) -> list[dict[str, Any]] | None:
    """Return seeds of an environment; the last ones are held out.

    Raises:
        ConfigError: it cannot be made, or has other spaces.
    """
    if split != "train":
        return None
    made(env, options).close()
    return seeds(env, num_tasks)


def made(env: str, options: dict[str, Any]) -> Any:
    """Make an environment of a registered id, or module:id; raise as `rows` does."""
    import gymnasium

    try:
        game = gymnasium.make(env, **options)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise unusable("env", env, "an environment of Gymnasium", error, REMEDY) from error
    for space in (game.observation_space, game.action_space):
        if not isinstance(space, gymnasium.spaces.Text):
            raise unusable("env", env, "texts as observations and actions", f"has {space}", REMEDY)
    return game


async def run(
    task: Task,
    client: Any,
    *,
    env: str,
    options: dict[str, Any],
    num_tasks: int,
    invalid_reward: float,
    **limits: Any,
) -> Reward:
    """Play an episode; an answer that is not in the space of actions ends it."""
    game = await to_thread(made, env, options)

    async def step(text: str) -> StepResult:
        if text not in game.action_space:
            return StepResult("", invalid_reward, True)
        seen, reward, *is_over, _ = await to_thread(game.step, text)
        return StepResult(seen, float(reward), any(is_over))

    try:
        first, _ = await to_thread(game.reset, seed=task.example["seed"])
        return await play(task, client, first, step, **limits)
    finally:
        await to_thread(game.close)
