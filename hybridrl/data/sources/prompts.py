"""Rendered and tokenised prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config.choices import TooLongPrompts
from hybridrl.config.data_schema import DataConfig
from hybridrl.data.sources.few_shot import with_examples
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
    problems: Sequence[SourceProblem],
    examples: Sequence[SourceProblem],
    config: DataConfig,
    renderer: Renderer,
    *,
    dataset: str,
    first_id: int,
) -> tuple[list[Prompt], list[str]]:
    """Render and tokenise problems; return prompts and messages for a ConfigError.

    Args:
        problems: of one data set.
        examples: few-shot examples.
        config: of the data set.
        renderer: of the model.
        dataset: name of the data set.
        first_id: id of the first prompt; ids are consecutive.
    """
    # jinja2 is optional: only chat templates need it.
    from jinja2 import TemplateError

    texts, refused = [], []
    for problem in problems:
        try:
            messages = with_examples(_messages(problem, config.system_prompt), examples)
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
            dataset,
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


def too_long(
    prompts: Sequence[Prompt], problems: Sequence[SourceProblem], config: DataConfig, limit: int
) -> list[str]:
    """Report prompts of more than `limit` tokens, unless data.too_long_prompts = drop."""
    lengths = [
        (problem.where, len(prompt.token_ids))
        for problem, prompt in zip(problems, prompts, strict=True)
        if len(prompt.token_ids) > limit
    ]
    if not lengths or config.too_long_prompts is TooLongPrompts.drop:
        return []
    listed = first_faults([f"{where}: {length} tokens" for where, length in lengths])
    longest = max(length for _, length in lengths)
    examples = f" with the {config.few_shot} examples of data.few_shot" if config.few_shot else ""
    return [
        f"rollout.max_prompt_tokens = {limit}, but {len(lengths)} of {len(prompts)} prompts "
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
