"""Data sets of a run, one or a weighted mixture, filtered together."""

import logging
import random
import re
from collections.abc import Collection, Sequence
from dataclasses import fields, replace

from hybridrl.config.choices import Repeated
from hybridrl.config.data_schema import SOURCE_KEYS, DataConfig, MixturePart
from hybridrl.config.errors import ConfigError
from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.few_shot import choose_examples
from hybridrl.data.sources.filters import Question, question_of, without, without_repeats
from hybridrl.data.sources.order import most_drawn
from hybridrl.data.sources.problem_sets import ProblemSets, read_problem_sets
from hybridrl.data.sources.rows import SourceProblem

log = logging.getLogger(__name__)

# Reasons in `ProblemSets.left_out`.
HELD_OUT_AS_WELL, REPEATED, SHOWN = "held out as well", "repeated", "shown as examples"

# Keys of data.* that each data set of a mixture may set for itself.
_OWN_KEYS = [field.name for field in fields(MixturePart) if field.name != "weight"]
_OWN_KEY = re.compile(rf"\bdata\.({'|'.join(_OWN_KEYS)})\b")


def parts_of(config: DataConfig) -> dict[str, DataConfig]:
    """Return the config of each data set by name; the name is empty without a mixture."""
    if not config.mixture:
        return {"": config}
    parts = {}
    for name, part in config.mixture.items():
        own = {key: vars(part)[key] for key in _OWN_KEYS}
        given = {key: value for key, value in own.items() if value is not None}
        sources = {key: own[key] for key in SOURCE_KEYS}
        parts[name] = replace(config, mixture={}, **(given | sources))
    return parts


def weights_of(config: DataConfig) -> dict[str, float]:
    """Return the weight of each data set by name."""
    return {name: part.weight for name, part in config.mixture.items()} or {"": 1.0}


def with_mixture_keys(name: str, text: str) -> str:
    """Rewrite data.<key> in a message to data.mixture.<name>.<key>, for keys of a data set."""
    return _OWN_KEY.sub(rf"data.mixture.{name}.\1", text) if name else text


def load_problem_sets(config: DataConfig) -> dict[str, ProblemSets]:
    """Read the problems of all data sets and apply the filters.

    Raises:
        ConfigError: files, columns, rows or counts are wrong; lists all problems.
    """
    sets, faults = {}, []
    for name, part in parts_of(config).items():
        found, wrong = read_problem_sets(part)
        sets[name] = _named(name, found)
        faults += [with_mixture_keys(name, text) for text in wrong]
    if faults:
        raise ConfigError(*faults)
    held_out = {question_of(problem) for each in sets.values() for problem in each.held_out}
    seen: set[Question] = set()
    for name, part in parts_of(config).items():
        _leave_out(name, sets[name], part, held_out, seen)
        sets[name].held_out = _sample(sets[name].held_out, part.num_eval_problems)
        faults += _too_few_examples(name, sets[name], part)
        faults += too_few(config, name, len(sets[name].train), sets[name].left_out)
    if faults:
        raise ConfigError(*faults)
    return sets


def too_few(config: DataConfig, name: str, count: int, left_out: dict[str, int]) -> list[str]:
    """Check that a data set of `count` training problems suffices for one step."""
    weights = weights_of(config)
    need = most_drawn(list(weights.values()), list(weights).index(name), config.prompts_per_step)
    if count >= need:
        return []
    reasons = left_out_text(left_out)
    there = f"{count} training problems" + (f" (left out: {reasons})" if reasons else "")
    if name:
        text = (
            f"data.mixture.{name} has {there}, but a step of data.prompts_per_step = "
            f"{config.prompts_per_step} draws up to {need} of them; problems of a step must be "
            f"different.\nAdd problems to {name}, lower its weight, or set a smaller "
            f"data.prompts_per_step."
        )
    else:
        text = (
            f"data.prompts_per_step = {config.prompts_per_step}, but there are {there}; problems "
            f"of a step must be different.\n"
            + (f"Set data.prompts_per_step={count} or less, or add" if count else "Add")
            + " problems."
        )
    if HELD_OUT_AS_WELL in left_out:
        text += " To train on held-out problems as well: data.held_out_overlap=keep."
    return [text]


def left_out_text(left_out: dict[str, int]) -> str:
    """Format the number of left-out problems by reason."""
    return ", ".join(f"{count:,} {reason}" for reason, count in left_out.items() if count)


def _named(name: str, sets: ProblemSets) -> ProblemSets:
    """Add the data set's name to examples (for rewards) and tags (for accuracies), if any."""
    if name:
        sets.train, sets.held_out = _with_name(name, sets.train), _with_name(name, sets.held_out)
    return sets


def _with_name(name: str, problems: Sequence[SourceProblem]) -> list[SourceProblem]:
    own = {"dataset": name}
    return [replace(p, example=p.example | own, tags=p.tags | own) for p in problems]


def _leave_out(
    name: str,
    sets: ProblemSets,
    config: DataConfig,
    held_out: Collection[Question],
    seen: set[Question],
) -> None:
    """Remove overlaps, duplicates and few-shot examples from the training problems; count them."""
    clean = without(sets.train, held_out)
    if overlap := len(sets.train) - len(clean):
        drops = config.held_out_overlap is Repeated.drop
        what = "they are left out" if drops else "held-out accuracy will count them"
        text = f"training problems held out as well: {overlap:,}; {what}"
        log.warning("%s", f"{name}: {text}" if name else text)
        if drops:
            _keep(sets, clean, HELD_OUT_AS_WELL)
        else:
            sets.notes.append(text)
    if config.duplicates is Repeated.drop:
        _keep(sets, without_repeats(sets.train, seen), REPEATED)
    if config.few_shot:
        sets.examples = choose_examples(sets.train, held_out, config.few_shot)
        shown = {question_of(example) for example in sets.examples}
        _keep(sets, without(sets.train, shown), SHOWN)


def _keep(sets: ProblemSets, kept: list[SourceProblem], reason: str) -> None:
    sets.left_out[reason] = len(sets.train) - len(kept)
    sets.train = kept


def _too_few_examples(name: str, sets: ProblemSets, config: DataConfig) -> list[str]:
    if len(sets.examples) == config.few_shot:
        return []
    where = f"data.mixture.{name}" if name else "the data set"
    return [
        f"data.few_shot = {config.few_shot}, but {where} has {len(sets.examples)} different "
        f"training problems that are not held out.\nSet a smaller data.few_shot."
    ]


def _sample(problems: list[SourceProblem], count: int | None) -> list[SourceProblem]:
    """Draw `count` problems in their order, the same in every run; None: all."""
    if count is None or count >= len(problems):
        return problems
    drawn = random.Random(derive_seed("held_out_sample")).sample(range(len(problems)), count)
    return [problems[index] for index in sorted(drawn)]
