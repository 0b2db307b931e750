"""Problems of a run's data sets, one or a weighted mixture: read, split, filtered."""

import random
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from hybridrl.config.choices import Repeated, Targets
from hybridrl.config.errors import ConfigError
from hybridrl.config.sections import SOURCE_KEYS, DataConfig, MixturePart
from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.files import Split, hub_files, read_problems
from hybridrl.data.sources.functions import files_of
from hybridrl.data.sources.images import keys_of
from hybridrl.data.sources.order import most_drawn
from hybridrl.data.sources.problems import held_out_problems, labelled, pair, train_problems
from hybridrl.data.sources.rows import Columns, Problem, Row, problems_of
from hybridrl.data.sources.shapes import NUM_HELD_OUT, NUM_TRAIN, shape_problems

EMBEDDED = "embedded"
# Parts of the embedded word problems, by the number of solution steps; questions about pictures.
STEPS, SHAPES = ("steps_1", "steps_2", "steps_3"), "shapes"
EMBEDDED_FOLDERS = (*STEPS, SHAPES)

# Default held-out share of data.train_files without data.num_eval_problems, and its limit.
HELD_OUT_SHARE = 0.1
MAX_HELD_OUT = 500

# Reasons in `DataSet.left_out`.
HELD_OUT_AS_WELL, REPEATED, SHOWN = "held out as well", "repeated", "shown as examples"

# Keys of data.* that each data set of a mixture may set for itself.
_OWN_KEYS = [field.name for field in fields(MixturePart) if field.name != "weight"]
# In a data set, answer_key: null is the shared one.
_OWN_KEY = re.compile(rf"\bdata\.(?!answer_key=null)({'|'.join(_OWN_KEYS)})\b")

# Normalised texts of a question: one per chat message, without system messages; keys of its images.
Question = tuple[str, ...]


@dataclass
class DataSet:
    """Problems of one data set.

    Attributes:
        name: in data.mixture; empty without a mixture.
        config: conf/data with the data set's own keys.
        share: of the prompts drawn in training, in (0, 1].
        needed: training problems that a step may draw.
        train, held_out: problems to train on and to evaluate on.
        notes: remarks on the split, for the user.
        examples: few-shot examples.
        left_out: number of training problems left out, by reason.
    """

    name: str
    config: DataConfig
    share: float
    needed: int
    train: list[Problem] = field(default_factory=list)
    held_out: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    examples: list[Problem] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Description of the problems' origin, for the user."""
        files = _paths(self.config.train_files)
        if files is None:
            return self.config.function or self.config.name
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        return f"{files[0]}{more}" if files else "no files"

    def with_own_keys(self, text: str) -> str:
        """Rewrite data.<key> in a message to data.mixture.<name>.<key>, for keys of a data set."""
        return _OWN_KEY.sub(rf"data.mixture.{self.name}.\1", text) if self.name else text

    def keep(self, kept: list[Problem], reason: str) -> None:
        """Train on `kept` alone; count the others."""
        self.left_out[reason] = len(self.train) - len(kept)
        self.train = kept

    def too_few(self, count: int) -> list[str]:
        """Return a message unless `count` training problems suffice for one step."""
        if count >= self.needed:
            return []
        reasons = left_out_text(self.left_out)
        text = (
            (f"data.mixture.{self.name} has" if self.name else "there are")
            + f" {count} training problems"
            + (f" (left out: {reasons})" if reasons else "")
            + f", but a step of data.prompts_per_step = {self.config.prompts_per_step} draws up to "
            f"{self.needed} of them; problems of a step must be different.\nAdd problems"
            + (", lower its weight," if self.name else "")
            + " or set a smaller data.prompts_per_step."
        )
        if HELD_OUT_AS_WELL in self.left_out:
            text += " To train on held-out problems as well: data.held_out_overlap=keep."
        return [text]


def load_problem_sets(config: DataConfig, targets: Targets | None = None) -> dict[str, DataSet]:
    """Read the problems of all data sets by name and apply the filters.

    Columns of `targets` are read if given; those of solutions also for few-shot examples.

    Raises:
        ConfigError: files, columns, rows or counts are wrong; lists all problems.
    """
    sets = _sets_of(config)
    faults = []
    for each in sets.values():
        # Both splits report some of them.
        faults += [each.with_own_keys(text) for text in dict.fromkeys(_read(each, targets))]
    if faults:
        raise ConfigError(*faults)
    held_out = {question_of(problem) for each in sets.values() for problem in each.held_out}
    seen: set[Question] = set()
    for each in sets.values():
        _leave_out(each, held_out, seen)
        each.held_out = _sample(each.held_out, each.config.num_eval_problems)
        wanted = each.config.few_shot
        if len(each.examples) != wanted:
            where = f"data.mixture.{each.name}" if each.name else "the data set"
            faults.append(
                f"data.few_shot = {wanted}, but {where} has {len(each.examples)} different "
                f"training problems that are not held out.\nSet a smaller data.few_shot."
            )
        faults += each.too_few(len(each.train))
    if faults:
        raise ConfigError(*faults)
    return sets


def weights_of(config: DataConfig) -> dict[str, float]:
    """Return the weight of each data set by name; the name is empty without a mixture."""
    return {name: part.weight for name, part in config.mixture.items()} or {"": 1.0}


def left_out_text(left_out: dict[str, int]) -> str:
    """Format the number of left-out problems by reason."""
    return ", ".join(f"{count:,} {reason}" for reason, count in left_out.items() if count)


def _sets_of(config: DataConfig) -> dict[str, DataSet]:
    """Return the data sets by name, without problems."""
    weights = weights_of(config)
    sets = {}
    for index, (name, weight) in enumerate(weights.items()):
        part = config
        if name:
            own = {key: vars(config.mixture[name])[key] for key in _OWN_KEYS}
            changed = {k: v for k, v in own.items() if v is not None or k in SOURCE_KEYS}
            part = replace(config, mixture={}, **changed)
        needed = most_drawn(list(weights.values()), index, config.prompts_per_step)
        sets[name] = DataSet(name, part, weight / sum(weights.values()), needed)
    return sets


def _read(data: DataSet, targets: Targets | None) -> list[str]:
    """Read the problems of a data set before filters; return messages for a ConfigError."""
    config = data.config
    train_files, eval_files = _paths(config.train_files), _paths(config.eval_files)
    keys = ("data.train_files", "data.eval_files")
    if config.function is not None:
        keys = ("data.function", "data.function")
        train_files, eval_files = files_of(config.function, config.args)
    name, _, folder = config.name.partition("/") if train_files is None else ("", "", "")
    hub: dict[Split, list[Path]] = {}
    faults: list[str] = []
    if train_files is None and name != EMBEDDED:
        hub, faults = hub_files(config.name, [*Split] if eval_files is None else [Split.train])

    def read(split: Split, key: str, files: list[Path] | None) -> list[Problem]:
        columns = _columns(config, split, targets)
        problems, wrong = list[Problem](), list[str]()
        if files is not None:
            problems, wrong = read_problems(key, files, columns)
        elif name == EMBEDDED:
            problems, wrong = _embedded(split, folder, columns)
        elif hub.get(split):
            problems, wrong = read_problems("data.name", hub[split], columns)
        faults.extend(wrong)
        # Rewards know the data set by its name; accuracies tell those of a mixture apart.
        label = {"dataset": train_files[0].stem if train_files else config.name}
        own = {"dataset": data.name} if data.name else {}
        return [replace(p, example=label | p.example | own, tags=p.tags | own) for p in problems]

    data.train = read(Split.train, keys[0], train_files)
    data.held_out = read(Split.held_out, keys[1], eval_files)
    if train_files is not None and eval_files is None and not faults:
        faults += _hold_out_last(data, keys[0])
    return faults


def _columns(config: DataConfig, split: Split, targets: Targets | None) -> Columns:
    """Return the columns that a split needs."""
    columns = Columns(config.prompt_key, config.answer_key, images_key=config.images_key)
    if targets is Targets.pairs:
        chosen, rejected = config.chosen_key, config.rejected_key
        columns = columns._replace(chosen_key=chosen, rejected_key=rejected)
    elif targets is Targets.labels:
        columns = columns._replace(chosen_key=config.chosen_key, label_key=config.label_key)
    elif targets is Targets.answers or (config.few_shot > 0 and split is Split.train):
        columns = columns._replace(solution_key=config.solution_key)
    if split is Split.train:
        columns = columns._replace(curriculum=config.curriculum)
    return columns


def _embedded(split: Split, folder: str, columns: Columns) -> tuple[list[Problem], list[str]]:
    more = dict if columns.chosen_key is None else labelled if columns.label_key else pair
    if folder == SHAPES:
        drawn = shape_problems(split.name, NUM_TRAIN if split is Split.train else NUM_HELD_OUT)
    else:
        drawn = [
            values | more(values)
            for values in _drawn(split)
            if folder in ("", f"steps_{values['steps']}")
        ]
    rows = [
        Row(f"embedded {split.name} problem {index}", values) for index, values in enumerate(drawn)
    ]
    if not rows:
        expected = ", ".join(f"{EMBEDDED}/{name}" for name in EMBEDDED_FOLDERS)
        return [], [f"data.name = {EMBEDDED}/{folder}, expected {EMBEDDED} or {expected}."]
    return problems_of("data.name", EMBEDDED, rows, [], columns)


@cache  # shared by the data sets of a mixture
def _drawn(split: Split) -> list[dict[str, Any]]:
    return train_problems() if split is Split.train else held_out_problems()


def _paths(value: Any) -> list[Path] | None:
    """Parse data.train_files or data.eval_files: one path, a list of paths, or null."""
    if value is None:
        return None
    names = [value] if isinstance(value, str | Path) else list(value)
    return [Path(name).expanduser() for name in names]


def _hold_out_last(data: DataSet, key: str) -> list[str]:
    """Move the last training problems to the held-out set; return messages for a ConfigError."""
    total, count = len(data.train), data.config.num_eval_problems
    if count is None:
        count = max(1, min(MAX_HELD_OUT, int(total * HELD_OUT_SHARE)))
    if count >= total:
        return [
            f"data.eval_files = null holds out the last {count} of the {total} problems in "
            f"{key}, which leaves none to train on.\n"
            "Set data.eval_files, or a smaller data.num_eval_problems."
        ]
    data.train, data.held_out = data.train[:-count], data.train[-count:]
    data.notes.append(f"the last {count:,} problems of {key} are held out, not trained on")
    return []


def _leave_out(data: DataSet, held_out: Collection[Question], seen: set[Question]) -> None:
    """Remove overlaps, duplicates and few-shot examples from the training problems; count them."""
    config, clean = data.config, without(data.train, held_out)
    if overlap := len(data.train) - len(clean):
        if config.held_out_overlap is Repeated.drop:
            data.keep(clean, HELD_OUT_AS_WELL)
        else:
            data.notes.append(
                f"training problems held out as well: {overlap:,}; held-out accuracy counts them"
            )
    if config.duplicates is Repeated.drop:
        data.keep(without_repeats(data.train, seen), REPEATED)
    if config.few_shot:
        good = [problem for problem in data.train if problem.is_desired is not False]
        data.examples = choose_examples(good, held_out, config.few_shot)
        shown = {question_of(example) for example in data.examples}
        data.keep(without(data.train, shown), SHOWN)


def _sample(problems: list[Problem], count: int | None) -> list[Problem]:
    """Draw `count` problems, the same in every run; None: all."""
    if count is None or count >= len(problems):
        return problems
    drawn = random.Random(derive_seed("held_out_sample")).sample(range(len(problems)), count)
    return [problems[index] for index in sorted(drawn)]


def question_of(problem: Problem) -> Question:
    """Return the question and its images, with white space and case normalised."""
    if isinstance(problem.prompt, str):
        texts = [problem.prompt]
    else:
        texts = [m["content"] for m in problem.prompt if m["role"] != "system"]
    return *(" ".join(text.split()).casefold() for text in texts), *keys_of(problem.prompt)


def without(problems: Iterable[Problem], questions: Collection[Question]) -> list[Problem]:
    """Return the problems whose question is not in `questions`."""
    return [problem for problem in problems if question_of(problem) not in questions]


def without_repeats(problems: Iterable[Problem], seen: set[Question]) -> list[Problem]:
    """Return the first problem of each question not in `seen`; add these questions to `seen`."""
    first: dict[Question, Problem] = {}
    for problem in problems:
        first.setdefault(question_of(problem), problem)
    new = first.keys() - seen
    seen |= new
    return [problem for question, problem in first.items() if question in new]


def choose_examples(
    problems: Sequence[Problem], held_out: Collection[Question], number: int
) -> list[Problem]:
    """Draw few-shot examples that are not held out, the same in every run; fewer if too few."""
    usable = without_repeats(problems, set(held_out))
    rng = random.Random(derive_seed("few_shot"))
    return rng.sample(usable, min(number, len(usable)))
