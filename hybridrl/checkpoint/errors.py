"""What is wrong with a checkpoint."""

from pathlib import Path


class DamagedCheckpoint(ValueError):
    """A checkpoint is not what was written, or never was one.

    Attributes:
        folder: of the checkpoint.
        file: the file at fault, by its path in the folder.
        reason: what was found and what was expected, to be read after the file's name.
    """

    def __init__(self, folder: Path, file: str, reason: str) -> None:
        super().__init__(folder, file, reason)
        self.folder = folder
        self.file = file
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.folder}: {self.file} {self.reason}"
