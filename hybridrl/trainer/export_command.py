"""`hybridrl export`: a checkpoint as a folder that transformers and vLLM load."""

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.find import Found
from hybridrl.checkpoint.names import STATE
from hybridrl.config.choices import Accelerator, DType, Init
from hybridrl.config.schema import LoRAConfig, ModelConfig
from hybridrl.models.exported import is_export
from hybridrl.models.resolve import absolute_path, name_or_folder, plain_folder
from hybridrl.trainer.commands import EXIT_FAILED, UsageError, checkpoint_at, run_command

DESCRIPTION = """\
Write a checkpoint as an ordinary Hugging Face folder: weights as safetensors, config, tokenizer,
generation config. Adapters are merged, and stand beside it in peft's format (DIR/adapter).

  hybridrl export outputs/x model                              newest good checkpoint of a run
  hybridrl export outputs/x/checkpoints/step_00000020 model    that one

Needs neither GPU nor Ray. Host memory: 10 GB (two shards) or the model, whichever is less; with
adapters also the model that they adapt, 4 bytes a parameter.
"""
EPILOG = "Exit codes: 0 done, 1 failed, 2 a wrong flag, path or checkpoint, 130 Ctrl-C."


def main() -> None:
    """The command; leaves by SystemExit unless all goes well."""
    args = _parser().parse_args()
    run_command(lambda: export(args.checkpoint, args.folder, args.dtype, args.model))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hybridrl export",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="PATH", help="checkpoint or run directory")
    add("folder", type=Path, metavar="DIR", help="the folder to write; an earlier export of ours")
    add("--dtype", type=DType, choices=list(DType), default=DType.float32, help="(float32)")
    add("--model", metavar="PATH", help="the model that was trained, where it lies now")
    return parser


def export(checkpoint: Path, folder: Path, dtype: DType, base: str | None) -> None:
    """Write the checkpoint that a path means to a folder, and say what was written.

    Args:
        checkpoint: a checkpoint's folder, or a run's directory for its newest one.
        folder: where; an earlier export there is replaced.
        dtype: of the weights.
        base: the model that was trained, if it is not where the run had it.

    Raises:
        ConfigError: a path means nothing, the checkpoint is damaged, or the folder is in use.
        SystemExit: the disk did not take it.
    """
    start = time.perf_counter()
    folder = folder.expanduser().absolute()
    check_target(folder)
    found = checkpoint_at(checkpoint)
    try:
        tensors = write_checkpoint(found, folder, dtype, base)
    except OSError as error:
        sys.stderr.write(f"{folder} could not be written, nothing is left of it: {error}\n")
        sys.exit(EXIT_FAILED)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    sys.stdout.write(
        f"{folder}: step {found.manifest.step}, {tensors} tensors as {dtype.value}, "
        f"{size / 1e6:,.1f} MB in {time.perf_counter() - start:.1f} s\n"
    )


def write_checkpoint(found: Found, folder: Path, dtype: DType, base: str | None = None) -> int:
    """Write the policy of a checkpoint, which has been verified, to a folder.

    Args:
        found: the checkpoint.
        folder: replaced if it is there.
        dtype: of the weights.
        base: the model that was trained, if it is not where the run had it.

    Returns:
        How many tensors it has.

    Raises:
        ConfigError: there is no such model, or the checkpoint is of another one.
        OSError: the disk does not take it.
    """
    # What is wrong with the paths is said before these imports of seconds.
    from hybridrl.distributed.export import AdapterFiles, write_model
    from hybridrl.distributed.stored_policy import StoredPolicy
    from hybridrl.trainer.manifest import versions

    config = found.manifest.config
    model, lora = _model(config, base), _lora(config)
    drawn_on = Accelerator(config["hardware"]["accelerator"])
    policy = StoredPolicy(found.folder / STATE, model, lora, drawn_on)
    files = None
    if lora is not None:
        files = AdapterFiles(policy.adapters(), lora, name_or_folder(model))
    record = {
        "checkpoint": str(found.folder.resolve()),
        "step": found.manifest.step,
        "config_hash": found.manifest.config_hash,
        "dtype": dtype.value,
        "versions": versions(),
    }
    source = plain_folder(model.path)
    write_model(policy, source, folder, files, dtype=dtype, record=record)
    return len(policy.shapes)


def check_target(folder: Path) -> None:
    """Refuse to write where something else is.

    Raises:
        UsageError: it is a file, or a folder with other things than an earlier export.
    """
    if folder.is_dir() and not folder.is_symlink():
        if is_export(folder) or not any(folder.iterdir()):
            return
        found = "is not empty, and no earlier export"
    elif folder.exists() or folder.is_symlink():
        found = "is no folder"
    else:
        return
    raise UsageError(
        f"DIR = {folder}: {found}; nothing there is overwritten.\n"
        f"Name another folder, or remove this one: rm -r {folder}"
    )


def _model(config: Mapping[str, Any], base: str | None) -> ModelConfig:
    section = config["model"]
    path = section["path"] if base is None else absolute_path(base)
    return ModelConfig(path=path, init=Init(section["init"]), seed=section["seed"])


def _lora(config: Mapping[str, Any]) -> LoRAConfig | None:
    return None if config["lora"] is None else LoRAConfig(**config["lora"])
