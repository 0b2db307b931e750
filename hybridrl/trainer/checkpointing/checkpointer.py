"""Asynchronous checkpoints: begun at the end of a step, committed when all shards are on disk.

    step k     copy the state to host memory; training continues  begin
    meanwhile  every rank writes its shards in the background
    then       all ranks are done: manifest, rename, retention    a thread here; so a checkpoint
               counts as soon as it is whole, however long the next step takes
    meanwhile  a thread removes the files of pruned checkpoints

One save runs at a time: the next waits for it and for the removals. A disk error costs only that
checkpoint: the run continues with a warning and keeps the earlier ones.
"""

import difflib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Lock

from hybridrl.checkpoint import commit
from hybridrl.checkpoint.files import DRIVER, checkpoints_folder, is_of_run, step_of, write_file
from hybridrl.checkpoint.manifest import DamagedCheckpoint, FileRecord, Manifest
from hybridrl.checkpoint.saved import SaveResult, read_results, remove_results
from hybridrl.checkpoint.verification import VerifiedCheckpoint, digest
from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.distributed.background import run_in_background
from hybridrl.models.fingerprints import Fingerprints
from hybridrl.trainer.record import Observer, StepRecord, is_due
from hybridrl.trainer.state import LoopState
from hybridrl.trainer.tracking.provenance import plain, versions

log = logging.getLogger(__name__)

Row = Mapping[str, float | None]
# Seconds between two looks of the committing thread.
LOOK_S = 0.2
UNREMOVED = "old checkpoints could not be removed: {}"


@dataclass
class PendingSave:
    """Checkpoint of a step that is being written into `partial`.

    `row` has the step's metrics; None: not reported yet. `ended`: the writing is over.
    """

    partial: Path
    step: int
    driver: FileRecord
    row: Row | None
    ended: Event = field(default_factory=Event)


class Checkpointer(Observer):
    """Asynchronous writer of a run's checkpoints.

    All nodes share `run_dir`. `sync` flushes metrics to disk: no checkpoint is newer than they are.

    Attributes:
        failures: number of lost checkpoints.
        newest: the last committed one; None: none yet.
        write_s: seconds of its writing.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        saver: WorkerGroup,
        sync: Callable[[], None],
        warn: Callable[[str], None],
        models: Fingerprints,
    ) -> None:
        self.failures = 0
        self.newest: Path | None = None
        self.write_s: float | None = None
        self._config = config
        self._plain_config = plain(config)
        self._versions = versions()
        self._models = {key: dict(files) for key, files in models.items()}
        self._run_dir = run_dir
        self._saver = saver
        self._sync = sync
        self._warn = warn
        self._removal: Future[None] | None = None
        self._writing: PendingSave | None = None
        # Held during a commit.
        self._lock = Lock()
        self._watching: Future[None] | None = None
        # Last reported step, and its metrics.
        self._last: tuple[int, Row] = (-1, {})
        self._lacked_best = False
        folder = checkpoints_folder(run_dir)
        if folder.is_dir():  # leftovers of a killed run may be large
            try:
                commit.clean(folder)
            except OSError as error:
                warn(f"leftovers of an earlier run in {folder} could not be removed: {error}")

    def step_ended(self) -> None:
        """Record the random generators' state, for a checkpoint within the next step."""
        if self._config.checkpoint.every_steps:
            self._saver.call("note_generators")

    def is_due(self, step: int) -> bool:
        """Return true if a checkpoint is due after a step."""
        every, last = self._config.checkpoint.every_steps, self._config.trainer.total_steps
        return is_due(every, step) or (every > 0 and step == last)

    def save_now(self, state: LoopState) -> Path | None:
        """Save and wait; return the checkpoint of the step, None if it failed."""
        self.finish()
        if not self._has_written(state.step):
            self.begin(state)
            self.finish()
        return self.newest if self._has_written(state.step) else None

    def _has_written(self, step: int) -> bool:
        """Return whether the newest checkpoint is of this step, and not that of another run."""
        newest = self.newest
        if newest is None or not is_of_run(newest, self._run_dir):
            return False
        return step_of(newest.name) == step

    def load(self, checkpoint: VerifiedCheckpoint) -> list[str]:
        """Load a checkpoint into the workers; return notes on differences."""
        notes: list[str] = self._saver.call("load", str(checkpoint.folder))[0]
        self.newest = checkpoint.folder
        return notes

    def load_generators(self) -> None:
        """Restore the ranks' random generators again, because resuming has drawn from them."""
        self._saver.call("load_generators", str(self.newest))

    def begin(self, state: LoopState) -> None:
        """Copy the state and start writing it, after the save before has ended."""
        self.finish()
        step = state.step
        partial = None
        try:
            partial = commit.begin(self._run_dir, step)
            write_file(partial / DRIVER, state.encode())
            driver = digest(partial / DRIVER)
        except OSError as error:
            self._failed(step, str(error), partial)
            return
        self._saver.call("begin_save", str(partial))
        last_step, row = self._last
        writing = PendingSave(partial, step, driver, row if last_step == step else None)
        self._writing = writing
        self._watching = run_in_background(self._watch, writing, name="commit checkpoint")

    def after(self, record: StepRecord) -> StepRecord:
        """Note the step's metrics, also for the pending save of that step."""
        self._last = (record.step, record.metrics)
        writing = self._writing  # which the committing thread may drop
        if writing is not None and writing.step == record.step:
            writing.row = record.metrics
        return record

    def poll(self) -> None:
        """Commit the pending save if all ranks are done; calls no worker."""
        with self._lock:
            writing = self._writing
            results = None if writing is None else _results_of(writing)
            if writing is not None and results is not None:
                self._writing = None
                writing.ended.set()
                self._end(writing, results)
            self._report_removal(wait=False)

    def finish(self) -> None:
        """Wait for the pending save and commit it; wait for removals, too."""
        if (writing := self._taken()) is not None:
            self._end(writing, self._saver.call("finish_save"))
        if self._watching is not None:
            self._watching.result()
        self._report_removal(wait=True)

    def close(self) -> None:
        """Give up the pending save unless it is whole."""
        self.poll()
        self._taken()

    def _taken(self) -> PendingSave | None:
        """Take the pending save from the committing thread, after a commit that it has begun."""
        with self._lock:
            writing, self._writing = self._writing, None
        if writing is not None:
            writing.ended.set()
        return writing

    def _watch(self, writing: PendingSave) -> None:
        """Commit a save as soon as all ranks are done."""
        while not writing.ended.wait(LOOK_S):
            self.poll()

    def write_state(self, folder: Path) -> None:
        """Write the workers' state into a new folder, synchronously.

        Raises:
            OSError: the write failed.
        """
        self.finish()
        folder.mkdir(parents=True)
        self._saver.call("begin_save", str(folder))
        error = self._saver.call("finish_save")[0].error
        if error is not None:
            raise OSError(error)
        remove_results(folder)

    def _end(self, writing: PendingSave, results: list[SaveResult]) -> None:
        error = results[0].error or self._commit(writing, results)
        if error is not None:
            self._failed(writing.step, error, writing.partial)
            return
        self._look_for_best(writing)
        keep_last, best = self._config.checkpoint.keep_last, self._config.checkpoint.keep_best
        try:
            commit.prune(self._run_dir, keep_last, best)
        except OSError as failure:
            self._warn(UNREMOVED.format(failure))
        folder = checkpoints_folder(self._run_dir)
        self._removal = run_in_background(commit.finish_deletions, folder, name="removal")

    def _report_removal(self, *, wait: bool) -> None:
        """Warn of a failed removal, once; `wait` for one that still runs."""
        if self._removal is not None and (wait or self._removal.done()):
            removal, self._removal = self._removal, None
            if (failure := removal.exception()) is not None:
                self._warn(UNREMOVED.format(failure))

    def _look_for_best(self, writing: PendingSave) -> None:
        """Warn once if a due checkpoint lacks the metric of checkpoint.keep_best."""
        best = self._config.checkpoint.keep_best
        if best is None or self._lacked_best or not self.is_due(writing.step):
            return
        name = best.removeprefix("-")
        row = writing.row or {}
        if row.get(name) is not None:
            return
        self._lacked_best = True
        near = [] if name in row else difflib.get_close_matches(name, row, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        self._warn(
            f"checkpoint.keep_best = {best}: step {writing.step} has no such metric, so its "
            f"checkpoint, and those of later steps without it, are not kept as the best.{hint}"
        )

    def _commit(self, writing: PendingSave, results: list[SaveResult]) -> str | None:
        """Commit the checkpoint; return the error, or None."""
        files = {DRIVER: writing.driver}
        for result in results:
            files |= result.files
        manifest = Manifest(
            step=writing.step,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=self._plain_config,
            versions=self._versions,
            world_size=len(results),
            metrics=dict(writing.row or {}),
            files=files,
            models=self._models,
        )
        try:
            remove_results(writing.partial)
            self._sync()
            self.newest = commit.commit(writing.partial, manifest)
        except (OSError, DamagedCheckpoint) as error:
            return str(error)
        size = sum(record.size for record in files.values())
        self.write_s = max(result.seconds for result in results)
        log.debug("%s: %.2f GiB in %.1f s", self.newest, size / 2**30, self.write_s)
        return None

    def _failed(self, step: int, why: str, partial: Path | None) -> None:
        if partial is not None:
            commit.abandon(partial)
        self.failures += 1
        kept = f"the last one is {self.newest}" if self.newest else "there is none yet"
        self._warn(f"the checkpoint of step {step} could not be written: {why}; {kept}")


def _results_of(writing: PendingSave) -> list[SaveResult] | None:
    """Return the results of a save whose step has been reported; None while it runs."""
    try:
        return None if writing.row is None else read_results(writing.partial)
    except OSError:  # of a network file system, which may answer again
        return None
