"""Resume of a run from a checkpoint."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hybridrl.checkpoint import verification
from hybridrl.checkpoint.commit import quarantine
from hybridrl.checkpoint.files import DRIVER, checkpoints_folder, is_of_run, retried, steps_in
from hybridrl.checkpoint.find import Found, as_unreadable, named, newest_good
from hybridrl.checkpoint.manifest import DamagedCheckpoint
from hybridrl.checkpoint.verification import Verify
from hybridrl.config.changes import MISSING, changes
from hybridrl.config.checks.checkpoint import AUTO, NONE
from hybridrl.config.choices import Schedule
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import RunConfig
from hybridrl.trainer.checkpointing.base_models import Fingerprints, other_files
from hybridrl.trainer.record import Row
from hybridrl.trainer.state import LoopState, read_state
from hybridrl.trainer.tracking.provenance import plain, versions
from hybridrl.trainer.tracking.tracker import METRICS_FILE, read_metrics

log = logging.getLogger(__name__)

MAX_CHANGES_SHOWN = 6
NOT_TOLD = ("resume", "run.dry", "checkpoint.allow_config_changes", "hardware.reason")
OF_ENGINES = ("rollout.", "cluster.", "placement.")
# Unfinished responses cannot go on if one of these changes.
OF_RESPONSES = ("rollout.responses_per_prompt", "rollout.max_response_tokens")


@dataclass(frozen=True)
class Resume:
    """Verified checkpoint that a run resumes from, metrics up to it, and notes for the user."""

    found: Found
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
        for moved in quarantine(run_dir, self.found):
            log.warning("%s is kept; only resume=<path> uses it", moved)

    def lines(self) -> list[tuple[str, str]]:
        """Describe the checkpoint for the run's header."""
        manifest = self.found.manifest
        what = f"{self.found.folder}: step {self.state.step}, of {manifest.created}"
        size = sum(record.size for record in manifest.files.values()) / 2**20
        state = f"weights, optimizers, data order and counters, {size:,.1f} MiB"
        told = f"metrics continue after step {self.state.step}"
        notes = [("", note) for note in self.notes]
        return [("resume", what), ("", f"{state}; {told}"), *notes]


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

    All checksums are compared. Newer damaged checkpoints are skipped; `Found.damaged` names them.

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
        found = _find(config, run_dir, verify)
        if found is None:
            return None
        state = _state(found)
        rows = _rows(run_dir, found, state)
    before = found.manifest
    changed = changes(before.config, plain(config), other_files(before.models, models))
    mattering = [str(change) for change in changed if change.matters]
    other_data = _other_prompts(state.prompts, prompts)
    mattering += other_data
    if mattering and not config.checkpoint.allow_config_changes:
        listed = "\n".join(f"  {text}" for text in mattering)
        raise ConfigError(
            f"resume = {found.folder} was made with another config, model, data or code:\n"
            f"{listed}\nThe results would differ from those of the steps so far.\n"
            f"Revert these changes, or set checkpoint.allow_config_changes=true."
        )
    free = [c for c in changed if not c.matters and c.key not in NOT_TOLD]
    # Engines and their limits decide which responses a step trains.
    in_parts = config.rollout.schedule is not Schedule.sync
    of_engines = [str(c) for c in free if in_parts and c.key.startswith(OF_ENGINES)]
    notes = [
        *_notes(config, found, state, rows),
        *_listed("changed, as allowed", mattering),
        *_listed("changed, with other responses cut", of_engines),
        *_listed(
            "changed, without effect on the results",
            [text for text in map(str, free) if text not in of_engines],
        ),
        *_listed("other versions", _other_versions(before.versions, versions())),
    ]
    # A later run with partial would train them, however old, or under prompts of other data.
    why = ["the training data changed"] * bool(other_data)
    why += [f"{change.key} changed" for change in changed if change.key in OF_RESPONSES]
    why += [] if in_parts else ["sync drops them"]
    if state.in_flight and why:
        told = f"{len(state.in_flight)} prompts in flight are not trained"
        notes.append(f"{told}: {' and '.join(why)}")
        state = replace(state, in_flight=[])
    return Resume(found, state, rows, notes)


def _find(config: RunConfig, run_dir: Path, verify: Verify) -> Found | None:
    if config.resume == NONE:
        _refuse_used(run_dir)
        return None
    if config.resume == AUTO:
        there = run_dir.is_dir()
        return newest_good(run_dir, verify) if there else None
    found = named(Path(config.resume), verify=verify)
    if not is_of_run(found.folder, run_dir):
        _refuse_used(run_dir)
    return found


def _state(found: Found) -> LoopState:
    try:
        return retried(lambda path: read_state(path.parent), found.folder / DRIVER)
    except DamagedCheckpoint as error:
        raise ConfigError(f"resume = {error}.\nName another checkpoint.") from error


def _rows(run_dir: Path, found: Found, state: LoopState) -> list[Row]:
    """Read the metrics up to the checkpoint, of the run that wrote it."""
    source = found.folder.parent.parent  # checkpoints/ may be a link to another disk
    known = read_metrics(source / METRICS_FILE) or read_metrics(run_dir / METRICS_FILE)
    return [row for row in known if (row["step"] or 0) <= state.step]


def _notes(config: RunConfig, found: Found, state: LoopState, rows: list[Row]) -> list[str]:
    notes = [f"{damaged}; it was quarantined" for damaged in found.damaged]
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


def _listed(what: str, texts: list[str]) -> list[str]:
    """Describe changes in one line, if there are any."""
    more = len(texts) - MAX_CHANGES_SHOWN
    end = f" and {more} more" if more > 0 else ""
    return [f"{what}: {'; '.join(texts[:MAX_CHANGES_SHOWN])}{end}"] if texts else []
