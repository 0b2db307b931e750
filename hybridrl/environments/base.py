"""Protocol of environments, and the task of the processes that run them."""

import base64
import inspect
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from hybridrl.config.errors import ConfigError, Problem
from hybridrl.config.schema import EnvironmentConfig
from hybridrl.config.user_code.classes import locate
from hybridrl.config.user_code.importing import try_out
from hybridrl.processes.messages import Failure, FailureKind, Setup, visible
from hybridrl.processes.pool import TaskPool
from hybridrl.rewards.base import finite_number

KEY = "environment.function"


# A text, or parts of a message in the forms of chat completions, for images.
Text = str | list[dict[str, object]]


class StepResult(NamedTuple):
    """Answer of an environment to a turn of the model.

    Attributes:
        text: answer, which the model reads before its next turn; unused if `done`.
        reward: reward of the turn; a number as of rewards (rewards/base.py).
        done: True if the conversation is over.
    """

    text: Text
    reward: float
    done: bool


class Environment(Protocol):
    """Environment of one conversation.

    `environment.function` names a class or function that creates it from the row of the data set
    and, as keywords, environment.args. It runs in separate processes, so it may be slow, block or
    crash. It is pickled between turns and may continue in another process. Therefore its state
    must be picklable and stored in the object.
    """

    def reset(self) -> Text:
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


class StepRequest(NamedTuple):
    """Request to answer a turn: the pickled environment and the model's text."""

    state: str
    text: str


class EnvironmentReply(NamedTuple):
    """Reply of an environment, or its failure.

    Attributes:
        state: pickled environment in base64, read only by its own processes; empty at the end.
        result: answer; after a failure, an empty one that ends the conversation.
        failure: kind of failure, or None.
        reason: reason of the failure in one line, or empty.
    """

    state: str
    result: StepResult
    failure: FailureKind | None = None
    reason: str = ""


def environment_task(
    function: str, args: dict[str, Any]
) -> Callable[[dict[str, Any] | StepRequest], EnvironmentReply]:
    """Return the function that a process runs on each example, to begin, and on each turn."""
    make = resolve_environment(function)

    def answer(item: dict[str, Any] | StepRequest) -> EnvironmentReply:
        if isinstance(item, StepRequest):
            environment: Environment = pickle.loads(base64.b64decode(item.state))
            result = environment.step(item.text)
        else:
            environment = make(item, **args)
            text = environment.reset()
            if not isinstance(text, str | list):
                raise TypeError(f"reset of {function} returned {text!r}, expected text")
            result = StepResult(text, 0.0, False)
        result = checked(result, function)
        state = b"" if result.done else pickle.dumps(environment)
        return EnvironmentReply(base64.b64encode(state).decode(), result)

    return answer


def trial_problems(config: EnvironmentConfig, example: dict[str, Any]) -> list[Problem]:
    """Try a user's environment on a row of the data, in another process; return the problems."""
    what = "its trial on the first row of the data"
    check = f"{__name__}.try_environment"
    return try_out(KEY, config.function, what, check, config.args, example)


def try_environment(
    key: str, path: str, args: dict[str, Any], example: dict[str, Any]
) -> list[str]:
    """Begin a conversation, and answer the reference answer and an empty turn; raise as it does."""
    answer = environment_task(path, args)
    begun = answer(example)
    for text in (str(example.get("answer") or ""), ""):
        answer(StepRequest(begun.state, text))
    return []


def read_reply(value: Any, function: str) -> EnvironmentReply:
    """Parse an EnvironmentReply from JSON; raise a TypeError or ValueError if it is none."""
    match value:
        case [str() as state, [text, reward, done], None, ""]:
            text = visible(text) if isinstance(text, str) else text
            result = checked(StepResult(text, reward, done), function)
            return EnvironmentReply(state, result)
    raise ValueError("not an answer of an environment")


def checked(result: Any, function: str) -> StepResult:
    """Check the result of `reset` or `step`.

    Raises:
        TypeError: it is not a StepResult, or text or done has the wrong type.
        WrongScore: the reward is no number, NaN, infinite or too large.
    """
    match result:
        case StepResult(text=str() | list(), done=bool()):
            reward = finite_number(result.reward, f"{function}, as a reward,")
            return result._replace(reward=reward)
    raise TypeError(
        f"{function} returned {result!r}, expected a StepResult of text, a number and a bool"
    )


def resolve_environment(dotted: str) -> Callable[..., Environment]:
    """Return the class or function that a path names, which creates environments.

    Raises:
        ConfigError: it does not exist or cannot be called, or a class lacks reset or step.
    """
    make = locate(KEY, dotted)
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


TASK = "hybridrl.environments.base.environment_task"


class EnvironmentPool(TaskPool):
    """Pool of processes that run environments.

    Args:
        function: dotted path of the class or function that creates environments.
        args: its keyword arguments.
        timeout_s: maximum wall seconds of one answer.
        num_processes: as in `TaskPool`.
    """

    def __init__(
        self, function: str, args: dict[str, Any], *, timeout_s: float, num_processes: int | None
    ) -> None:
        resolve_environment(function)
        read = partial(read_reply, function=function)
        super().__init__(Setup(TASK, function, args, timeout_s), num_processes, "environment", read)

    def open(self, examples: Sequence[dict[str, Any]]) -> list[EnvironmentReply]:
        """Create an environment for each example; return the initial replies."""
        return self._replies(examples)

    def step(self, turns: Sequence[StepRequest]) -> list[EnvironmentReply]:
        """Answer one turn of each of several conversations, in order."""
        return self._replies(turns)

    def _replies(self, items: Sequence[Any]) -> list[EnvironmentReply]:
        ended = StepResult("", 0.0, True)
        return [
            EnvironmentReply("", ended, reply.kind, reply.reason)
            if isinstance(reply, Failure)
            else reply
            for reply in self.run(items)
        ]
