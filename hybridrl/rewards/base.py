"""What a reward is, and how one is found by its dotted path."""

import os
import sys
from typing import Any, Protocol

from hybridrl.config.classes import locate
from hybridrl.config.errors import ConfigError

# prompt, response, example: what a reward judges.
RewardItem = tuple[str, str, dict[str, Any]]


class Reward(Protocol):
    """Judges one response.

    It runs in processes of its own, so it may be slow, block or crash; it must not rely on state
    shared with other calls.

    Args:
        prompt: the text that the model was given.
        response: the text that it wrote, without special tokens.
        example: the row of the data set; its "answer" is the column named by data.answer_key.
        args: conf/reward's args.

    Returns:
        A finite number; larger is better.
    """

    def __call__(
        self, prompt: str, response: str, example: dict[str, Any], /, **args: Any
    ) -> float:
        """The response's score."""
        ...


def resolve_function(dotted: str) -> Reward:
    """The function that `dotted` ("package.module.name") names.

    Modules are looked for where Python looks, then in the current directory, which a console
    script would not search; it is appended to sys.path, so it hides nothing.

    Raises:
        ConfigError: there is no such module, it cannot be imported, it has no such name, or the
            name is not callable.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    function = locate("reward.function", dotted)
    if not callable(function):
        raise ConfigError(
            f"reward.function = {dotted} is a {type(function).__name__}, expected a function "
            f"(prompt, response, example, **args) -> float."
        )
    return function
