"""Which problems a run trains on and which it is judged by: files, the hub or the embedded ones."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import DataConfig
from hybridrl.data.files import Columns, SourceProblem, read_problems
from hybridrl.data.hub import Split, hub_files
from hybridrl.data.problems import Problem, held_out_problems, train_problems
from hybridrl.data.seeds import derive_seed

EMBEDDED = "embedded"

# Without data.num_eval_problems, this share of data.train_files is held out, and at most so many.
HELD_OUT_SHARE = 0.1
MAX_HELD_OUT = 500


@dataclass
class ProblemSets:
    """A run's problems.

    Attributes:
        train, held_out: disjoint by source; only the first is trained on.
        source: where they come from, in a few words.
        notes: what the user should know of how they were split or counted.
    """

    train: list[SourceProblem]
    held_out: list[SourceProblem]
    source: str
    notes: list[str] = field(default_factory=list)


def load_problem_sets(config: DataConfig) -> ProblemSets:
    """Read what conf/data names.

    Raises:
        ConfigError: files, columns, rows or counts are wrong; all of it in one report.
    """
    faults: list[str] = _count_faults(config)
    named = _Named(config, faults)
    train_files, eval_files = _paths(config.train_files), _paths(config.eval_files)
    sets = ProblemSets([], [], _source(config))
    if train_files is None:
        sets.train = named.problems(Split.train)
    else:
        sets.train = _read("data.train_files", train_files, config, faults)
    if eval_files is not None:
        sets.held_out = _read("data.eval_files", eval_files, config, faults)
    elif train_files is None:
        sets.held_out = named.problems(Split.held_out)
    elif not faults:
        _hold_out_last(config, sets, faults)
    if not faults and len(sets.train) < config.prompts_per_step:
        faults.append(
            f"data.prompts_per_step = {config.prompts_per_step}, but there are "
            f"{len(sets.train)} training problems; a step must not hold a problem twice.\n"
            f"Set data.prompts_per_step={max(1, len(sets.train))} or less, or give more problems."
        )
    if faults:
        raise ConfigError(*faults)
    sets.held_out = _sample(sets.held_out, config.num_eval_problems)
    return sets


class _Named:
    """The data set data.name, loaded when it is first asked for."""

    def __init__(self, config: DataConfig, faults: list[str]) -> None:
        self._config = config
        self._faults = faults
        self._files: dict[Split, list[Path]] | None = None

    def problems(self, split: Split) -> list[SourceProblem]:
        """One half; what goes wrong is added to the faults, the hub's absence once."""
        if self._config.name == EMBEDDED:
            return _embedded(split)
        if self._files is None:
            self._files, faults = hub_files(self._config.name)
            self._faults.extend(faults)
        if split not in self._files or not self._files[split]:
            return []
        return _read("data.name", self._files[split], self._config, self._faults)


def _embedded(split: Split) -> list[SourceProblem]:
    drawn: Sequence[Problem] = train_problems() if split is Split.train else held_out_problems()
    return [
        SourceProblem(
            problem.question,
            problem.answer,
            {"question": problem.question, "answer": problem.answer},
            dict(problem.tags),
            f"embedded {split.name} problem {index}",
        )
        for index, problem in enumerate(drawn)
    ]


def _read(
    key: str, paths: Sequence[Path], config: DataConfig, faults: list[str]
) -> list[SourceProblem]:
    problems, wrong = read_problems(key, paths, Columns(config.prompt_key, config.answer_key))
    faults.extend(wrong)
    return problems


def _paths(value: Any) -> list[Path] | None:
    """data.train_files and data.eval_files: one path, a list of them, or null."""
    if value is None:
        return None
    names = [value] if isinstance(value, str | Path) else list(value)
    return [Path(name).expanduser() for name in names]


def _source(config: DataConfig) -> str:
    train_files = _paths(config.train_files)
    if train_files is None:
        return config.name
    more = f" and {len(train_files) - 1} more" if len(train_files) > 1 else ""
    return f"{train_files[0]}{more}" if train_files else "no files"


def _count_faults(config: DataConfig) -> list[str]:
    if config.num_eval_problems is None or config.num_eval_problems > 0:
        return []
    return [
        f"data.num_eval_problems = {config.num_eval_problems}: expected 1 or more, or null for "
        "all; held-out accuracy is measured before and after training."
    ]


def _hold_out_last(config: DataConfig, sets: ProblemSets, faults: list[str]) -> None:
    """Move the last training problems to the held-out set."""
    total = len(sets.train)
    count = config.num_eval_problems
    if count is None:
        count = max(1, min(MAX_HELD_OUT, int(total * HELD_OUT_SHARE)))
    if total - count < config.prompts_per_step:
        faults.append(
            f"data.eval_files = null holds out the last {count} of the {total} problems in "
            f"data.train_files, which leaves {max(0, total - count)} to train on, fewer than "
            f"data.prompts_per_step = {config.prompts_per_step}.\n"
            "Set data.eval_files, or a smaller data.num_eval_problems or data.prompts_per_step."
        )
        return
    sets.train, sets.held_out = sets.train[:-count], sets.train[-count:]
    sets.notes.append(
        f"the last {count:,} problems of data.train_files are held out, not trained on"
    )


def _sample(problems: list[SourceProblem], count: int | None) -> list[SourceProblem]:
    """`count` of the problems in their order, the same ones in every run; None: all."""
    if count is None or count >= len(problems):
        return problems
    drawn = random.Random(derive_seed("held_out_sample")).sample(range(len(problems)), count)
    return [problems[index] for index in sorted(drawn)]
