"""What is evaluated: a checkpoint of a run, or a model in Hugging Face's format."""

import re
from dataclasses import dataclass
from pathlib import Path

from hybridrl.checkpoint.find import Found
from hybridrl.checkpoint.names import CHECKPOINTS, MANIFEST, step_of
from hybridrl.commands.running import UsageError, checkpoint_at

_MODEL = "config.json"
# Of a name; file systems take 255 bytes.
_NAME_CHARS = 100


@dataclass(frozen=True)
class Subject:
    """What is evaluated.

    Attributes:
        name: for people and folders; one component of a path.
        model: its path as in model.path; None of a checkpoint, whose run names its model.
        checkpoint: None of a model.
    """

    name: str
    model: str | None = None
    checkpoint: Found | None = None

    @property
    def step(self) -> int:
        """After which the weights were taken; seeds derive from it. 0 of a model."""
        return self.checkpoint.manifest.step if self.checkpoint else 0

    @property
    def folder(self) -> Path | None:
        """The checkpoint's folder."""
        return self.checkpoint.folder if self.checkpoint else None


def find_subject(path: str) -> Subject:
    """What a user's path means.

    Args:
        path: a checkpoint's folder, a run's directory or its checkpoints folder (the newest good
            one), a model's folder, `embedded`, or a name on the hub.

    Raises:
        ConfigError: it is a folder of neither kind, or the checkpoint is damaged.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        return Subject(name=safe_name(Path(path).name), model=path)
    name = folder.resolve().name
    if (folder / _MODEL).is_file():
        return Subject(name=safe_name(name), model=str(folder))
    is_of_run = name == CHECKPOINTS or (folder / CHECKPOINTS).is_dir() or step_of(name) is not None
    if not (is_of_run or (folder / MANIFEST).is_file() or folder.is_file()):
        raise UsageError(
            f"{path}: neither a checkpoint, nor the directory of a run with {CHECKPOINTS}/, nor a "
            f"model's folder with {_MODEL}.\nName one of these, or a model on the hub."
        )
    found = checkpoint_at(folder)
    run = safe_name(str(found.manifest.config["run"]["name"]))
    return Subject(name=f"{run}_step_{found.manifest.step}", checkpoint=found)


def safe_name(text: str) -> str:
    """A text as one component of a path, which leads nowhere else."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:_NAME_CHARS].lstrip(".") or "model"
