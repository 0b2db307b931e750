"""Files of own code: the one that a name of the config stands for, and those that it imports."""

import ast
import importlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hybridrl.config.user_code.files import module_of

INSTALLED = ("site-packages", "dist-packages")


def source_files(path: str) -> dict[str, Path]:
    """Return the files of the code at `path`, by name; none of hybridrl's own and built-in names.

    They are the file of its module, and those of its folder or below that it imports anywhere, or
    that these import. Names are relative to the folder. The module must be importable (`locate`).
    """
    name = module_of(path)
    if not name or name.partition(".")[0] == "hybridrl":
        return {}
    first = Path(vars(importlib.import_module(name)).get("__file__") or name).absolute()
    folder, found, waiting = first.parent, dict[str, Path](), [first]
    roots = [folder, *folder.parents[: name.count(".")]]
    while waiting:
        file = waiting.pop()
        is_own = file == first or folder.name not in INSTALLED
        if not (is_own and file.is_relative_to(folder) and file.is_file()):
            continue
        if (key := str(file.relative_to(folder))) not in found:
            found[key] = file
            waiting += _imported(file, roots)
    return found


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
