"""Files of user code, which the config names: `package.module.name` or `/path/my_reward.py:name`.

A file's module is named after its absolute path, with %2E for dots. So every process that imports
this file finds the module by its name alone, also to unpickle an object of one of its classes.
"""

import ast
import dataclasses
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridrl.config.errors import ConfigError, Problem

# Last word of keys that name code, and a key with a built-in name or own code.
NAMES_CODE = ("function", "worker")
ESTIMATOR = "algorithm.advantage"
CALLBACKS = "trainer.callbacks"
# Forms of a name, for messages.
FORMS = "my_package.my_module.my_name or /path/my_file.py:my_name"
_ENDING = ".py"
INSTALLED = ("site-packages", "dist-packages")


def names_code(key: str) -> bool:
    """Return whether a dotted key names code, of a list also that of an entry (`function.0`)."""
    start, _, last = key.rpartition(".")
    key = start if last.isdecimal() else key
    return key.rpartition(".")[2] in NAMES_CODE or key in (ESTIMATOR, CALLBACKS)


def module_of(path: str) -> str:
    """Return the module of a path as Python imports it; empty if the path names none."""
    return _parts(path)[0]


def module_and_name(key: str, path: str) -> tuple[str, str]:
    """Return the module of a path as Python imports it, and the name in it.

    Raises:
        ConfigError: `path` lacks one of them.
    """
    if path.endswith(_ENDING):
        names = _names_in(path)
        has = f"; it has {', '.join(names)}" if names else ""
        name = names[0] if len(names) == 1 else "<name of a function or class>"
        why, remedy = f"it names a file, but nothing in it{has}", f"Set {key}={path}:{name}"
        raise ConfigError(Problem("no_name", key, path, why=why, remedy=remedy))
    module, name = _parts(path)
    if not module or not name:
        expected = f"a dotted path or a file, such as {FORMS}"
        raise ConfigError(Problem("no_path", key, path, expected))
    return module, name


def _names_in(path: str) -> list[str]:
    """Return the public functions and classes of a file, without running it; none if unreadable."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    try:
        tree = ast.parse(Path(path).expanduser().read_bytes())
    except (OSError, ValueError, SyntaxError):
        return []
    return [node.name for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"]


def file_of(module: str) -> str | None:
    """Return the file after which a module is named; None for other modules."""
    if not (os.path.isabs(module) and module.endswith("%2Epy")):
        return None
    return module.replace("%2E", ".").replace("%25", "%")


def make_files_absolute(section: Any, key: str = "") -> None:
    """Make the files of a config's code absolute: workers and resumed runs may start elsewhere.

    Args:
        section: a dataclass or mapping, changed in place with all sections in it.
        key: dotted.
    """
    values = vars(section) if dataclasses.is_dataclass(section) else section
    for name, value in values.items():
        inner = f"{key}.{name}" if key else str(name)
        if isinstance(value, dict) or dataclasses.is_dataclass(value):
            make_files_absolute(value, inner)
        elif isinstance(value, str) and names_code(inner):
            values[name] = _absolute(value)
        elif isinstance(value, list) and names_code(inner):
            values[name] = [_absolute(path) for path in value]


def _absolute(path: str) -> str:
    return ":".join(_file_and_name(path)) if _file_and_name(path)[0] else path


def _file_and_name(path: str) -> tuple[str, str]:
    """Return the absolute file of a path and the name in it; empty if it names no file."""
    file, colon, name = path.rpartition(":")
    if not colon or not file.endswith(_ENDING):
        return "", ""
    return os.path.abspath(os.path.expanduser(file)), name


def _parts(path: str) -> tuple[str, str]:
    file, name = _file_and_name(path)
    if file:
        return file.replace("%", "%25").replace(".", "%2E"), name
    module, _, name = path.rpartition(".")
    return module, name


def source_files(path: str) -> dict[str, Path]:
    """Return the files of the code at `path`, by name; none of hybridrl's own and built-in names.

    They are the file of its module, and those of its folder or below that it imports anywhere, or
    that these import. Names are relative to the folder. The module must be importable (`locate`).
    """
    name = module_of(path)
    if not name or name.partition(".")[0] == "hybridrl":
        return {}
    first = Path(vars(importlib.import_module(name)).get("__file__") or name).absolute()
    folder, files, waiting = first.parent, dict[str, Path](), [first]
    roots = [folder, *folder.parents[: name.count(".")]]
    while waiting:
        file = waiting.pop()
        is_own = file == first or folder.name not in INSTALLED
        if not (is_own and file.is_relative_to(folder) and file.is_file()):
            continue
        if (key := str(file.relative_to(folder))) not in files:
            files[key] = file
            waiting += _imported(file, roots)
    return files


def _imported(file: Path, roots: list[Path]) -> Iterator[Path]:
    """Yield where the modules that a file imports may be, below folders of absolute imports."""
    with suppress(OSError, SyntaxError, ValueError):  # no source, or no source of Python's
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names, starts = [alias.name for alias in node.names], roots
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names]
                starts = [file.parents[node.level - 1]] if node.level else roots
            else:
                continue
            for name in names:
                for start in starts:
                    yield from _places(start, name.split("."))


def _places(start: Path, names: list[str]) -> Iterator[Path]:
    """Yield the files of a dotted name, and of the packages around it."""
    for depth in range(len(names)):
        place = start.joinpath(*names[: depth + 1])
        yield place.with_name(f"{place.name}.py")
        yield place / "__init__.py"


class _Files(MetaPathFinder):
    """Finder of modules that are named after a file.

    Modules beside the file can be imported too, after all others of their names.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = file_of(fullname)
        if file is None:
            return None
        if (folder := os.path.dirname(file)) not in sys.path:
            sys.path.append(folder)
        return spec_from_file_location(fullname, file)


sys.meta_path.append(_Files())
