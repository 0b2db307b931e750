"""What the commands beside training have in common: how they end, and what they say then."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridrl.app.process import EXIT_CONFIG, exit_codes, set_up_process
from hybridrl.checkpoint.find import Found, NoWholeCheckpoint, as_unreadable, named
from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.config.choices import Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ModelConfig
from hybridrl.models.file_hashes import without_weights
from hybridrl.trainer.checkpointing.base_models import other_files, trained_model
from hybridrl.trainer.checkpointing.verification import VerificationProgress


class UsageError(ConfigError):
    """What is wrong with a command's own arguments."""

    subject = "on the command line"


def run_command(command: Callable[[], None]) -> None:
    """Run a command; leaves by SystemExit unless all goes well.

    Exit codes: 1 failed, 2 what the user can fix, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM; others
    are a command's own, by sys.exit.
    """
    set_up_process()
    with exit_codes():
        try:
            command()
        except DamagedCheckpoint as error:  # in a way that shows only when its content is used
            problem = f"{error}.\nName another checkpoint."
            sys.stderr.write(f"{ConfigError.__name__}: {UsageError(problem)}\n")
            sys.exit(EXIT_CONFIG)


def checkpoint_at(path: Path) -> Found:
    """The checkpoint that a path means, verified; says which newer ones were passed over.

    Where that takes more than seconds, it also says how far it is.

    Args:
        path: a checkpoint's folder, or a run's directory for its newest one that is whole.

    Raises:
        ConfigError: there is none, or the one that was named is damaged or goes meanwhile, or the
            disk fails, for seconds.
    """
    try:
        with as_unreadable():
            found = _look(path)
    except ConfigError as error:
        if type(error) is not ConfigError:  # says what it is about
            raise
        raise UsageError(*error.problems) from error
    for damaged in found.damaged:
        if damaged.folder.exists():  # else a run that trains has removed it
            sys.stderr.write(f"passed over, damaged: {damaged}\n")
    return found


def note_other_files(found: Found, model: ModelConfig) -> None:
    """Say so if the model that a checkpoint was trained from has other files than it had then.

    The tokenizer and the chat template come from there, and what adapters are added to.

    Args:
        found: the checkpoint.
        model: that model, where it lies now.

    Raises:
        ConfigError: there is no such model, or a file of it cannot be read.
    """
    before = found.manifest.models
    weights = found.manifest.config["lora"] is not None and model.init is Init.pretrained
    if not weights:
        before = {key: without_weights(known) for key, known in before.items()}
    for names in other_files(before, trained_model(model, weights=weights)).values():
        sys.stderr.write(
            f"{model.path} is not as {found.folder} was trained from it: "
            f"{', '.join(names)} changed, came or went\n"
        )


@contextmanager
def while_it_stays(folder: Path) -> Iterator[None]:
    """Say so if a folder goes while it is read: a run that trains removes old checkpoints.

    Raises:
        UsageError: something failed, and the folder is gone.
    """
    try:
        yield
    except Exception as error:
        if folder.exists():
            raise
        raise UsageError(
            f"{folder} was removed meanwhile (checkpoint.keep_last).\n"
            f"Name the run's directory again for its newest checkpoint, or copy the folder first."
        ) from error


def _look(path: Path) -> Found:
    watch = VerificationProgress(lambda line: sys.stderr.write(f"{line}\n"))
    if not path.expanduser().exists():
        return named(path, key="PATH")  # raises, and says what was expected
    with while_it_stays(path.expanduser()):
        try:
            return named(path, key="PATH", watch=watch)
        except NoWholeCheckpoint:  # perhaps all that were there have been replaced meanwhile
            return named(path, key="PATH", watch=watch)
