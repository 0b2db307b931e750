"""Command line of `hybridrl eval`: a checkpoint or a model, flags, and overrides of the config."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from hybridrl.checkpoint.files import CHECKPOINTS, MANIFEST, step_of
from hybridrl.checkpoint.find import Found
from hybridrl.commands.running import UsageError, argument_parser, checkpoint_at
from hybridrl.commands.runs import FOLDERS

_MODEL = "config.json"
# Longest name; file systems allow 255 bytes.
_NAME_CHARS = 100

DESCRIPTION = """\
Score a checkpoint or any Hugging Face model on a data set: mean score and pass@k, with the
completions.

  hybridrl eval outputs/x                                 newest good checkpoint of a run
  hybridrl eval outputs/x/checkpoints/step_00000020       that one
  hybridrl eval outputs/x data=gsm8k rollout.temperature=0.6 --samples 8
  hybridrl eval Qwen/Qwen2.5-0.5B-Instruct data=gsm8k --greedy

A checkpoint is scored as in its run's evaluations: with the run's data, reward, limits and seed.
Overrides as in `hybridrl train`: groups (data=, reward=, hardware=) and key=value.
"""


class Split(StrEnum):
    """Problems to evaluate."""

    held_out = "held_out"
    train = "train"


@dataclass(frozen=True)
class EvalOptions:
    """Options of an evaluation, as `_parser` describes them; `ks` of pass@k are rising."""

    samples: int
    ks: list[int]
    subject: str = ""
    overrides: Sequence[str] = ()
    config_dir: str | None = None
    greedy: bool = False
    problems: int | None = None
    output: Path | None = None
    split: Split = Split.held_out
    correct_at: float = 1.0
    runs_code: bool = False


def parse_options(argv: Sequence[str]) -> EvalOptions:
    """Parse an argv; exits with code 2 on a wrong flag, raises UsageError on contradictions."""
    args = _parser().parse_intermixed_args(list(argv))
    samples = args.samples
    # By default 1, 2, 4... up to the number of samples.
    powers = [2**power for power in range(samples.bit_length())]
    args.ks = powers if args.ks is None else sorted(set(args.ks))
    problems = []
    if args.greedy and samples > 1:
        problems.append(
            f"--greedy with --samples {samples}: greedy decoding gives the same response each "
            f"time.\nRemove --samples, or remove --greedy to sample at rollout.temperature."
        )
    if (k := args.ks[-1]) > samples:
        problems.append(
            f"--k {k} with --samples {samples}: pass@{k} needs at least {k} samples per problem.\n"
            f"Add --samples {k}, or lower --k."
        )
    if problems:
        raise UsageError(*problems)
    return EvalOptions(**vars(args))


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("eval", DESCRIPTION)
    add = parser.add_argument
    add("subject", metavar="PATH", help="checkpoint, run directory, model folder or hub name")
    add("overrides", nargs="*", default=[], metavar="key=value", help="of the config")
    add("--samples", type=_positive, default=1, metavar="N", help="of each problem (1)")
    add("--k", type=_ks, dest="ks", metavar="1,4,8", help="pass@k for these k (1, 2, 4... up to N)")
    add("--greedy", action="store_true", help="decode greedily; one sample")
    add("--problems", type=_positive, metavar="N", help="only the first N problems (all)")
    add("--split", type=Split, choices=list(Split), default=Split.held_out, help="(held_out)")
    correct = "smallest score of a correct response (1)"
    add("--correct-at", type=float, default=1.0, metavar="SCORE", help=correct)
    add("--output", type=Path, metavar="DIR", help="a new folder (evals/<name>/<time>)")
    trust = "trust the checkpoint's config: user code, URLs, environment variables"
    add("--run-code", dest="runs_code", action="store_true", help=trust)
    add("--config-dir", metavar="DIR", help="a folder with config groups of your own")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}, expected an integer of at least 1")
    return int(text)


def _ks(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


@dataclass(frozen=True)
class Subject:
    """A checkpoint or a model in Hugging Face format.

    Attributes:
        name: for output and folders; one component of a path.
        model: the value of model.path; None for a checkpoint, whose run has it.
    """

    name: str
    model: str | None = None
    checkpoint: Found | None = None

    @property
    def step(self) -> int:
        """Training step of the weights, from which seeds derive; 0 for a model."""
        return self.checkpoint.manifest.step if self.checkpoint else 0

    @property
    def folder(self) -> Path | None:
        """Folder of the checkpoint; None for a model."""
        return self.checkpoint.folder if self.checkpoint else None


def find_subject(path: str) -> Subject:
    """Find a checkpoint or a model.

    The path is that of a checkpoint's folder, a run's directory or its checkpoints folder (the
    newest good one), a model's folder, `embedded`, or a name on the hub.

    Raises:
        ConfigError: the folder is neither, or the checkpoint is damaged.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if path.startswith((*(f"{runs}/" for runs in FOLDERS), "./", "../", "/")):
            raise UsageError(
                f"{path}: there is no such run or folder (seen from {Path.cwd()}).\n"
                f"hybridrl runs lists runs."
            )
        return Subject(name=safe_name(Path(path).name), model=path)
    name = folder.resolve().name
    if (folder / _MODEL).is_file():
        return Subject(name=safe_name(name), model=str(folder))
    is_of_run = name == CHECKPOINTS or (folder / CHECKPOINTS).is_dir() or step_of(name) is not None
    if not (is_of_run or (folder / MANIFEST).is_file() or folder.is_file()):
        raise UsageError(
            f"{path}: neither a checkpoint, nor the directory of a run with {CHECKPOINTS}/, nor a "
            f"model's folder with {_MODEL}.\nUse one of these, or a model on the hub."
        )
    found = checkpoint_at(folder)
    run = safe_name(str(found.manifest.config["run"]["name"]))
    return Subject(name=f"{run}_step_{found.manifest.step}", checkpoint=found)


def safe_name(text: str) -> str:
    """Return a text as a single, safe component of a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:_NAME_CHARS].lstrip(".") or "model"
