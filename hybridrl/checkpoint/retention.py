"""Which checkpoints stay: the newest, the best, and the one that `latest` names.

Decided from what is on disk alone, so a run that resumes keeps what the one before it would. The
others lose their names at once; their files, which may be many gigabytes, go in a thread.
"""

import os
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

from hybridrl.checkpoint import latest
from hybridrl.checkpoint.errors import DamagedCheckpoint
from hybridrl.checkpoint.leftovers import finish_deletions, restore_replaced, steps_in
from hybridrl.checkpoint.manifest import Manifest
from hybridrl.checkpoint.names import REMOVED, checkpoints_folder, hidden_name, step_name
from hybridrl.checkpoint.reading import UnreadableFile
from hybridrl.checkpoint.verification import verify


def prune(run_dir: Path, keep_last: int, best: str | None = None, keep_best: int = 1) -> list[Path]:
    """Take the names of the checkpoints of a run that nobody asked to keep.

    A checkpoint whose manifest is damaged or cannot be read, or whose files lack or have another
    size, neither counts nor goes. Deletion is this rename, and then a removal (`Removal`,
    `finish_deletions`): no half of one is ever found.

    Args:
        run_dir: the run's directory.
        keep_last: how many of the newest stay; 0 keeps all.
        best: a metric by which the best stay, too, larger is better; "-name" if smaller is. Ties
            go to the newer one; checkpoints without that metric do not compete.
        keep_best: how many of the best stay.

    Returns:
        The folders that are gone by these names, oldest first.

    Raises:
        OSError: the folder cannot be read, or something not be renamed; what stays is whole.
    """
    assert keep_last >= 0 and keep_best >= 0, (keep_last, keep_best)
    folder = checkpoints_folder(run_dir)
    restore_replaced(folder)
    if keep_last == 0:
        return []
    complete = _complete(folder)
    kept = set(sorted(complete)[-keep_last:])
    if best is not None:
        kept.update(best_steps(complete, best)[:keep_best])
    gone = sorted(complete.keys() - kept - {latest.named_step(folder)})
    for step in gone:
        os.rename(folder / step_name(step), folder / hidden_name(step, REMOVED))
    return [folder / step_name(step) for step in gone]


class Removal:
    """Removes from the disk, in a thread, what `prune` has taken the names of.

    A process that ends meanwhile does not wait for it: whoever saves there next ends it.

    Args:
        run_dir: the run's directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = checkpoints_folder(run_dir)
        self._ended: Future[None] | None = None

    def begin(self) -> None:
        """Begin to remove; the one before has been waited for."""
        assert self._ended is None or self._ended.done(), "one removal at a time"
        ended: Future[None] = Future()
        self._ended = ended
        Thread(target=self._run, args=(ended,), name="removal", daemon=True).start()

    def failure(self, *, wait: bool) -> OSError | None:
        """Why it has failed, once; None: it has not, or it is not at its end yet.

        Args:
            wait: until it is.
        """
        if self._ended is None or not (wait or self._ended.done()):
            return None
        ended, self._ended = self._ended, None
        try:
            ended.result()
        except OSError as failure:
            return failure
        return None

    def _run(self, ended: Future[None]) -> None:
        try:
            finish_deletions(self._folder)
        except BaseException as error:  # is raised or told where it is waited for
            ended.set_exception(error)
        else:
            ended.set_result(None)


def best_steps(manifests: dict[int, Manifest], metric: str) -> list[int]:
    """Steps of the checkpoints that have a metric, best first; see `prune`."""
    name = metric.removeprefix("-")
    sign = -1.0 if metric.startswith("-") else 1.0
    scores = []
    for step, manifest in manifests.items():
        value = manifest.metrics.get(name)
        if value is not None:
            scores.append((sign * value, step))
    return [step for _, step in sorted(scores, reverse=True)]


def _complete(folder: Path) -> dict[int, Manifest]:
    found = {}
    for step in steps_in(folder):
        try:
            found[step] = verify(folder / step_name(step), checksums=False)
        except (DamagedCheckpoint, UnreadableFile):
            continue
    return found
