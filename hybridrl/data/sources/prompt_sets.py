"""Prompts of a run: read, filter, render and count its data sets."""

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridrl.config.data_schema import DataConfig
from hybridrl.config.errors import ConfigError
from hybridrl.data.sources.mixture import (
    left_out_text,
    load_problem_sets,
    parts_of,
    too_few,
    weights_of,
    with_mixture_keys,
)
from hybridrl.data.sources.problem_sets import ProblemSets
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
    """Read, filter, render and tokenise a run's problems.

    Args:
        config: conf/data.
        model_path: model.path, for tokenizer and chat template.
        max_prompt_tokens: longest prompt allowed, in tokens.

    Raises:
        ConfigError: files, rows, model path or lengths are wrong; lists all problems of a stage.
    """
    sets = load_problem_sets(config)
    rendered = _rendered(config, sets, Renderer(load_tokenizer(model_path)))
    _check_lengths(config, sets, rendered, max_prompt_tokens)
    kept = {name: halves.within(max_prompt_tokens) for name, halves in rendered.items()}
    summaries = [
        _summary(config, name, of_set, rendered[name], kept[name], max_prompt_tokens)
        for name, of_set in sets.items()
    ]
    faults = [text for of_set in summaries for text in _too_few(config, of_set, max_prompt_tokens)]
    if faults:
        raise ConfigError(*faults)
    notes = [text for of_set in summaries for text in _notes(of_set, sets[of_set.name])]
    for note in notes:
        log.info("%s", note)
    train = [prompt for halves in kept.values() for prompt in halves.train]
    held_out = [prompt for halves in kept.values() for prompt in halves.held_out]
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


class _Halves(NamedTuple):
    """Prompts of one data set by split."""

    train: list[Prompt]
    held_out: list[Prompt]

    def within(self, limit: int) -> "_Halves":
        """Return the prompts of at most `limit` tokens."""
        return _Halves(*([p for p in half if len(p.token_ids) <= limit] for half in self))


def _rendered(
    config: DataConfig, sets: dict[str, ProblemSets], renderer: Renderer
) -> dict[str, _Halves]:
    """Render the prompts of each data set; ids of training prompts precede held-out ones.

    Raises:
        ConfigError: the chat template raises, or a system prompt has no effect.
    """
    parts, faults = parts_of(config), _unused_system_prompts(config, sets)
    train = [(name, of_set.train) for name, of_set in sets.items()]
    held_out = [(name, of_set.held_out) for name, of_set in sets.items()]
    rendered = []
    next_id = 0
    for name, problems in train + held_out:
        prompts, refused = prompts_of(
            problems,
            sets[name].examples,
            parts[name],
            renderer,
            dataset=name,
            first_id=next_id,
        )
        next_id += len(problems)
        rendered.append(prompts)
        faults += [with_mixture_keys(name, text) for text in refused]
    if faults:
        raise ConfigError(*faults)
    both = zip(rendered[: len(sets)], rendered[len(sets) :], strict=True)
    return {name: _Halves(*halves) for name, halves in zip(sets, both, strict=True)}


def _unused_system_prompts(config: DataConfig, sets: dict[str, ProblemSets]) -> list[str]:
    """Report system prompts without effect: a data set's own, or the shared one."""
    faults = []
    sharing: list[SourceProblem] = []
    for name, part in parts_of(config).items():
        problems = sets[name].train + sets[name].held_out
        if name and config.mixture[name].system_prompt is not None:
            faults += [
                with_mixture_keys(name, text) for text in unused_system_prompt(part, problems)
            ]
        else:
            sharing += problems
    return faults + (unused_system_prompt(config, sharing) if sharing else [])


def _check_lengths(
    config: DataConfig, sets: dict[str, ProblemSets], rendered: dict[str, _Halves], limit: int
) -> None:
    faults = []
    for name, halves in rendered.items():
        faults += too_long(halves.train, sets[name].train, config, limit)
        faults += too_long(halves.held_out, sets[name].held_out, config, limit)
    if faults:
        raise ConfigError(*faults)


def _summary(
    config: DataConfig, name: str, problems: ProblemSets, all_: _Halves, kept: _Halves, limit: int
) -> DataSetSummary:
    weights = weights_of(config)
    reason = f"longer than {limit} tokens"
    return DataSetSummary(
        name=name,
        source=problems.source,
        share=weights[name] / sum(weights.values()),
        train=len(kept.train),
        held_out=len(kept.held_out),
        left_out=problems.left_out | {reason: len(all_.train) - len(kept.train)},
        held_out_left_out={reason: len(all_.held_out) - len(kept.held_out)},
    )


def _too_few(config: DataConfig, summary: DataSetSummary, limit: int) -> list[str]:
    """Check that enough prompts are left after dropping too long ones."""
    faults = too_few(config, summary.name, summary.train, summary.left_out)
    if not summary.held_out:
        of_set = f" of data.mixture.{summary.name}" if summary.name else ""
        faults.append(
            f"data.too_long_prompts = drop leaves no held-out prompt{of_set} of at most "
            f"rollout.max_prompt_tokens = {limit} tokens.\nRaise rollout.max_prompt_tokens."
        )
    return faults


def _notes(summary: DataSetSummary, problems: ProblemSets) -> list[str]:
    """Return remarks on a data set's split and left-out problems."""
    notes = [with_mixture_keys(summary.name, note) for note in problems.notes]
    for half, left_out in (
        ("training", summary.left_out),
        ("held-out", summary.held_out_left_out),
    ):
        if reasons := left_out_text(left_out):
            notes.append(f"{half} problems left out: {reasons}")
    return [f"{summary.name}: {note}" if summary.name else note for note in notes]
