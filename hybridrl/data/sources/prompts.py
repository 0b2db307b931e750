"""Prompts of a run: problems rendered by the chat template, tokenised and counted."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError

from hybridrl.config.choices import TooLongPrompts
from hybridrl.config.data_schema import DataConfig
from hybridrl.config.errors import ConfigError
from hybridrl.data.sources.answers import AnswerTokens
from hybridrl.data.sources.problem_sets import (
    ProblemSets,
    left_out_text,
    load_problem_sets,
    too_few,
)
from hybridrl.data.sources.rows import Message, SourceProblem, first_faults
from hybridrl.data.sources.tokenizer import Renderer, load_tokenizer

log = logging.getLogger(__name__)

# Share of unknown tokens that causes a warning.
MAX_UNKNOWN_SHARE = 0.01


@dataclass(frozen=True)
class Prompt:
    """Rendered and tokenised problem.

    Attributes:
        prompt_id: unique over training and held-out prompts, stable over the run.
        token_ids: of the rendered prompt; at most rollout.max_prompt_tokens.
        text: the rendered prompt.
        question: the problem without template, for display.
        example: the row with `answer` and `dataset`, its data set's name; argument of rewards.
        tags: groups whose accuracy is reported separately, such as {"range": "unseen"}.
        dataset: its name in data.mixture; empty without a mixture.
        difficulty: larger is harder; 0 without a curriculum.
        where: `file:line` or similar, for messages.
        answer_ids: token ids of the reference answer with its end token; empty unless asked for.
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
    answer_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class DataSetSummary:
    """Origin and prompt counts of one data set of a run.

    Attributes:
        name: in data.mixture; empty without a mixture.
        source: description of its origin, for the user.
        share: of the prompts drawn in training, in (0, 1].
        train, held_out: number of prompts used.
        left_out, held_out_left_out: number of prompts left out, by reason.
    """

    name: str
    source: str
    share: float
    train: int
    held_out: int
    left_out: dict[str, int] = field(default_factory=dict)
    held_out_left_out: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptSets:
    """Prompts of a run.

    Attributes:
        train, held_out: prompts of all data sets.
        data_sets: summary of each data set.
        notes: remarks on splits and left-out problems, for the user.
        template: origin of the chat template, for the user.
    """

    train: list[Prompt]
    held_out: list[Prompt]
    data_sets: list[DataSetSummary]
    notes: list[str] = field(default_factory=list)
    template: str = ""


def load_prompts(
    config: DataConfig,
    model_path: str,
    max_prompt_tokens: int,
    max_answer_tokens: int | None = None,
) -> PromptSets:
    """Read, filter, render and tokenise a run's problems, with the model's chat template.

    With `max_answer_tokens`, the limit in training, also their reference answers.

    Raises:
        ConfigError: files, rows, model path or lengths are wrong; lists all problems of a stage.
    """
    sets = load_problem_sets(config, with_solutions=max_answer_tokens is not None)
    renderer = Renderer(load_tokenizer(model_path))
    answers = None if max_answer_tokens is None else AnswerTokens(model_path)
    train, held_out = _rendered(config, sets, renderer, answers)
    summaries: list[DataSetSummary] = []
    faults: list[str] = []
    if max_answer_tokens is not None:
        faults += too_long_answers(train, config, max_answer_tokens)
        train = _with_short_answers(train, sets, max_answer_tokens)
    for one in sets.values():
        halves = [[p for p in half if p.dataset == one.name] for half in (train, held_out)]
        summaries.append(_summary(one, halves, max_prompt_tokens))
        faults += [text for half in halves for text in too_long(half, config, max_prompt_tokens)]
        warn_of_unknown_tokens([*halves[0], *halves[1]], renderer, model_path)
    if not faults:
        faults = [
            text for one in summaries for text in _too_few(one, sets[one.name], max_prompt_tokens)
        ]
    if faults:
        raise ConfigError(*faults)
    notes = [text for each in summaries for text in _notes(each, sets[each.name])]
    for note in notes:
        log.info("%s", note)
    train, held_out = (
        [prompt for prompt in half if len(prompt.token_ids) <= max_prompt_tokens]
        for half in (train, held_out)
    )
    return PromptSets(train, held_out, summaries, notes, renderer.description)


def examine_prompts(
    config: DataConfig,
    model_path: str,
    max_prompt_tokens: int,
    max_answer_tokens: int | None = None,
) -> tuple[PromptSets | None, list[str]]:
    """Return a run's prompts, or None and messages for a ConfigError."""
    try:
        return load_prompts(config, model_path, max_prompt_tokens, max_answer_tokens), []
    except ConfigError as error:
        return None, error.problems


def _rendered(
    config: DataConfig,
    sets: dict[str, ProblemSets],
    renderer: Renderer,
    answers: AnswerTokens | None,
) -> tuple[list[Prompt], list[Prompt]]:
    """Render training and held-out prompts, of all data sets, with consecutive ids.

    Raises:
        ConfigError: the chat template raises, or a system prompt has no effect.
    """
    faults = _unused_system_prompts(config, sets)
    halves: tuple[list[Prompt], list[Prompt]] = [], []
    next_id = 0
    for index, half in enumerate(halves):
        for each in sets.values():
            problems = (each.train, each.held_out)[index]
            prompts, refused = prompts_of(each, problems, renderer, next_id, answers)
            next_id += len(problems)
            half += prompts
            faults += map(each.with_own_keys, refused)
    if faults:
        raise ConfigError(*faults)
    return halves


def _unused_system_prompts(config: DataConfig, sets: dict[str, ProblemSets]) -> list[str]:
    """Report system prompts that no problem uses: a data set's own, or the shared one."""
    sharing: dict[str, list[SourceProblem]] = {}
    for name, each in sets.items():
        has_own = name and config.mixture[name].system_prompt is not None
        sharing.setdefault(name if has_own else "", []).extend(each.train + each.held_out)
    faults: list[str] = []
    for name, problems in sharing.items():
        used = sets[name].config if name else config
        if used.system_prompt is None or any(isinstance(p.prompt, str) for p in problems):
            continue
        text = (
            f"data.system_prompt = {used.system_prompt!r} has no effect: data.prompt_key = "
            f"{used.prompt_key} holds lists of chat messages, which are read as they are.\n"
            "Set data.system_prompt=null, or put it into the messages."
        )
        faults.append(sets[name].with_own_keys(text) if name else text)
    return faults


def _summary(sets: ProblemSets, halves: list[list[Prompt]], limit: int) -> DataSetSummary:
    """Count a data set's training and held-out prompts, without those longer than `limit`."""
    longer, longer_held_out = (
        sum(len(prompt.token_ids) > limit for prompt in half) for half in halves
    )
    reason = f"longer than {limit} tokens"
    sets.left_out[reason] = longer
    return DataSetSummary(
        name=sets.name,
        source=sets.source,
        share=sets.share,
        train=len(halves[0]) - longer,
        held_out=len(halves[1]) - longer_held_out,
        left_out=sets.left_out,
        held_out_left_out={reason: longer_held_out},
    )


def _too_few(summary: DataSetSummary, sets: ProblemSets, limit: int) -> list[str]:
    """Check that enough prompts are left after dropping too long ones."""
    faults = too_few(sets, summary.train)
    if not summary.held_out:
        of_set = f" of data.mixture.{sets.name}" if sets.name else ""
        faults.append(
            f"data.too_long_prompts = drop leaves no held-out prompt{of_set} of at most "
            f"rollout.max_prompt_tokens = {limit} tokens.\nRaise rollout.max_prompt_tokens."
        )
    return faults


def _notes(summary: DataSetSummary, sets: ProblemSets) -> list[str]:
    """Return remarks on a data set's split and left-out problems."""
    halves = {"training": summary.left_out, "held-out": summary.held_out_left_out}
    reasons = {half: left_out_text(left_out) for half, left_out in halves.items()}
    notes = [sets.with_own_keys(note) for note in sets.notes]
    notes += [f"{half} problems left out: {text}" for half, text in reasons.items() if text]
    return [f"{sets.name}: {note}" if sets.name else note for note in notes]


def prompts_of(
    sets: ProblemSets,
    problems: Sequence[SourceProblem],
    renderer: Renderer,
    first_id: int,
    answers: AnswerTokens | None = None,
) -> tuple[list[Prompt], list[str]]:
    """Render and tokenise problems of a data set; return prompts and messages for a ConfigError.

    Ids are consecutive from `first_id`. With `answers` prompts have their reference answers.
    """
    texts, turns, refused = [], [], []
    for problem in problems:
        try:
            messages = with_examples(_messages(problem, sets.config.system_prompt), sets.examples)
            texts.append(renderer.render(messages))
            if answers is not None:
                reference = problem.solution or problem.answer
                turns.append(answers.turn(messages, texts[-1], reference))
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
    answer_ids = [[] for _ in texts] if answers is None else answers.encode(turns)
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
            answer,
        )
        for index, (problem, text, tokens, answer) in enumerate(
            zip(problems, texts, ids, answer_ids, strict=True)
        )
    ], []


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


def warn_of_unknown_tokens(prompts: Sequence[Prompt], renderer: Renderer, model_path: str) -> None:
    """Warn if more than MAX_UNKNOWN_SHARE of the prompts' tokens are unknown to the tokenizer."""
    unknown = [prompt.token_ids.count(renderer.unknown_id) for prompt in prompts]
    share = sum(unknown) / max(1, sum(len(prompt.token_ids) for prompt in prompts))
    if share > MAX_UNKNOWN_SHARE:
        worst = prompts[unknown.index(max(unknown))]
        log.warning(
            "%.1f %% of the prompts' tokens are unknown to the tokenizer of model.path = %s, for "
            "example %s in %s: the model cannot read this text.\nUse a model whose tokenizer knows "
            "it (most work on bytes and know all), or other data.",
            100 * share,
            model_path,
            " ".join(renderer.unknown_texts(worst.text)),
            worst.where,
        )


def too_long_answers(prompts: Sequence[Prompt], config: DataConfig, limit: int) -> list[str]:
    """Report reference answers of more than `limit` tokens, unless they are dropped."""
    longer = [prompt for prompt in prompts if len(prompt.answer_ids) > limit]
    if not longer or config.too_long_prompts is TooLongPrompts.drop:
        return []
    listed = first_faults([f"{p.where}: {len(p.answer_ids)} tokens" for p in longer])
    return [
        f"rollout.max_response_tokens = {limit}, but {len(longer)} of {len(prompts)} reference "
        f"answers are longer.\n{listed}\n"
        f"Set rollout.max_response_tokens={max(len(p.answer_ids) for p in longer)}, or drop these "
        "problems: data.too_long_prompts=drop"
    ]


def _with_short_answers(
    prompts: list[Prompt], sets: dict[str, ProblemSets], limit: int
) -> list[Prompt]:
    """Return the prompts with answers of at most `limit` tokens; count the others."""
    kept = [prompt for prompt in prompts if len(prompt.answer_ids) <= limit]
    for name, each in sets.items():
        before, after = (sum(p.dataset == name for p in half) for half in (prompts, kept))
        each.left_out[f"with an answer longer than {limit} tokens"] = before - after
    return kept


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
