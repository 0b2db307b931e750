"""Problems as tokenised prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config.choices import TooLongPrompts
from hybridrl.config.data_schema import DataConfig
from hybridrl.data.sources.few_shot import with_examples
from hybridrl.data.sources.rows import Message, SourceProblem, some_of
from hybridrl.data.sources.tokenizer import Renderer


@dataclass(frozen=True)
class Prompt:
    """One problem as the model reads it.

    Attributes:
        prompt_id: stable over the run, and no held-out problem has a training problem's.
        token_ids: the rendered prompt; at most rollout.max_prompt_tokens.
        text: the rendered prompt.
        question: the problem alone, as people read it.
        example: the whole row, with `answer`, in a mixture with `dataset`; what a reward function
            gets.
        tags: names of groups whose accuracy is reported apart, such as {"range": "unseen"}.
        dataset: its name in data.mixture; empty without one.
        difficulty: larger is harder; 0 without a curriculum.
        where: the problem's `file:line` or the like, for messages.
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
    """Problems rendered and tokenised, and the refusals of the chat template.

    Args:
        problems: of one data set.
        examples: shown before each of them.
        config: of the data set.
        renderer: of the model.
        dataset: its name.
        first_id: of the prompts, which are numbered from there.
    """
    # transformers needs jinja2 for templates; runs that never render do without.
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
            f"{some_of(refused)}\n"
            "Mend these messages; some templates take no system message "
            "(data.system_prompt=null)."
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
    """What is wrong with a system prompt that none of the problems takes."""
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
    """What is wrong with prompts of more than `limit` tokens, unless they are to be dropped."""
    lengths = [
        (problem.where, len(prompt.token_ids))
        for problem, prompt in zip(problems, prompts, strict=True)
        if len(prompt.token_ids) > limit
    ]
    if not lengths or config.too_long_prompts is TooLongPrompts.drop:
        return []
    listed = some_of([f"{where}: {length} tokens" for where, length in lengths])
    longest = max(length for _, length in lengths)
    examples = f" with the {config.few_shot} examples of data.few_shot" if config.few_shot else ""
    return [
        f"rollout.max_prompt_tokens = {limit}, but {len(lengths)} of {len(prompts)} prompts "
        f"are longer{examples}.\n{listed}\n"
        f"Set rollout.max_prompt_tokens={longest}, or leave them out: "
        "data.too_long_prompts=drop"
    ]


def _messages(problem: SourceProblem, system_prompt: str | None) -> list[Message]:
    """A question as messages; a list of messages as it is."""
    if not isinstance(problem.prompt, str):
        return problem.prompt
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": problem.prompt}]
