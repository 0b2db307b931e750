"""Resume of a run from a checkpoint."""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hybridrl.checkpoint import verification
from hybridrl.checkpoint.commit import quarantine
from hybridrl.checkpoint.files import DRIVER, checkpoints_folder, is_of_run, retried, steps_in
from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.checkpoint.verification import (
    VerifiedCheckpoint,
    Verify,
    as_unreadable,
    named,
    newest_good,
)
from hybridrl.config.changes import MISSING, changes
from hybridrl.config.checks.checkpoint import AUTO, NONE
from hybridrl.config.choices import IN_PARTS
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import RunConfig
from hybridrl.models.fingerprints import Fingerprints, other_files
from hybridrl.trainer.record import Row
from hybridrl.trainer.state import LoopState, read_state
from hybridrl.trainer.tracking.provenance import plain, versions
from hybridrl.trainer.tracking.tracker import METRICS_FILE, read_metrics

log = logging.getLogger(__name__)

MAX_CHANGES_SHOWN = 6
# Keys whose changes are not reported.
UNREPORTED = ("resume", "run.dry", "checkpoint.allow_config_changes", "hardware.reason")
# Their changes decide how engines divide the prompts.
OF_ENGINES = ("rollout.", "cluster.", "placement.")
# Unfinished responses cannot go on if one of these changes.
OF_RESPONSES = ("rollout.responses_per_prompt", "rollout.max_response_tokens")


@dataclass(frozen=True)
class Resume:
    """Verified checkpoint that a run resumes from, metrics up to it, and notes for the user."""

    checkpoint: VerifiedCheckpoint
    state: LoopState
    rows: list[Row]
    notes: list[str]

    @property
    def last_accuracy(self) -> float:
        """Last measured held-out accuracy; NaN without one."""
        known = [value for row in self.rows if (value := row.get("eval/accuracy")) is not None]
        return known[-1] if known else math.nan

    def quarantine(self, run_dir: Path) -> None:
        """Quarantine the run's checkpoints that it will not descend from; after all checks.

        Raises:
            OSError: a rename failed.
        """
        for moved in quarantine(run_dir, self.checkpoint):
            log.warning("%s is kept; only resume=<path> uses it", moved)

    def lines(self) -> list[tuple[str, str]]:
        """Describe the checkpoint for the run's header."""
        manifest = self.checkpoint.manifest
        size = sum(record.size for record in manifest.files.values()) / 2**20
        return [
            ("resume", f"{self.checkpoint.folder}: step {self.state.step}, of {manifest.created}"),
            (
                "",
                f"weights, optimizers, data order and counters, {size:,.1f} MiB; metrics continue "
                f"after step {self.state.step}",
            ),
            *(("", note) for note in self.notes),
        ]


def described(resume: Resume | None, config: RunConfig, run_dir: Path) -> list[tuple[str, str]]:
    """Describe where a run goes on, or that it cannot; nothing of a run that does not resume."""
    if resume is None and config.resume == AUTO:
        where = checkpoints_folder(run_dir)
        return [("resume", f"no checkpoint in {where}: starts at step 0")]
    return [] if resume is None else resume.lines()


def find_resume(
    config: RunConfig,
    run_dir: Path,
    models: Fingerprints,
    prompts: Mapping[str, str],
    verify: Verify = verification.verify,
) -> Resume | None:
    """Find and verify the checkpoint of `resume`; None for a new run. Nothing is written.

    All checksums are compared. Newer checkpoints that are damaged are skipped.

    Args:
        config: the run.
        run_dir: its directory, which may not exist yet.
        models: fingerprints of base models and own code.
        prompts: fingerprints of the training prompts.
        verify: verifies a checkpoint.

    Raises:
        ConfigError: no checkpoint at the path, all damaged or unreadable, another format, a changed
            config, model or prompts that matter, or a new run in a directory with checkpoints.
    """
    with as_unreadable():
        checkpoint = _find(config, run_dir, verify)
        if checkpoint is None:
            return None
        state = _state(checkpoint)
        rows = _rows(run_dir, checkpoint, state)
    before = checkpoint.manifest
    changed = changes(before.config, plain(config), other_files(before.models, models))
    other_data = _other_prompts(state.prompts, prompts)
    mattering = [str(change) for change in changed if change.matters] + other_data
    if mattering and not config.checkpoint.allow_config_changes:
        listed = "\n".join(f"  {text}" for text in mattering)
        raise ConfigError(
            f"resume = {checkpoint.folder} was made with another config, model, data or code:\n"
            f"{listed}\nThe results would differ from those of the steps so far.\n"
            f"Revert these changes, or set checkpoint.allow_config_changes=true."
        )
    in_parts = config.rollout.schedule in IN_PARTS
    free = [c for c in changed if not c.matters and c.key not in UNREPORTED]
    # Engines and their limits decide which responses a step trains.
    of_engines = [c for c in free if in_parts and c.key.startswith(OF_ENGINES)]
    without_effect = [c for c in free if c not in of_engines]
    notes = [
        *_notes(config, checkpoint, state, rows),
        *_listed("changed, as allowed", mattering),
        *_listed("changed, with other responses cut", map(str, of_engines)),
        *_listed("changed, without effect on the results", map(str, without_effect)),
        *_listed("other versions", _other_versions(before.versions, versions())),
    ]
    # A later run with partial would train them, however old, or under prompts of other data.
    why = ["the training data changed"] * bool(other_data)
    why += [f"{change.key} changed" for change in changed if change.key in OF_RESPONSES]
    why += [] if in_parts else [f"{config.rollout.schedule} drops them"]
    if state.in_flight and why:
        dropped = f"{len(state.in_flight)} prompts in flight are not trained"
        notes.append(f"{dropped}: {' and '.join(why)}")
        state = replace(state, in_flight=[])
    return Resume(checkpoint, state, rows, notes)


def _find(config: RunConfig, run_dir: Path, verify: Verify) -> VerifiedCheckpoint | None:
    if config.resume == AUTO:
        return newest_good(run_dir, verify) if run_dir.is_dir() else None
    checkpoint = None
    if config.resume != NONE:
        checkpoint = named(Path(config.resume), verify=verify)
    if checkpoint is None or not is_of_run(checkpoint.folder, run_dir):
        _refuse_used(run_dir)
    return checkpoint


def _state(checkpoint: VerifiedCheckpoint) -> LoopState:
    try:
        return retried(lambda path: read_state(path.parent), checkpoint.folder / DRIVER)
    except DamagedCheckpoint as error:
        raise ConfigError(f"resume = {error}.\nName another checkpoint.") from error


def _rows(run_dir: Path, checkpoint: VerifiedCheckpoint, state: LoopState) -> list[Row]:
    """Read the metrics up to the checkpoint, of the run that wrote it."""
    source = checkpoint.folder.parent.parent  # checkpoints/ may be a link to another disk
    known = read_metrics(source / METRICS_FILE) or read_metrics(run_dir / METRICS_FILE)
    return [row for row in known if (row["step"] or 0) <= state.step]


def _notes(
    config: RunConfig, checkpoint: VerifiedCheckpoint, state: LoopState, rows: list[Row]
) -> list[str]:
    notes = [f"{damaged}; it was quarantined" for damaged in checkpoint.damaged]
    first = 0 if config.eval.before_training else 1
    missing = sorted({*range(first, state.step + 1)} - {int(row["step"] or 0) for row in rows})
    if missing:
        notes.append(f"{METRICS_FILE} lacks {len(missing)} of these steps, from {missing[0]} on")
    total = config.trainer.total_steps
    if state.step >= total:
        notes.append(f"all {total} steps are done (trainer.total_steps): nothing is left to train")
    return notes


def _refuse_used(run_dir: Path) -> None:
    steps = steps_in(checkpoints_folder(run_dir))
    if steps:
        raise ConfigError(
            f"hydra.run.dir = {run_dir} holds a run with checkpoints, the newest of step "
            f"{steps[-1]}: a new run would mix its checkpoints with these.\n"
            f"Set resume=auto to continue that run, or another hydra.run.dir."
        )


def _other_prompts(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describe changes of the training prompts (`PromptSource.fingerprint`)."""
    if before["tokens"] != now["tokens"]:
        return ["data: other training prompts (files, tokenizer or chat template)"]
    if before["rows"] != now["rows"]:
        return ["data: other answers or other columns of the training prompts, which are the same"]
    return []


def _other_versions(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describe changed versions of packages that influence a run's numbers."""
    return [
        f"{name} {before.get(name, MISSING)} then, {now.get(name, MISSING)} now"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _listed(what: str, changed: Iterable[str]) -> list[str]:
    """Describe changes in one line, if there are any."""
    texts = list(changed)
    more = len(texts) - MAX_CHANGES_SHOWN
    end = f" and {more} more" if more > 0 else ""
    return [f"{what}: {'; '.join(texts[:MAX_CHANGES_SHOWN])}{end}"] if texts else []
