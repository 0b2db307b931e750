"""Rendered and tokenised prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from hybridrl.config.choices import TooLongPrompts
from hybridrl.config.data_schema import DataConfig
from hybridrl.data.sources.problem_sets import ProblemSets
from hybridrl.data.sources.rows import Message, SourceProblem, first_faults
from hybridrl.data.sources.tokenizer import Renderer


@dataclass(frozen=True)
class Prompt:
    """Rendered and tokenised problem.

    Attributes:
        prompt_id: unique over training and held-out prompts, stable over the run.
        token_ids: of the rendered prompt; at most rollout.max_prompt_tokens.
        text: the rendered prompt.
        question: the problem without template, for display.
        example: the row with `answer`, and with `dataset` in a mixture; argument of rewards.
        tags: groups whose accuracy is reported separately, such as {"range": "unseen"}.
        dataset: its name in data.mixture; empty without a mixture.
        difficulty: larger is harder; 0 without a curriculum.
        where: `file:line` or similar, for messages.
    """

    prompt_id: int
    token_ids: list[int]
    text: str
    question: str
    example: dict[str, Any]
    tags: dict[str, str]
    dataset: str = ""
    difficulty: float = 0.0
    where: str = ""


def prompts_of(
    sets: ProblemSets, problems: Sequence[SourceProblem], renderer: Renderer, first_id: int
) -> tuple[list[Prompt], list[str]]:
    """Render and tokenise problems of a data set; return prompts and messages for a ConfigError.

    Ids are consecutive from `first_id`.
    """
    # jinja2 is optional: only chat templates need it.
    from jinja2 import TemplateError

    texts, refused = [], []
    for problem in problems:
        try:
            messages = with_examples(_messages(problem, sets.config.system_prompt), sets.examples)
            texts.append(renderer.render(messages))
        except TemplateError as error:
            refused.append(f"{problem.where}: {error}")
    if refused:
        count = len(refused)
        return [], [
            f"the model's chat template refuses {count} prompt{'s' if count != 1 else ''}.\n"
            f"{first_faults(refused)}\n"
            "Correct these messages. If the template has no system role, set "
            "data.system_prompt=null."
        ]
    ids = renderer.encode(texts)
    return [
        Prompt(
            first_id + index,
            tokens,
            text,
            problem.question,
            problem.example,
            problem.tags,
            sets.name,
            problem.difficulty,
            problem.where,
        )
        for index, (problem, text, tokens) in enumerate(zip(problems, texts, ids, strict=True))
    ], []


def unused_system_prompt(config: DataConfig, problems: Sequence[SourceProblem]) -> list[str]:
    """Report a system prompt that none of the problems uses."""
    if config.system_prompt is None or any(isinstance(p.prompt, str) for p in problems):
        return []
    return [
        f"data.system_prompt = {config.system_prompt!r} has no effect: data.prompt_key = "
        f"{config.prompt_key} holds lists of chat messages, which are read as they are.\n"
        "Set data.system_prompt=null, or put it into the messages."
    ]


def too_long(prompts: Sequence[Prompt], config: DataConfig, limit: int) -> list[str]:
    """Report prompts of more than `limit` tokens, unless data.too_long_prompts = drop."""
    longer = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
    if not longer or config.too_long_prompts is TooLongPrompts.drop:
        return []
    listed = first_faults([f"{p.where}: {len(p.token_ids)} tokens" for p in longer])
    longest = max(len(prompt.token_ids) for prompt in longer)
    examples = f" with the {config.few_shot} examples of data.few_shot" if config.few_shot else ""
    return [
        f"rollout.max_prompt_tokens = {limit}, but {len(longer)} of {len(prompts)} prompts "
        f"are longer{examples}.\n{listed}\n"
        f"Set rollout.max_prompt_tokens={longest}, or drop these prompts: "
        "data.too_long_prompts=drop"
    ]


def _messages(problem: SourceProblem, system_prompt: str | None) -> list[Message]:
    """Return a question as messages; a list of messages is returned unchanged."""
    if not isinstance(problem.prompt, str):
        return problem.prompt
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": problem.prompt}]


def with_examples(messages: list[Message], examples: Sequence[SourceProblem]) -> list[Message]:
    """Insert few-shot examples as earlier turns after the system messages."""
    first = len(_system(messages))
    turns = [turn for example in examples for turn in _turns(example)]
    return [*messages[:first], *turns, *messages[first:]]


def _turns(example: SourceProblem) -> list[Message]:
    """Return a solved problem as a user turn and an assistant turn."""
    solution = {"role": "assistant", "content": example.solution or example.answer}
    asked = _messages(example, None)
    return [*asked[len(_system(asked)) :], solution]


def _system(messages: list[Message]) -> list[Message]:
    """Return the system messages at the beginning."""
    return list(takewhile(lambda message: message["role"] == "system", messages))
