"""Common code of the commands: arguments, exit codes, finding and verifying a checkpoint."""

import argparse
import errno
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.app.process import EXIT_CONFIG, EXIT_FAILED, exit_codes, set_up_process
from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.checkpoint.verification import (
    NoWholeCheckpoint,
    VerifiedCheckpoint,
    as_unreadable,
    named,
    verify,
)
from hybridrl.config.choices import Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ModelConfig
from hybridrl.models.fingerprints import other_files, trained_model, without_weights
from hybridrl.trainer.checkpointing.verification import VerificationProgress

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 a wrong flag, path, config or checkpoint, 129 SIGHUP, "
    "130 Ctrl-C, 143 SIGTERM."
)


class UsageError(ConfigError):
    """Problems of a command's own arguments."""

    subject = "on the command line"


# An argument of a command: its names, and what `ArgumentParser.add_argument` takes.
Argument = tuple[tuple[str, ...], dict[str, Any]]


def argument(*names: str, **settings: Any) -> Argument:
    """Return an argument for `parsed`, as `ArgumentParser.add_argument` takes it."""
    return names, settings


# Arguments of several commands.
SUBJECT = argument("subject", metavar="PATH", help="checkpoint, run, model folder or hub name")
OVERRIDES = argument("overrides", nargs="*", default=[], metavar="key=value", help="of the config")
CONFIG_DIR = argument("--config-dir", metavar="DIR", help="a folder with config groups of yours")
RUN_CODE = argument(
    "--run-code",
    action="store_true",
    help="trust the config that is read: user code, URLs, environment variables",
)


def parsed(
    command: str,
    description: str,
    *arguments: Argument,
    epilog: str = EXIT_CODES,
    argv: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Parse sys.argv, or `argv`, for `hybridrl <command>`; exits with code 2 if that is wrong.

    With --config-dir and overrides `line` has both, for `parse_argv`.
    """
    parser = argparse.ArgumentParser(
        prog=f"hybridrl {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for names, settings in arguments:
        parser.add_argument(*names, **settings)
    args = parser.parse_intermixed_args(argv)
    if OVERRIDES in arguments:
        own = (
            ["--config-dir", args.config_dir] if CONFIG_DIR in arguments and args.config_dir else []
        )
        args.line = [*own, *args.overrides]
    return args


def run_command(command: Callable[[], None]) -> None:
    """Run a command; exits by SystemExit, with the codes of `exit_codes`, unless all goes well."""
    with exit_codes():
        set_up_process()
        try:
            command()
        except DamagedCheckpoint as error:  # damage that shows only in use
            problem = f"{error}.\nUse another checkpoint."
            sys.stderr.write(f"{ConfigError.__name__}: {UsageError(problem)}\n")
            sys.exit(EXIT_CONFIG)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            sys.stderr.write(f"{error}. What was written so far remains.\n")
            sys.exit(EXIT_FAILED)


def checkpoint_at(path: Path) -> VerifiedCheckpoint:
    """Find and verify a checkpoint, or a run's newest intact one; prints progress and damaged ones.

    Raises:
        ConfigError: there is none, it is damaged or removed meanwhile, or the disk fails.
    """
    try:
        with as_unreadable():
            checkpoint = _look(path)
    except ConfigError as error:
        if type(error) is not ConfigError:  # has its own subject
            raise
        raise UsageError(*error.problems) from error
    for damaged in checkpoint.damaged:
        if damaged.folder.exists():  # else the run has removed it
            sys.stderr.write(f"skipped, damaged: {damaged}\n")
    return checkpoint


def warn_about_changed_model(checkpoint: VerifiedCheckpoint, model: ModelConfig) -> None:
    """Warn if the files of a checkpoint's base model have changed since training.

    Tokenizer and chat template come from there, and the weights under adapters.
    """
    before = checkpoint.manifest.models
    weights = checkpoint.manifest.config["lora"] is not None and model.init is Init.pretrained
    if not weights:
        before = {key: without_weights(known) for key, known in before.items()}
    for names in other_files(before, trained_model(model, weights=weights)).values():
        sys.stderr.write(
            f"{model.path} has changed since {checkpoint.folder} was trained: "
            f"{', '.join(names)} changed, were added or removed\n"
        )


@contextmanager
def report_removal(folder: Path) -> Iterator[None]:
    """Report an error as removal, if the folder is gone: a run removes its old checkpoints."""
    try:
        yield
    except Exception as error:
        if folder.exists():
            raise
        raise UsageError(
            f"{folder} was removed meanwhile (checkpoint.keep_last).\n"
            f"Use the run's directory for its newest checkpoint, or copy the folder first."
        ) from error


def _look(path: Path) -> VerifiedCheckpoint:
    watch = VerificationProgress(lambda line: sys.stderr.write(f"{line}\n"))
    shown = partial(verify, watch=watch)
    if not path.expanduser().exists():
        return named(path, key="PATH")  # raises
    with report_removal(path.expanduser()):
        try:
            return named(path, key="PATH", verify=shown)
        except NoWholeCheckpoint:  # all may have been replaced meanwhile
            return named(path, key="PATH", verify=shown)
