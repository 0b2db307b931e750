"""Subject of an evaluation: a checkpoint of a run, or a model in Hugging Face format."""

import re
from dataclasses import dataclass
from pathlib import Path

from hybridrl.checkpoint.find import Found
from hybridrl.checkpoint.names import CHECKPOINTS, MANIFEST, step_of
from hybridrl.commands.running import UsageError, checkpoint_at

_MODEL = "config.json"
# Longest name; file systems allow 255 bytes.
_NAME_CHARS = 100


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
