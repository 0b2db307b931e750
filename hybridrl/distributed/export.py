"""Writing a trained model as an ordinary Hugging Face folder."""

import json
import os
import shutil
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from torch import Tensor

# What stands beside the weights: tokenizer, chat template, generation config.
COPIED_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")


def write_hf_folder(weights: dict[str, Tensor], source: Path, target: Path) -> None:
    """Write weights with the configuration and tokenizer of the model they came from.

    The folder appears under its name only when it is complete; one that was there is replaced.

    Args:
        weights: float32, by checkpoint name.
        source: folder of the model that was loaded.
        target: the folder to write.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.suffix in COPIED_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, partial / path.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_torch_state_dict(weights, partial, metadata={"format": "pt"})
    if target.exists():
        shutil.rmtree(target)
    os.rename(partial, target)
