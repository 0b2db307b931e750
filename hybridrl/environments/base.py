"""What an environment is, and the task by which processes of their own step it."""

import base64
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hybridrl.config.errors import ConfigError
from hybridrl.rewards.base import finite_number, locate_anywhere
from hybridrl.rewards.wire import visible

KEY = "environment.function"


class StepResult(NamedTuple):
    """What an environment makes of a turn of the model's.

    Attributes:
        text: its answer, which the model reads before its next turn; not read if `done`.
        reward: what the turn earned; a number as of rewards (rewards/base.py).
        done: whether the conversation is over.
    """

    text: str
    reward: float
    done: bool


class Environment(Protocol):
    """Answers one conversation.

    `environment.function` names a class or function that makes one: it is called with the row of
    the data set and, as keywords, with environment.args. It runs in processes of its own, so it may
    be slow, block or crash. Between turns it is pickled, and it may go on in another process: what
    it has to remember must be picklable, and stand in the object itself.
    """

    def reset(self) -> str:
        """Text that the model reads behind the prompt, before its first turn; mostly "".

        Called once for each prompt; all its responses go on from copies of what it leaves.
        """
        ...

    def step(self, text: str) -> StepResult:
        """Answer a turn.

        Args:
            text: what the model wrote in this turn, special tokens left out. It may have been cut
                off, by the limits on tokens and turns: then the answer goes unread, the reward
                counts.
        """
        ...


@dataclass(frozen=True, slots=True)
class ResetRequest:
    """To a process: begin a conversation about an example."""

    example: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A request to continue: the environment's last state, and the text of the model's turn."""

    state: str
    text: str


class StepResponse(NamedTuple):
    """From a process: what the environment answered, and the environment as it is now.

    Attributes:
        state: a pickle in base64, which only its processes read; empty at the end.
        result: the answer.
    """

    state: str
    result: StepResult


def environment_task(
    function: str, args: dict[str, Any]
) -> Callable[[ResetRequest | StepRequest], StepResponse]:
    """What a process computes: the environment's answer to each opening or turn.

    Raises:
        ConfigError: there is no such class or function.
    """
    make = resolve_environment(function)

    def move(item: ResetRequest | StepRequest) -> StepResponse:
        if isinstance(item, ResetRequest):
            environment: Environment = make(item.example, **args)
            result = StepResult(environment.reset(), 0.0, False)
        else:
            environment = pickle.loads(base64.b64decode(item.state))
            result = environment.step(item.text)
        result = checked(result, function)
        state = b"" if result.done else pickle.dumps(environment)
        return StepResponse(base64.b64encode(state).decode(), result)

    return move


def parse_response(value: Any, function: str) -> StepResponse:
    """The StepResponse that JSON has made a list of.

    Raises:
        TypeError, ValueError: it has made that of something else.
    """
    match value:
        case [str() as state, [str() as text, reward, done]]:
            return StepResponse(state, checked(StepResult(visible(text), reward, done), function))
    raise ValueError("no answer of an environment")


def checked(result: Any, function: str) -> StepResult:
    """What `reset` or `step` returned, if it can be used.

    Raises:
        TypeError: it is no StepResult, or a member has the wrong type.
        ValueError: the reward is NaN, infinite or too large.
    """
    if not isinstance(result, StepResult):
        raise TypeError(f"{function} returned a {type(result).__name__}, expected a StepResult")
    if not isinstance(result.text, str):
        raise TypeError(f"{function} answered a {type(result.text).__name__}, expected text")
    reward = finite_number(result.reward, f"{function}, as a reward,")
    if not isinstance(result.done, bool):
        raise TypeError(f"{function}: done is a {type(result.done).__name__}, expected a bool")
    return StepResult(result.text, reward, result.done)


def resolve_environment(dotted: str) -> Callable[..., Environment]:
    """What makes environments, by its dotted path.

    Raises:
        ConfigError: nothing stands there, it cannot be called, or a class has no reset or step.
    """
    make = locate_anywhere(KEY, dotted)
    if not callable(make):
        raise ConfigError(f"{KEY} = {dotted} is a {type(make).__name__}, expected a class.")
    missing = [name for name in ("reset", "step") if not callable(_member(make, name))]
    if inspect.isclass(make) and missing:
        raise ConfigError(
            f"{KEY} = {dotted} has no {' and no '.join(missing)}; an environment has "
            f"reset() -> text and step(text) -> StepResult (docs/environments.md)."
        )
    return make


def _member(owner: Any, name: str) -> Any:
    return inspect.getattr_static(owner, name, None)
