"""Results of a save, by which the driver learns that the ranks are done. Imports no torch."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridrl.checkpoint.manifest import FileRecord

logger = logging.getLogger(__name__)

# Results of a finished save, in its folder: the driver needs no worker to find them.
RESULTS = "saved.json"


@dataclass(frozen=True)
class SaveResult:
    """Result of a save on this rank.

    `files` are named relative to the checkpoint; none after an `error`, the disk error of any rank,
    the same on all. Writing in the background took `seconds`.
    """

    files: dict[str, FileRecord]
    seconds: float
    error: str | None


def write_results(folder: Path, results: list[SaveResult]) -> None:
    """Write the results of all ranks; a disk error is only logged."""
    part = folder / f"{RESULTS}.part"
    try:
        part.write_text(json.dumps([asdict(result) for result in results]))
        part.rename(folder / RESULTS)
    except OSError as error:  # `finish_save` returns them
        logger.warning("the results of a save could not be written: %s", error)


def read_results(folder: Path) -> list[SaveResult] | None:
    """Return the results of the save into a folder, by rank; None while it runs."""
    try:
        ranks = json.loads((folder / RESULTS).read_text())
    except FileNotFoundError:
        return None
    return [
        SaveResult(**rank | {"files": {k: FileRecord(**v) for k, v in rank["files"].items()}})
        for rank in ranks
    ]


def remove_results(folder: Path) -> None:
    """Remove the results of a save: they are no part of a checkpoint."""
    for name in (RESULTS, f"{RESULTS}.part"):
        (folder / name).unlink(missing_ok=True)
