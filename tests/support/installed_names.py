"""What the installed packages have: names, and keys of what vLLM compiles."""

from importlib import import_module


def missing(names):
    """Return the modules' attributes that the installed packages lack, each with a reason.

    A pair may name several. A field of a dataclass without a default is not an attribute of the
    class, but annotated.
    """
    found = []
    for module, path in [(module, path) for module, paths in names for path in paths.split()]:
        try:
            owner = import_module(module)
        except ImportError as error:
            found.append(f"{module}: {error}")
            continue
        for part in path.split("."):
            if not hasattr(owner, part) and part not in getattr(owner, "__annotations__", {}):
                found.append(f"{module}.{path}")
                break
            owner = getattr(owner, part, None)
    return found


def cache_keys():
    """Return vLLM's keys of compiled code for two lists of sizes of CUDA graphs."""
    from vllm.config import CompilationConfig

    sizes = [1, 2], [1, 2, 4]
    return [CompilationConfig(cudagraph_capture_sizes=one).compute_hash() for one in sizes]
