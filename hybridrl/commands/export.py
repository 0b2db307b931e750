"""`hybridrl export`: writes a checkpoint as a folder for transformers and vLLM."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.app.process import EXIT_FAILED
from hybridrl.checkpoint.files import CHECKPOINTS, STATE, promised_step, step_of
from hybridrl.checkpoint.verification import VerifiedCheckpoint
from hybridrl.commands.running import (
    UsageError,
    argument,
    checkpoint_at,
    parsed,
    report_removal,
    run_command,
    warn_about_changed_model,
)
from hybridrl.config.choices import Accelerator, DType, Init
from hybridrl.config.errors import ConfigError
from hybridrl.config.estimators import REWARD_LOSS
from hybridrl.config.schema import LoRAConfig, ModelConfig
from hybridrl.models.export_record import added_to, in_between, is_export
from hybridrl.models.resolve import absolute_path, name_or_folder, plain_folder

# Files that a message lists.
MAX_NAMED = 5

DESCRIPTION = """\
Write a checkpoint as an ordinary Hugging Face folder: weights as safetensors, config, tokenizer,
generation config. Adapters are merged, and also written in peft's format (DIR/adapter).

  hybridrl export outputs/x model                              newest good checkpoint of a run
  hybridrl export outputs/x/checkpoints/step_00000020 model    that one

Needs neither GPU nor Ray, and host memory for one tensor.
"""


def main() -> None:
    """Run the command; exits by SystemExit unless all goes well."""
    dtypes, target = list(DType), "the folder to write: new, empty or an earlier export"
    args = parsed(
        "export",
        DESCRIPTION,
        argument("checkpoint", type=Path, metavar="PATH", help="checkpoint or run directory"),
        argument("folder", type=Path, metavar="DIR", help=target),
        argument("--dtype", type=DType, choices=dtypes, default=DType.float32, help="(float32)"),
        argument("--model", metavar="PATH", help="the base model, if it has moved"),
    )
    run_command(lambda: export(args.checkpoint, args.folder, args.dtype, args.model))


def export(path: Path, folder: Path, dtype: DType, base: str | None) -> None:
    """Export a checkpoint, or a run's newest one, to a folder, and print a summary.

    An earlier export in the folder is replaced. `base` is the base model's path, if it has moved.

    Raises:
        ConfigError: a path is wrong, the checkpoint is damaged, or the folder is in use.
    """
    start = time.perf_counter()
    folder = folder.expanduser().absolute()
    _check_target(folder)
    checkpoint = checkpoint_at(path)
    _check_policy(checkpoint.manifest.config)
    model = _model(checkpoint.manifest.config, base)
    _check_origin(folder, checkpoint.folder, plain_folder(model.path))
    warn_about_changed_model(checkpoint, model)
    try:
        with report_removal(checkpoint.folder):
            tensors = _write_checkpoint(checkpoint, folder, dtype, model)
    except OSError as error:
        problem = f"{folder} could not be written, and was removed"
        if not _is_write_error(error, folder):
            problem = f"{folder} was not written, as its source could not be read"
        sys.stderr.write(f"{problem}: {error}\n")
        sys.exit(EXIT_FAILED)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    sys.stdout.write(
        f"{folder}: step {checkpoint.manifest.step}, {tensors} tensors as {dtype.value}, "
        f"{size / 1e6:,.1f} MB in {time.perf_counter() - start:.1f} s\n"
    )


def _write_checkpoint(
    checkpoint: VerifiedCheckpoint, folder: Path, dtype: DType, model: ModelConfig
) -> int:
    """Write the policy of a verified checkpoint to a folder; return the number of tensors."""
    # Problems of the paths are reported before these slow imports.
    from hybridrl.distributed.storage.export import AdapterFiles, write_model
    from hybridrl.distributed.storage.policy_weights import StoredPolicy
    from hybridrl.trainer.tracking.provenance import versions

    config = checkpoint.manifest.config
    lora = None if config["lora"] is None else LoRAConfig(**config["lora"])
    drawn_on = Accelerator(config["hardware"]["accelerator"])
    try:
        policy = StoredPolicy(checkpoint.folder / STATE, model, lora, drawn_on)
    except OSError as error:  # errors of transformers contain no path
        raise ConfigError(f"model.path = {model.path} could not be read: {error}") from error
    files = None
    if lora is not None:  # else the model's weights need not be there
        files = AdapterFiles(policy.adapters(), lora, name_or_folder(model))
    record = {
        "checkpoint": str(checkpoint.folder.resolve()),
        "step": checkpoint.manifest.step,
        "config_hash": checkpoint.manifest.config_hash,
        "dtype": dtype.value,
        "versions": versions(),
    }
    write_model(policy, plain_folder(model.path), folder, files, dtype=dtype, record=record)
    return len(policy.shapes)


def _check_policy(config: Mapping[str, Any]) -> None:
    if config["algorithm"]["loss"]["function"] == REWARD_LOSS:
        raise ConfigError(
            f"the run trains a reward model (algorithm.loss.function = {REWARD_LOSS}), and its "
            f"checkpoints hold the policy as it was.\nTake <run>/final, which it writes at its end."
        )


def _check_target(folder: Path) -> None:
    """Refuse a file, or a folder with other files than an earlier export, as the target."""
    if folder.is_dir() and not folder.is_symlink():
        added = added_to(folder) if is_export(folder) else []
        if not added and (is_export(folder) or not any(folder.iterdir())):
            return
        reason = "is not empty and not an earlier export"
        if added:
            rest = f" and {len(added) - MAX_NAMED} more" if len(added) > MAX_NAMED else ""
            reason = f"has more than an earlier export: {', '.join(added[:MAX_NAMED])}{rest}"
    elif folder.exists() or folder.is_symlink():
        reason = "is not a folder"
    else:
        return
    raise _target_error(folder, reason)


def _check_origin(folder: Path, checkpoint: Path, base: Path) -> None:
    """Refuse the checkpoint's or the base model's folder as the target."""
    target, checkpoint, base = folder.resolve(), checkpoint.resolve(), base.resolve()
    above = {target, *target.parents}
    among = checkpoint.parent in above and checkpoint.parent.name == CHECKPOINTS
    in_some = any(step_of(p.name) is not None or promised_step(p.name) is not None for p in above)
    if among or in_some or checkpoint in above:
        raise _target_error(folder, "lies among a run's checkpoints")
    if target in (base, *base.parents):
        raise _target_error(folder, "contains the base model")


def _target_error(folder: Path, reason: str) -> UsageError:
    return UsageError(f"DIR = {folder}: {reason}, and is not overwritten.\nUse another folder.")


def _is_write_error(error: OSError, folder: Path) -> bool:
    """Return whether an error has a path in or above the target, or no path."""
    names = [Path(name) for name in (error.filename, error.filename2) if isinstance(name, str)]
    written = (folder, *in_between(folder))
    return not names or any(
        folder.is_relative_to(name) or any(name.is_relative_to(one) for one in written)
        for name in names
    )


def _model(config: Mapping[str, Any], base: str | None) -> ModelConfig:
    section = config["model"]
    path = section["path"] if base is None else absolute_path(base)
    init, seed = Init(section["init"]), section["seed"]
    return ModelConfig(path=path, init=init, seed=seed, trust_remote_code=False)
