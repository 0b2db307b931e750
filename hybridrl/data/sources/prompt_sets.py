"""Prompts of a run: read, filter, render and count its data sets."""

import logging
from dataclasses import dataclass, field

from hybridrl.config.data_schema import DataConfig
from hybridrl.config.errors import ConfigError
from hybridrl.data.sources.problem_sets import (
    ProblemSets,
    left_out_text,
    load_problem_sets,
    too_few,
    weights_of,
)
from hybridrl.data.sources.prompt_source import PromptSource
from hybridrl.data.sources.prompts import Prompt, prompts_of, too_long, unused_system_prompt
from hybridrl.data.sources.rows import SourceProblem
from hybridrl.data.sources.tokenizer import Renderer, load_tokenizer

log = logging.getLogger(__name__)


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
    """

    train: list[Prompt]
    held_out: list[Prompt]
    data_sets: list[DataSetSummary]
    notes: list[str] = field(default_factory=list)


def load_prompts(config: DataConfig, model_path: str, max_prompt_tokens: int) -> PromptSets:
    """Read, filter, render and tokenise a run's problems, with the model's chat template.

    Raises:
        ConfigError: files, rows, model path or lengths are wrong; lists all problems of a stage.
    """
    sets = load_problem_sets(config)
    train, held_out = _rendered(config, sets, Renderer(load_tokenizer(model_path)))
    faults = [
        text
        for name in sets
        for half in (train, held_out)
        for text in too_long([p for p in half if p.dataset == name], config, max_prompt_tokens)
    ]
    if faults:
        raise ConfigError(*faults)
    summaries = [_summary(each, train, held_out, max_prompt_tokens) for each in sets.values()]
    for each in summaries:
        faults += _too_few(each, sets[each.name], max_prompt_tokens)
    if faults:
        raise ConfigError(*faults)
    notes = [text for each in summaries for text in _notes(each, sets[each.name])]
    for note in notes:
        log.info("%s", note)
    train, held_out = (
        [prompt for prompt in half if len(prompt.token_ids) <= max_prompt_tokens]
        for half in (train, held_out)
    )
    return PromptSets(train, held_out, summaries, notes)


def examine_prompts(
    config: DataConfig, model_path: str, max_prompt_tokens: int
) -> tuple[PromptSets | None, list[str]]:
    """Return a run's prompts, or None and messages for a ConfigError."""
    try:
        return load_prompts(config, model_path, max_prompt_tokens), []
    except ConfigError as error:
        return None, error.problems


def prompt_source(prompts: PromptSets, config: DataConfig, seed: int) -> PromptSource:
    """Return the training prompts in sampling order; the prompts of a step are distinct."""
    steps = config.curriculum_steps if config.curriculum is not None else 0
    return PromptSource(
        prompts.train,
        config.prompts_per_step,
        seed,
        weights_of(config),
        steps * config.prompts_per_step,
    )


def _rendered(
    config: DataConfig, sets: dict[str, ProblemSets], renderer: Renderer
) -> tuple[list[Prompt], list[Prompt]]:
    """Render training and held-out prompts, of all data sets, with consecutive ids.

    Raises:
        ConfigError: the chat template raises, or a system prompt has no effect.
    """
    faults = _unused_system_prompts(config, sets)
    train: list[Prompt] = []
    held_out: list[Prompt] = []
    next_id = 0
    of_train = [(each, each.train) for each in sets.values()]
    of_held_out = [(each, each.held_out) for each in sets.values()]
    for half, of_sets in ((train, of_train), (held_out, of_held_out)):
        for each, problems in of_sets:
            prompts, refused = prompts_of(each, problems, renderer, next_id)
            next_id += len(problems)
            half += prompts
            faults += map(each.with_own_keys, refused)
    if faults:
        raise ConfigError(*faults)
    return train, held_out


def _unused_system_prompts(config: DataConfig, sets: dict[str, ProblemSets]) -> list[str]:
    """Report system prompts without effect: a data set's own, or the shared one."""
    faults: list[str] = []
    sharing: list[SourceProblem] = []
    for name, each in sets.items():
        problems = each.train + each.held_out
        if name and config.mixture[name].system_prompt is not None:
            faults += map(each.with_own_keys, unused_system_prompt(each.config, problems))
        else:
            sharing += problems
    return faults + (unused_system_prompt(config, sharing) if sharing else [])


def _summary(
    sets: ProblemSets, train: list[Prompt], held_out: list[Prompt], limit: int
) -> DataSetSummary:
    """Count a data set's prompts, and those left out, now also the longer ones."""
    reason = f"longer than {limit} tokens"
    longer, longer_held_out = (
        [len(prompt.token_ids) > limit for prompt in half if prompt.dataset == sets.name]
        for half in (train, held_out)
    )
    sets.left_out[reason] = sum(longer)
    return DataSetSummary(
        name=sets.name,
        source=sets.source,
        share=sets.share,
        train=longer.count(False),
        held_out=longer_held_out.count(False),
        left_out=sets.left_out,
        held_out_left_out={reason: sum(longer_held_out)},
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
    notes = [sets.with_own_keys(note) for note in sets.notes]
    for half, left_out in (
        ("training", summary.left_out),
        ("held-out", summary.held_out_left_out),
    ):
        if reasons := left_out_text(left_out):
            notes.append(f"{half} problems left out: {reasons}")
    return [f"{sets.name}: {note}" if sets.name else note for note in notes]
