"""`hybridrl resume`: goes on with a run in its folder, by the command that its manifest records."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hybridrl import main as training
from hybridrl.app.process import exit_codes
from hybridrl.app.runs import RunOnDisk, find_runs, run_at
from hybridrl.checkpoint.files import CHECKPOINTS, checkpoints_folder, steps_in
from hybridrl.commands.running import OVERRIDES, UsageError, argument, parsed
from hybridrl.commands.runs import FOLDERS
from hybridrl.config.changes import STEPS
from hybridrl.config.checks.checkpoint import AUTO
from hybridrl.config.checks.frozen_models import REWARD_MODEL_PATH, TEACHERS
from hybridrl.config.command.command_line import RUN_DIR
from hybridrl.config.command.input_errors import expanded
from hybridrl.config.command.overrides import quoted
from hybridrl.config.command.secrets import HIDDEN
from hybridrl.config.keys import leaves
from hybridrl.config.schema_keys import is_read, shared_by
from hybridrl.models.fingerprints import MODEL

LATEST = "latest"
EPOCHS = "trainer.epochs"
EPILOG = """\
Exit codes: those of hybridrl train. Changes that affect the results are refused as by resume=auto,
unless checkpoint.allow_config_changes=true.
"""
DESCRIPTION = """\
Go on with a run from its newest whole checkpoint (without one, from where it began), in its folder,
with the settings it was started with. Its command is taken from its manifest, so none needs to be
typed again.

  hybridrl resume latest                              the newest run in outputs/ and multirun/
  hybridrl resume gsm8k_ppo                           the run of that name (hybridrl runs)
  hybridrl resume outputs/x trainer.total_steps=60    with other settings

It may be called from anywhere: relative paths are seen from the directory the run was started in.
"""


def main() -> None:
    """Run the command; exits by SystemExit unless all goes well."""
    name = argument("run", metavar="RUN", help="folder or name of a run, or latest")
    args = parsed("resume", DESCRIPTION, name, OVERRIDES, epilog=EPILOG)
    with exit_codes():
        run = find_run(args.run)
        words = arguments(run, args.overrides)
        _enter_directory(run)
    sys.argv = [sys.argv[0], *words]
    training.main()


def find_run(name: str) -> RunOnDisk:
    """Return the run of a folder, of a name that `hybridrl runs` prints, or the latest.

    Raises:
        UsageError: there is none, or several have the name.
    """
    folder = expanded(name)
    if run := run_at(folder.resolve()):
        return run
    if CHECKPOINTS in folder.parts:
        raise UsageError(
            f"{name}: expected a run, this is inside one.\n"
            f"Name the run; resume={name} is a setting for a new run that begins there."
        )
    runs = find_runs(FOLDERS)
    named = runs[:1] if name == LATEST else [run for run in runs if run.name == name]
    if len(named) == 1:
        return named[0]
    if named:
        listed = "\n".join(f"  {run.folder}" for run in named)
        raise UsageError(f"{name}: {len(named)} runs have this name:\n{listed}\nType one of these.")
    raise UsageError(
        f"{name}: no run has this folder or name (seen from {Path.cwd()}).\n"
        f"hybridrl runs lists those in {' and '.join(f'{folder}/' for folder in FOLDERS)}; of "
        f"others type the folder."
    )


def arguments(run: RunOnDisk, overrides: Sequence[str]) -> list[str]:
    """Return the arguments of `hybridrl train` that go on with a run; `overrides` replace its own.

    Raises:
        UsageError: the manifest has no command, as after a start from Python with callbacks, or it
            has a secret, which manifests hide; or `overrides` name another folder.
    """
    if "overrides" not in run.manifest:
        raise UsageError(
            f"{run.folder}: its manifest records no command, as it was started from Python with a "
            f"whole config or callbacks.\n"
            f"Start it there again, with resume={AUTO} {RUN_DIR}={run.folder}"
        )
    own = [_as_started(str(override), run) for override in run.manifest["overrides"]]
    changed = {_key(override) for override in overrides}
    if RUN_DIR in changed:
        raise UsageError(
            f"{RUN_DIR}: a run is resumed in its folder.\n"
            f"To begin another one from its checkpoint: hybridrl train resume={run.folder} "
            f"{RUN_DIR}=<new folder> and its other settings."
        )
    new = changed | {"resume"}
    if any(_key(override) == "hardware.reason" for override in own):
        new |= {"hardware", "hardware.reason"}  # it was not chosen by the user
    if new & {STEPS, EPOCHS}:  # the new length takes the place of the old one
        new |= {STEPS, EPOCHS}
    # Keys of earlier versions that roles share now: the shared ones are overrides of their own.
    gone = {key for key in map(_key, own) if shared_by(key) is not None and not is_read(key)}
    kept = [override for override in own if _key(override) not in new | gone]
    hidden = [override for override in kept if HIDDEN in override]
    if hidden:
        listed = " ".join(f"{override.partition('=')[0]}=<value>" for override in hidden)
        raise UsageError(f"{run.folder} records no secrets.\nAdd {listed}")
    began = run.manifest.get("resumed_from")
    begin = quoted(began) if began and not steps_in(checkpoints_folder(run.folder)) else AUTO
    words = [*kept, *overrides, *([] if "resume" in changed else [f"resume={begin}"])]
    words.append(f"{RUN_DIR}={quoted(str(run.folder.resolve()))}")
    dirs = [each if "://" in each else f"file://{each}" for each in run.manifest["config_dirs"]]
    folders = [quoted(each) for each in dirs]
    return [*words, f"hydra.searchpath=[{','.join(folders)}]"] if folders else words


def _as_started(override: str, run: RunOnDisk) -> str:
    """Return an override; of a model's path, where a link such as outputs/latest pointed then."""
    key, config = _key(override), leaves(run.manifest["config"])
    if key == TEACHERS and (named := run.manifest["config"].get("teacher")):
        paths = named["models"]
        config[key] = paths
        if isinstance(paths, dict):
            pairs = ",".join(f"{name}:{quoted(path)}" for name, path in paths.items())
            return f"{override.partition('=')[0]}={{{pairs}}}"
    if key not in (MODEL, REWARD_MODEL_PATH, TEACHERS) or key not in config:
        return override
    return f"{override.partition('=')[0]}={quoted(config[key])}"


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _enter_directory(run: RunOnDisk) -> None:
    """Go where the run was started; if that is gone, stay here and say so."""
    directory = Path(run.manifest["directory"])
    try:
        os.chdir(directory)
    except OSError as error:
        sys.stderr.write(
            f"{directory}, where the run was started, cannot be entered ({error.strerror}): "
            f"relative paths are seen from {Path.cwd()}\n"
        )
