"""Problems as tokenised prompts."""

import logging
from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import DataConfig, TooLongPrompts
from hybridrl.data.files import Message, SourceProblem, some_of
from hybridrl.data.problem_sets import load_problem_sets
from hybridrl.data.tokenizer import Renderer, load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One problem as the model reads it.

    Attributes:
        prompt_id: stable over the run, and no held-out problem has a training problem's.
        token_ids: the rendered prompt; at most rollout.max_prompt_tokens.
        text: the rendered prompt.
        question: the problem alone, as people read it.
        example: the whole row, with `answer`; what a reward function gets.
        tags: names of groups whose accuracy is reported apart, such as {"range": "unseen"}.
        dataset: its name in data.mixture; empty without one.
        difficulty: larger is harder; 0 without a curriculum.
    """

    prompt_id: int
    token_ids: list[int]
    text: str
    question: str
    example: dict[str, Any]
    tags: dict[str, str]
    dataset: str = ""
    difficulty: float = 0.0


@dataclass(frozen=True)
class PromptSets:
    """A run's prompts.

    Attributes:
        train, held_out: only the first are trained on.
        source: where the problems come from, in a few words.
        num_dropped: prompts left out because they are too long.
        notes: what the user should know of how problems were split or left out.
    """

    train: list[Prompt]
    held_out: list[Prompt]
    source: str
    num_dropped: int = 0
    notes: list[str] = field(default_factory=list)


def load_prompts(config: DataConfig, model_path: str, max_prompt_tokens: int) -> PromptSets:
    """Read, render and tokenise a run's problems.

    Args:
        config: what to read, and how.
        model_path: as in model.path; its tokenizer and chat template are used.
        max_prompt_tokens: longest prompt allowed, in tokens.

    Raises:
        ConfigError: whatever is wrong with files, rows, model path and lengths, in one report.
    """
    sets = load_problem_sets(config)
    renderer = Renderer(load_tokenizer(model_path))
    train, train_faults = _prompts(sets.train, config, renderer, first_id=0)
    held_out, faults = _prompts(sets.held_out, config, renderer, first_id=len(sets.train))
    faults = [*train_faults, *faults, *_unused_system_prompt(config, sets.train + sets.held_out)]
    if faults:
        raise ConfigError(*faults)
    kept_train = _within(train, sets.train, config, max_prompt_tokens, faults)
    kept_held_out = _within(held_out, sets.held_out, config, max_prompt_tokens, faults)
    if not faults:
        faults += _too_few(config, kept_train, kept_held_out, max_prompt_tokens)
    if faults:
        raise ConfigError(*faults)
    dropped = len(train) + len(held_out) - len(kept_train) - len(kept_held_out)
    notes = list(sets.notes)
    if dropped:
        notes.append(f"{dropped:,} prompts longer than {max_prompt_tokens} tokens are left out")
    for note in notes:
        log.info("%s", note)
    return PromptSets(kept_train, kept_held_out, sets.source, dropped, notes)


def examine_prompts(
    config: DataConfig, model_path: str, max_prompt_tokens: int
) -> tuple[PromptSets | None, list[str]]:
    """A run's prompts, or what is wrong with its data, as texts for a ConfigError."""
    try:
        return load_prompts(config, model_path, max_prompt_tokens), []
    except ConfigError as error:
        return None, error.problems


def _prompts(
    problems: list[SourceProblem], config: DataConfig, renderer: Renderer, *, first_id: int
) -> tuple[list[Prompt], list[str]]:
    """Problems rendered and tokenised, and the refusals of the chat template."""
    # transformers needs jinja2 for templates; runs that never render do without.
    from jinja2 import TemplateError

    texts, refused = [], []
    for problem in problems:
        try:
            texts.append(renderer.render(_messages(problem, config.system_prompt)))
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
        Prompt(first_id + index, tokens, text, problem.question, problem.example, problem.tags)
        for index, (problem, text, tokens) in enumerate(zip(problems, texts, ids, strict=True))
    ], []


def _messages(problem: SourceProblem, system_prompt: str | None) -> list[Message]:
    """A question as messages; a list of messages as it is."""
    if not isinstance(problem.prompt, str):
        return problem.prompt
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": problem.prompt}]


def _unused_system_prompt(config: DataConfig, problems: list[SourceProblem]) -> list[str]:
    if config.system_prompt is None or any(isinstance(p.prompt, str) for p in problems):
        return []
    return [
        f"data.system_prompt = {config.system_prompt!r} has no effect: data.prompt_key = "
        f"{config.prompt_key} holds lists of chat messages, which are read as they are.\n"
        "Set data.system_prompt=null, or put it into the messages."
    ]


def _within(
    prompts: list[Prompt],
    problems: list[SourceProblem],
    config: DataConfig,
    limit: int,
    faults: list[str],
) -> list[Prompt]:
    """The prompts that are not too long; where these are errors, they are added to `faults`."""
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
    if len(kept) < len(prompts) and config.too_long_prompts is TooLongPrompts.error:
        lengths = [
            (problem.where, len(prompt.token_ids))
            for problem, prompt in zip(problems, prompts, strict=True)
            if len(prompt.token_ids) > limit
        ]
        listed = some_of([f"{where}: {length} tokens" for where, length in lengths])
        longest = max(length for _, length in lengths)
        faults.append(
            f"rollout.max_prompt_tokens = {limit}, but {len(lengths)} of {len(prompts)} prompts "
            f"are longer.\n{listed}\n"
            f"Set rollout.max_prompt_tokens={longest}, or leave them out: "
            "data.too_long_prompts=drop"
        )
    return kept


def _too_few(
    config: DataConfig, train: list[Prompt], held_out: list[Prompt], limit: int
) -> list[str]:
    """What dropping too long prompts has left, where that is not enough."""
    faults = []
    if len(train) < config.prompts_per_step:
        faults.append(
            f"data.too_long_prompts = drop leaves {len(train)} training prompts of at most "
            f"rollout.max_prompt_tokens = {limit} tokens, fewer than data.prompts_per_step = "
            f"{config.prompts_per_step}.\nRaise rollout.max_prompt_tokens."
        )
    if not held_out:
        faults.append(
            "data.too_long_prompts = drop leaves no held-out prompt of at most "
            f"rollout.max_prompt_tokens = {limit} tokens.\nRaise rollout.max_prompt_tokens."
        )
    return faults
