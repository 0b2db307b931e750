"""Checks of conf/data that do not read the files."""

import re
from collections.abc import Iterator

from hybridrl.config.annotations import LARGEST_COUNT
from hybridrl.config.checks.resources import file_problems
from hybridrl.config.data_schema import MixturePart
from hybridrl.config.schema import RunConfig

# Names are part of metrics and config keys.
_NAME = re.compile(r"[A-Za-z]\w*")


def mixture_problems(config: RunConfig) -> Iterator[str]:
    """Check names, weights and sources of the data sets of data.mixture."""
    seen: dict[str, str] = {}
    for name, part in config.data.mixture.items():
        key = f"data.mixture.{name}"
        if not _NAME.fullmatch(name):
            yield (
                f"{key}: the name {name} is not allowed, expected letters, digits and _, beginning "
                f"with a letter: it is part of metrics (reward/mean_<name>).\nRename it."
            )
        if not 0 < part.weight <= LARGEST_COUNT:
            yield (
                f"{key}.weight = {part.weight}, expected a number above 0: it is a share of the "
                f"prompts.\nRemove {key} to drop the data set."
            )
        yield from _source_problems(key, part)
        source = f"{part.name} {part.train_files}"
        if source in seen:
            yield (
                f"{key} and {seen[source]} read the same training problems "
                f"({part.train_files or part.name}).\nRemove one and add its weight to the other."
            )
        seen[source] = key


def _source_problems(key: str, part: MixturePart) -> Iterator[str]:
    if (part.name is None) == (part.train_files is None):
        found = "neither" if part.name is None else "both"
        yield (
            f"{key} has {found} of name and train_files, expected one: they are the source of the "
            f"training problems.\nSet {key}.name or {key}.train_files."
        )
    for name, value in (("train_files", part.train_files), ("eval_files", part.eval_files)):
        yield from file_problems(f"{key}.{name}", value)
    if part.num_eval_problems is not None and part.num_eval_problems < 1:
        yield (
            f"{key}.num_eval_problems = {part.num_eval_problems}, expected at least 1, or null for "
            f"data.num_eval_problems.\nRemove it."
        )
