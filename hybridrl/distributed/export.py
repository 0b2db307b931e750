"""Writing a trained model as an ordinary Hugging Face folder, and adapters as peft reads them."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor

from hybridrl.config.schema import LoRAConfig

# Where adapters lie in the folder of the model that they were merged into.
ADAPTER_FOLDER = "adapter"
# What stands beside the weights: tokenizer, chat template, generation config.
COPIED_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")


@dataclass(frozen=True)
class AdapterFiles:
    """What peft needs of adapters.

    Attributes:
        weights: float32, by peft's names.
        lora: their rank, scale and layers.
        base: a name or folder of the model that they adapt.
    """

    weights: dict[str, Tensor]
    lora: LoRAConfig
    base: str

    def write(self, folder: Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors into a new folder."""
        # Takes half a second, which only the end of a run with adapters should pay.
        from peft import LoraConfig

        folder.mkdir()
        LoraConfig(
            r=self.lora.rank,
            lora_alpha=self.lora.alpha,  # type: ignore[arg-type]
            target_modules=self.lora.target_modules,
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.base,
            inference_mode=True,
        ).save_pretrained(str(folder))
        save_file(self.weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def write_hf_folder(
    weights: dict[str, Tensor], source: Path, target: Path, adapter: AdapterFiles | None = None
) -> None:
    """Write weights with the configuration and tokenizer of the model they came from.

    The folder appears under its name only when it is complete; one that was there is replaced.

    Args:
        weights: float32, by checkpoint name.
        source: folder of the model that was loaded.
        target: the folder to write.
        adapter: adapters that are merged into `weights`; they are written to target/adapter.
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
    if adapter is not None:
        adapter.write(partial / ADAPTER_FOLDER)
    if target.exists():
        shutil.rmtree(target)
    os.rename(partial, target)
