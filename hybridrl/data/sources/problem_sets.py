"""Training and held-out problems of one data set: from files, the hub, or embedded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hybridrl.config.data_schema import DataConfig
from hybridrl.data.sources.files import read_problems
from hybridrl.data.sources.hub import Split, hub_files
from hybridrl.data.sources.problems import Problem, held_out_problems, train_problems
from hybridrl.data.sources.rows import Columns, Row, SourceProblem, problems_of

EMBEDDED = "embedded"
# Parts of the embedded problems, by the number of solution steps.
EMBEDDED_FOLDERS = ("steps_1", "steps_2", "steps_3")

# Default held-out share of data.train_files without data.num_eval_problems, and its limit.
HELD_OUT_SHARE = 0.1
MAX_HELD_OUT = 500


@dataclass
class ProblemSets:
    """Problems of one data set.

    Attributes:
        train: problems to train on.
        held_out: problems to evaluate on.
        source: description of their origin, for the user.
        notes: remarks on the split, for the user.
        examples: few-shot examples.
        left_out: number of training problems left out, by reason.
    """

    train: list[SourceProblem]
    held_out: list[SourceProblem]
    source: str
    notes: list[str] = field(default_factory=list)
    examples: list[SourceProblem] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)


def read_problem_sets(config: DataConfig) -> tuple[ProblemSets, list[str]]:
    """Read one data set before filters; return it and messages for a ConfigError.

    Args:
        config: conf/data; its mixture is ignored.
    """
    faults: list[str] = _count_faults(config)
    named = _Named(config, faults)
    train_files, eval_files = _paths(config.train_files), _paths(config.eval_files)
    sets = ProblemSets([], [], _source(config))
    if train_files is None:
        sets.train = named.problems(Split.train)
    else:
        sets.train = _read("data.train_files", train_files, _columns(config, Split.train), faults)
    if eval_files is not None:
        columns = _columns(config, Split.held_out)
        sets.held_out = _read("data.eval_files", eval_files, columns, faults)
    elif train_files is None:
        sets.held_out = named.problems(Split.held_out)
    elif not faults:
        _hold_out_last(config, sets, faults)
    return sets, list(dict.fromkeys(faults))  # both splits report some of them


class _Named:
    """Data set of data.name, loaded on first use."""

    def __init__(self, config: DataConfig, faults: list[str]) -> None:
        self._config = config
        self._faults = faults
        self._files: dict[Split, list[Path]] | None = None

    def problems(self, split: Split) -> list[SourceProblem]:
        """Read one split; add messages to the faults, those of the hub once."""
        columns = _columns(self._config, split)
        name, _, folder = self._config.name.partition("/")
        if name == EMBEDDED:
            return _embedded(split, folder, columns, self._faults)
        if self._files is None:
            self._files, faults = hub_files(self._config.name)
            self._faults.extend(faults)
        if split not in self._files or not self._files[split]:
            return []
        return _read("data.name", self._files[split], columns, self._faults)


def _columns(config: DataConfig, split: Split) -> Columns:
    """Return the columns that a split needs."""
    columns = Columns(config.prompt_key, config.answer_key)
    if split is Split.held_out:
        return columns
    solution = config.solution_key if config.few_shot > 0 else None
    return columns._replace(solution_key=solution, curriculum=config.curriculum)


def _embedded(
    split: Split, folder: str, columns: Columns, faults: list[str]
) -> list[SourceProblem]:
    rows = [
        Row(
            f"embedded {split.name} problem {index}",
            {
                "question": problem.question,
                "answer": problem.answer,
                "steps": int(problem.tags["steps"]),
                "tags": dict(problem.tags),
            },
        )
        for index, problem in enumerate(_drawn(split))
        if folder in ("", f"steps_{problem.tags['steps']}")
    ]
    if not rows:
        expected = ", ".join(f"{EMBEDDED}/{name}" for name in EMBEDDED_FOLDERS)
        faults.append(f"data.name = {EMBEDDED}/{folder}, expected {EMBEDDED} or {expected}.")
        return []
    problems, wrong = problems_of("data.name", EMBEDDED, rows, columns)
    faults.extend(wrong)
    return problems


@cache  # shared by the data sets of a mixture
def _drawn(split: Split) -> Sequence[Problem]:
    return train_problems() if split is Split.train else held_out_problems()


def _read(
    key: str, paths: Sequence[Path], columns: Columns, faults: list[str]
) -> list[SourceProblem]:
    problems, wrong = read_problems(key, paths, columns)
    faults.extend(wrong)
    return problems


def _paths(value: Any) -> list[Path] | None:
    """Parse data.train_files or data.eval_files: one path, a list of paths, or null."""
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
    if count >= total:
        faults.append(
            f"data.eval_files = null holds out the last {count} of the {total} problems in "
            f"data.train_files, which leaves none to train on.\n"
            "Set data.eval_files, or a smaller data.num_eval_problems."
        )
        return
    sets.train, sets.held_out = sets.train[:-count], sets.train[-count:]
    sets.notes.append(
        f"the last {count:,} problems of data.train_files are held out, not trained on"
    )
