"""Protocol of environments, and the task of the processes that run them."""

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
    """Answer of an environment to a turn of the model.

    Attributes:
        text: answer, which the model reads before its next turn; unused if `done`.
        reward: reward of the turn; a number as of rewards (rewards/base.py).
        done: True if the conversation is over.
    """

    text: str
    reward: float
    done: bool


class Environment(Protocol):
    """Environment of one conversation.

    `environment.function` names a class or function that creates it from the row of the data set
    and, as keywords, environment.args. It runs in separate processes, so it may be slow, block or
    crash. It is pickled between turns and may continue in another process. Therefore its state
    must be picklable and stored in the object.
    """

    def reset(self) -> str:
        """Return the text between the prompt and the model's first turn, usually "".

        Called once per prompt; all its responses continue from copies of the resulting state.
        """
        ...

    def step(self, text: str) -> StepResult:
        """Answer a turn.

        Args:
            text: text of the model's turn, without special tokens. If a limit on tokens or turns
                has truncated it, only the reward of the answer is used.
        """
        ...


@dataclass(frozen=True, slots=True)
class ResetRequest:
    """Request to begin a conversation about an example."""

    example: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Request to answer a turn: the pickled environment and the model's text."""

    state: str
    text: str


class StepResponse(NamedTuple):
    """Answer of an environment, and its new state.

    Attributes:
        state: pickle in base64, read only by its own processes; empty at the end.
        result: answer.
    """

    state: str
    result: StepResult


def environment_task(
    function: str, args: dict[str, Any]
) -> Callable[[ResetRequest | StepRequest], StepResponse]:
    """Return the function that a process runs on each request.

    Raises:
        ConfigError: no such class or function.
    """
    make = resolve_environment(function)

    def answer(item: ResetRequest | StepRequest) -> StepResponse:
        if isinstance(item, ResetRequest):
            environment: Environment = make(item.example, **args)
            result = StepResult(environment.reset(), 0.0, False)
        else:
            environment = pickle.loads(base64.b64decode(item.state))
            result = environment.step(item.text)
        result = checked(result, function)
        state = b"" if result.done else pickle.dumps(environment)
        return StepResponse(base64.b64encode(state).decode(), result)

    return answer


def parse_response(value: Any, function: str) -> StepResponse:
    """Parse a StepResponse from JSON.

    Raises:
        TypeError, ValueError: the value is not a StepResponse.
    """
    match value:
        case [str() as state, [str() as text, reward, done]]:
            return StepResponse(state, checked(StepResult(visible(text), reward, done), function))
    raise ValueError("not an answer of an environment")


def checked(result: Any, function: str) -> StepResult:
    """Check the result of `reset` or `step`.

    Raises:
        TypeError: it is not a StepResult, or a member has the wrong type.
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
    """Return the class or function at a dotted path, which creates environments.

    Raises:
        ConfigError: it does not exist or cannot be called, or a class lacks reset or step.
    """
    make = locate_anywhere(KEY, dotted)
    if not callable(make):
        raise ConfigError(f"{KEY} = {dotted} is a {type(make).__name__}, expected a class.")
    members = {name: inspect.getattr_static(make, name, None) for name in ("reset", "step")}
    missing = [name for name, member in members.items() if not callable(member)]
    if inspect.isclass(make) and missing:
        raise ConfigError(
            f"{KEY} = {dotted} has no {' and no '.join(missing)}; an environment has "
            f"reset() -> text and step(text) -> StepResult (docs/environments.md)."
        )
    return make
