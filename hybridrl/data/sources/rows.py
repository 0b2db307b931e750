"""Problems from the rows of a source, with columns mapped by name and faults with their place."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.data.sources.images import Slots, with_images, without_bytes
from hybridrl.data.sources.values import (
    ABSENT,
    answer_of,
    column_names,
    kind_of,
    label_of,
    look_up,
    number_of,
    value_of,
)

# Column of images without data.images_key, which rows may lack.
IMAGES = "images"
# One chat message has at least these two texts.
Message = dict[str, str]

MAX_FAULTS_SHOWN = 3


@dataclass(frozen=True)
class Problem:
    """Problem of a data set, before rendering.

    Attributes:
        prompt: the question, or a list of chat messages.
        answer: the solution or final answer; empty if the data has none.
        example: the row with such an `answer` as mapped; argument of reward functions.
        tags: groups whose accuracy is reported separately, such as {"range": "unseen"}.
        where: `file:line` or similar, for messages.
        solution: worked solution for few-shot examples; empty without such a column.
        difficulty: larger is harder; 0 without such a column.
        rejected: of a preference pair the worse response, `solution` being the better one.
        is_desired: label of the response `solution`; None without such a column.
    """

    prompt: str | list[Message]
    answer: str
    example: dict[str, Any]
    tags: dict[str, str]
    where: str
    solution: str = ""
    difficulty: float = 0.0
    rejected: str = ""
    is_desired: bool | None = None

    @property
    def question(self) -> str:
        """The question, or the last user message of a chat."""
        if isinstance(self.prompt, str):
            return self.prompt
        asked = [message["content"] for message in self.prompt if message["role"] == "user"]
        return asked[-1] if asked else self.prompt[-1]["content"]

    @property
    def reference(self) -> str:
        """The worked solution if there is one, else the answer."""
        return self.solution or self.answer

    def messages(self, system_prompt: str | None) -> list[Message]:
        """Return a question as messages; a list of messages is returned unchanged."""
        if not isinstance(self.prompt, str):
            return self.prompt
        system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        return [*system, {"role": "user", "content": self.prompt}]


def with_examples(messages: list[Message], examples: Sequence[Problem]) -> list[Message]:
    """Insert few-shot examples as earlier turns after the system messages."""
    system = list(takewhile(_is_system, messages))
    turns: list[Message] = []
    for example in examples:
        solved = {"role": "assistant", "content": example.reference}
        turns += [*dropwhile(_is_system, example.messages(None)), solved]
    return [*system, *turns, *messages[len(system) :]]


def _is_system(message: Message) -> bool:
    return message["role"] == "system"


class Columns(NamedTuple):
    """Column names by config key; a dot selects a field of a struct."""

    prompt_key: str
    answer_key: str | None
    solution_key: str | None = None
    curriculum: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    label_key: str | None = None
    images_key: str | None = None


class Row(NamedTuple):
    """Columns of one row, and its place in the source."""

    where: str
    values: dict[str, Any]


def problems_of(
    key: str, source: Path | str, rows: list[Row], unreadable: Sequence[str], columns: Columns
) -> tuple[list[Problem], list[str]]:
    """Convert rows to problems; return them and messages, which list `unreadable` rows, too."""
    if missing := _missing_columns(key, source, rows, columns):
        return [], missing
    folder = source.parent if isinstance(source, Path) else Path()

    def read(row: Row) -> Problem | str:
        try:
            return _problem(row, columns, folder)
        except ValueError as fault:
            return f"{row.where}: {fault}"

    with ThreadPoolExecutor() as pool:  # images are decoded beside each other
        sees = columns.images_key and any(columns.images_key in row.values for row in rows)
        tried = [*(pool.map if sees else map)(read, rows)]
    problems = [problem for problem in tried if isinstance(problem, Problem)]
    faults = [*unreadable, *(fault for fault in tried if isinstance(fault, str))]
    if not faults:
        return problems, []
    return problems, [
        f"{key} = {source}: {len(faults)} row{'s' if len(faults) != 1 else ''} cannot be used.\n"
        f"{first_faults(faults)}\n"
        f"A row needs text or chat messages in `{columns.prompt_key}`"
        + (f", text or a number in `{columns.answer_key}`" if columns.answer_key else "")
        + (f", text or a number in `{columns.solution_key}`" if columns.solution_key else "")
        + (f", a number in `{columns.curriculum}`" if columns.curriculum else "")
        + "".join(
            f", text or messages that end with the assistant's in `{column}`"
            for column in (columns.chosen_key, columns.rejected_key)
            if column
        )
        + (f", true or false in `{columns.label_key}`" if columns.label_key else "")
        + "."
        + " data.images_key=null reads no images." * any(": image " in fault for fault in faults)
    ]


def first_faults(faults: Sequence[str]) -> str:
    """Return the first faults, one a line, and the number of the others."""
    shown = list(faults[:MAX_FAULTS_SHOWN])
    if len(faults) > MAX_FAULTS_SHOWN:
        shown.append(f"... and {len(faults) - MAX_FAULTS_SHOWN} more")
    return "\n".join(shown)


def _missing_columns(key: str, source: Path | str, rows: list[Row], columns: Columns) -> list[str]:
    """Return a message for each mapped column that no row of the source has."""
    return [
        f"data.{name} = {column}: {source} (from {key}) has no such column.\n"
        f"Its columns: {', '.join(column_names(rows[0].values))}. Set data.{name} to one of them."
        + " If the rows have no answers, set data.answer_key=null."
        * (name == "answer_key")
        for name, column in columns._asdict().items()
        if column and rows and all(look_up(row.values, column) is ABSENT for row in rows)
        if name != "prompt_key" or not _has_prompt(rows[0].values, columns.chosen_key)
        if (name, column) != ("images_key", IMAGES)
    ]


def _has_prompt(values: dict[str, Any], column: str | None) -> bool:
    """Return whether a column of responses holds a list with the prompt's messages as well."""
    value = None if column is None else look_up(values, column)
    return isinstance(value, list) and len(value) > 1


def _problem(row: Row, columns: Columns, folder: Path) -> Problem:
    """Convert one row; raise a ValueError if a value is missing, empty or of a wrong type."""
    values, difficulty = row.values, columns.curriculum
    text, solution, rejected = _responses_of(values, columns)
    images = look_up(values, columns.images_key) if columns.images_key else ABSENT
    prompt = with_images(text, images, folder)
    if prompt is not text:
        values = without_bytes(values)
    answer = "" if columns.answer_key is None else answer_of(values, columns.answer_key)
    tags = values["tags"] if isinstance(values.get("tags"), dict) else {}
    return Problem(
        prompt,
        answer,
        values | ({"answer": answer} if answer else {}),
        {name: str(value) for name, value in tags.items() if value is not None},
        row.where,
        solution,
        0.0 if difficulty is None else number_of(values, difficulty),
        rejected,
        None if columns.label_key is None else label_of(values, columns.label_key),
    )


def _responses_of(values: dict[str, Any], columns: Columns) -> tuple[str | list[Message], str, str]:
    """Return the prompt, which responses may contain, the solution or better response, the worse.

    Texts are empty without a column.
    """
    if columns.chosen_key is None:
        solution = columns.solution_key
        prompt = _prompt_of(values, columns.prompt_key)
        return prompt, "" if solution is None else answer_of(values, solution), ""
    before, better = _response_of(values, columns.chosen_key)
    worse = ""
    if columns.rejected_key is not None:
        before_worse, worse = _response_of(values, columns.rejected_key)
        named = f"`{columns.chosen_key}` and `{columns.rejected_key}`"
        if before != before_worse:
            raise ValueError(f"{named} have different messages before their last ones")
        if better == worse:
            raise ValueError(f"{named} are equal")
    return before or _prompt_of(values, columns.prompt_key), better, worse


def _response_of(values: dict[str, Any], column: str) -> tuple[list[Message], str]:
    """Return the messages of the prompt that a column of responses contains, and the response."""
    value = _prompt_of(values, column)
    if isinstance(value, str):
        return [], value
    *before, last = value
    if isinstance(last["content"], Slots) and last["content"].given:
        raise ValueError(f"the last message of `{column}` has an image")
    if last["role"] != "assistant" or not last["content"].strip():
        kind = f"from the {last['role']}" if last["content"].strip() else "empty"
        raise ValueError(f"the last message of `{column}` is {kind}")
    if before and before[0]["role"] == "assistant":
        raise ValueError(f"`{column}` has messages of the assistant before the last, but no prompt")
    return before, last["content"]


def _prompt_of(values: dict[str, Any], column: str) -> str | list[Message]:
    value = value_of(values, column)
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"`{column}` is {kind_of(value)}")
    if not all(map(_is_message, value)):
        raise ValueError(f"`{column}` is a list, but not of messages with texts `role`, `content`")
    return [*map(_message, value)]


def _message(given: dict[str, Any]) -> Message:
    message = {name: text for name, text in given.items() if text is not None}
    if isinstance(parts := message["content"], list):
        message["content"] = Slots.of_parts(parts)
    return message


def _is_message(value: Any) -> bool:
    kinds = {"role": str, "content": str | list}
    return isinstance(value, dict) and all(isinstance(value.get(n), k) for n, k in kinds.items())
