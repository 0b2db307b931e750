"""All prompts of a run: its data sets read, filtered, rendered and counted."""

import logging
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridrl.config.data_schema import DataConfig
from hybridrl.config.errors import ConfigError
from hybridrl.data.sources.mixture import (
    left_out_text,
    load_problem_sets,
    of_part,
    parts_of,
    too_few,
    weights_of,
)
from hybridrl.data.sources.problem_sets import ProblemSets
from hybridrl.data.sources.prompt_source import PromptSource
from hybridrl.data.sources.prompts import Prompt, prompts_of, too_long, unused_system_prompt
from hybridrl.data.sources.rows import SourceProblem
from hybridrl.data.sources.tokenizer import Renderer, load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataSetFacts:
    """One data set of a run in numbers.

    Attributes:
        name: in data.mixture; empty without one.
        source: where its problems come from, in a few words.
        share: of the prompts that are drawn, in (0, 1].
        train, held_out: prompts that are used.
        left_out, held_out_left_out: prompts that are not, by reason.
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
    """A run's prompts.

    Attributes:
        train, held_out: of all data sets; only the first are trained on.
        data_sets: where they come from, and how many were left out.
        notes: what the user should know of how problems were split or left out.
    """

    train: list[Prompt]
    held_out: list[Prompt]
    data_sets: list[DataSetFacts]
    notes: list[str] = field(default_factory=list)


def load_prompts(config: DataConfig, model_path: str, max_prompt_tokens: int) -> PromptSets:
    """Read, filter, render and tokenise a run's problems.

    Args:
        config: what to read, and how.
        model_path: as in model.path; its tokenizer and chat template are used.
        max_prompt_tokens: longest prompt allowed, in tokens.

    Raises:
        ConfigError: whatever is wrong with files, rows, model path and lengths, in one report.
    """
    sets = load_problem_sets(config)
    rendered = _rendered(config, sets, Renderer(load_tokenizer(model_path)))
    _check_lengths(config, sets, rendered, max_prompt_tokens)
    kept = {name: halves.within(max_prompt_tokens) for name, halves in rendered.items()}
    facts = [
        _facts(config, name, of_set, rendered[name], kept[name], max_prompt_tokens)
        for name, of_set in sets.items()
    ]
    faults = [text for of_set in facts for text in _too_few(config, of_set, max_prompt_tokens)]
    if faults:
        raise ConfigError(*faults)
    notes = [text for of_set in facts for text in _notes(of_set, sets[of_set.name])]
    for note in notes:
        log.info("%s", note)
    train = [prompt for halves in kept.values() for prompt in halves.train]
    held_out = [prompt for halves in kept.values() for prompt in halves.held_out]
    return PromptSets(train, held_out, facts, notes)


def examine_prompts(
    config: DataConfig, model_path: str, max_prompt_tokens: int
) -> tuple[PromptSets | None, list[str]]:
    """A run's prompts, or what is wrong with its data, as texts for a ConfigError."""
    try:
        return load_prompts(config, model_path, max_prompt_tokens), []
    except ConfigError as error:
        return None, error.problems


def prompt_source(prompts: PromptSets, config: DataConfig, seed: int) -> PromptSource:
    """The training prompts in the order in which a run draws them, any step's all different."""
    steps = config.curriculum_steps if config.curriculum is not None else 0
    return PromptSource(
        prompts.train,
        config.prompts_per_step,
        seed,
        weights_of(config),
        steps * config.prompts_per_step,
    )


class _Halves(NamedTuple):
    """The prompts of one data set."""

    train: list[Prompt]
    held_out: list[Prompt]

    def within(self, limit: int) -> "_Halves":
        """The prompts of at most `limit` tokens."""
        return _Halves(*([p for p in half if len(p.token_ids) <= limit] for half in self))


def _rendered(
    config: DataConfig, sets: dict[str, ProblemSets], renderer: Renderer
) -> dict[str, _Halves]:
    """The prompts of each data set; all training prompts are numbered before the held-out ones.

    Raises:
        ConfigError: the chat template refuses some, or none takes the system prompt.
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
        faults += [of_part(name, text) for text in refused]
    if faults:
        raise ConfigError(*faults)
    both = zip(rendered[: len(sets)], rendered[len(sets) :], strict=True)
    return {name: _Halves(*halves) for name, halves in zip(sets, both, strict=True)}


def _unused_system_prompts(config: DataConfig, sets: dict[str, ProblemSets]) -> list[str]:
    """System prompts that no problem takes: a data set's own, or the one of all others."""
    faults = []
    sharing: list[SourceProblem] = []
    for name, part in parts_of(config).items():
        problems = sets[name].train + sets[name].held_out
        if name and config.mixture[name].system_prompt is not None:
            faults += [of_part(name, text) for text in unused_system_prompt(part, problems)]
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


def _facts(
    config: DataConfig, name: str, problems: ProblemSets, all_: _Halves, kept: _Halves, limit: int
) -> DataSetFacts:
    weights = weights_of(config)
    reason = f"longer than {limit} tokens"
    return DataSetFacts(
        name=name,
        source=problems.source,
        share=weights[name] / sum(weights.values()),
        train=len(kept.train),
        held_out=len(kept.held_out),
        left_out=problems.left_out | {reason: len(all_.train) - len(kept.train)},
        held_out_left_out={reason: len(all_.held_out) - len(kept.held_out)},
    )


def _too_few(config: DataConfig, facts: DataSetFacts, limit: int) -> list[str]:
    """What dropping too long prompts has left, where that is not enough."""
    faults = too_few(config, facts.name, facts.train, facts.left_out)
    if not facts.held_out:
        of_set = f" of data.mixture.{facts.name}" if facts.name else ""
        faults.append(
            f"data.too_long_prompts = drop leaves no held-out prompt{of_set} of at most "
            f"rollout.max_prompt_tokens = {limit} tokens.\nRaise rollout.max_prompt_tokens."
        )
    return faults


def _notes(facts: DataSetFacts, problems: ProblemSets) -> list[str]:
    """How a data set was split, and what was left out of it."""
    notes = [of_part(facts.name, note) for note in problems.notes]
    for half, left_out in (
        ("training", facts.left_out),
        ("held-out", facts.held_out_left_out),
    ):
        if reasons := left_out_text(left_out):
            notes.append(f"{half} problems left out: {reasons}")
    return [f"{facts.name}: {note}" if facts.name else note for note in notes]
