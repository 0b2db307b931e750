"""Files of own code: the one that a name of the config stands for, and those beside it."""

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridrl.config.user_code.files import module_of


def source_files(path: str) -> dict[str, Path]:
    """Return the files of the code at `path`, by name; none of hybridrl's own and built-in names.

    They are the file of its module, and those of the same folder that it imports, or that these
    import. The module must be importable (`locate`).
    """
    name = module_of(path)
    if not name or name.partition(".")[0] == "hybridrl":
        return {}
    first = importlib.import_module(name)
    folder, found, waiting = _file(first).parent, dict[str, Path](), [first]
    while waiting:
        module = waiting.pop()
        file = _file(module)
        if file.parent == folder and file.is_file() and file.name not in found:
            found[file.name] = file
            waiting += _imported(module)
    return found


def _file(module: ModuleType) -> Path:
    """Return a module's file; a path that does not exist for modules of Python itself."""
    return Path(vars(module).get("__file__") or module.__name__).absolute()


def _imported(module: ModuleType) -> Iterator[ModuleType]:
    """Yield the modules that a module names, and those of its functions and classes."""
    for value in list(vars(module).values()):
        known: Any = inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value)
        if known and (other := inspect.getmodule(value)) is not None:
            yield other
