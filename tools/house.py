"""Counts what a reviewer counts, and compares it with the budgets of tools/house.toml.

    python tools/house.py            the tables
    python tools/house.py --run      also paths that need a recorded run (tools/paths.py; a minute)
    python tools/house.py --check    the budgets alone, as in `make lint`

Lines are those of `wc -l`. A function counts with its decorators and docstring. A module's room is
the longest name in the budget file that is a folder above it. A circle is a set of modules that
import each other, also inside functions and for type checkers. A name counts where it is given.
"""

import ast
import re
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import grimp
from paths import PACKAGE, REPO, files_of_section, recorded

BUDGETS = REPO / "tools" / "house.toml"
TOP = "files of no folder"
LONG_FUNCTION, LONG_SENTENCE = 60, 25
# Ends of a docstring's text: an empty line, or one before an indented line, an item, a table's row
# with columns, a name's meaning or a formula.
TEXT_END = r"\n\s*\n|\n(?=\s|- |\||.*\S  |\S+ ?[:=] )"
# Words that name nothing; an identifier names the thing.
WORDS = {"found", "told", "heard", "advanced", "counting", "beside"}
Counts = dict[str, int]


@dataclass(frozen=True)
class Module:
    """One file of hybridrl."""

    file: Path

    @property
    def name(self) -> str:
        """The module's name below hybridrl, with slashes."""
        return self.file.relative_to(PACKAGE).as_posix()

    @cached_property
    def lines(self) -> int:
        """Lines as `wc -l` counts them."""
        return self.file.read_text(encoding="utf-8").count("\n")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the syntax tree."""
        return list(ast.walk(ast.parse(self.file.read_text(encoding="utf-8"))))

    def functions(self) -> Iterator[tuple[int, str]]:
        """Lines and name of each function."""
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                yield (node.end_lineno or first) - first + 1, f"{self.name}:{node.name}"

    def names(self) -> Iterator[str]:
        """Names that are given: to variables, attributes, arguments, functions and classes."""
        for node in self.nodes:
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    yield name
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    yield node.name
                case ast.arg(arg=name):
                    yield name

    def optional_fields(self) -> int:
        """Annotated attributes of classes that may be None."""
        return sum(
            "None" in ast.unparse(field.annotation)
            for node in self.nodes
            if isinstance(node, ast.ClassDef)
            for field in node.body
            if isinstance(field, ast.AnnAssign)
        )

    def long_sentences(self) -> int:
        """Docstrings' sentences with over `LONG_SENTENCE` words."""
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        texts = [ast.get_docstring(node) or "" for node in self.nodes if isinstance(node, kinds)]
        paragraphs = (part for text in texts for part in re.split(TEXT_END, text))
        sentences = (each for part in paragraphs for each in re.split(r"(?<=[.!?])\s", part))
        return sum(len(sentence.split()) > LONG_SENTENCE for sentence in sentences)


@dataclass(frozen=True)
class House:
    """All modules, and the budgets by room."""

    budgets: dict
    modules: list[Module] = field(
        default_factory=lambda: [Module(file) for file in sorted(PACKAGE.rglob("*.py"))]
    )

    def room(self, name: str) -> str:
        """The room of a module or folder."""
        rooms = [room for room in self.budgets["rooms"] if name.startswith(f"{room}/")]
        top = name.partition("/")[0]
        return max(rooms, key=len, default=top if (PACKAGE / top).is_dir() else TOP)

    @cached_property
    def rooms(self) -> dict[str, tuple[int, int]]:
        """Lines and files of each room."""
        lines, files = Counter[str](), Counter[str]()
        for module in self.modules:
            lines[self.room(module.name)] += module.lines
            files[self.room(module.name)] += 1
        return {room: (lines[room], files[room]) for room in sorted(lines)}

    @cached_property
    def totals(self) -> dict[str, tuple[int, int]]:
        """Lines and files of the whole, of each wing, and of the tests."""
        wings = self.budgets["wings"]
        of_wings = {room for rooms in wings.values() for room in rooms}
        core = [room for room in self.rooms if room not in of_wings]
        tests = [file.read_text(encoding="utf-8") for file in (REPO / "tests").rglob("*.py")]
        return {
            "hybridrl": self.sum(list(self.rooms)),
            "core": self.sum(core),
            **{wing: self.sum(rooms) for wing, rooms in wings.items()},
            "tests": (sum(text.count("\n") for text in tests), len(tests)),
        }

    def sum(self, rooms: list[str]) -> tuple[int, int]:
        """Lines and files of some rooms."""
        counts = [self.rooms.get(room, (0, 0)) for room in rooms]
        return sum(lines for lines, _ in counts), sum(files for _, files in counts)

    @cached_property
    def graph(self) -> grimp.ImportGraph:
        """Imports between modules, without those by name that the package offers (setup.cfg)."""
        graph = grimp.build_graph("hybridrl", cache_dir=str(REPO / ".import_linter_cache"))
        for module in graph.find_modules_directly_imported_by("hybridrl"):
            graph.remove_import(importer="hybridrl", imported=module)
        return graph

    @cached_property
    def circles(self) -> list[str]:
        """Sets of modules that import each other, directly or through others."""
        graph = self.graph
        below = {module: graph.find_upstream_modules(module) for module in graph.modules}
        sets = {
            frozenset({module, *(other for other in names if module in below[other])})
            for module, names in below.items()
        }
        return sorted(", ".join(sorted(names)) for names in sets if len(names) > 1)

    @cached_property
    def arrows(self) -> Counter[tuple[str, str]]:
        """How often the modules of one room import those of another one."""
        return Counter(
            ends
            for importer in self.graph.modules
            for imported in self.graph.find_modules_directly_imported_by(importer)
            if (ends := (self.room_of(importer), self.room_of(imported)))[0] != ends[1]
        )

    def room_of(self, module: str) -> str:
        """The room of a module named with dots."""
        return self.room(f"{module.partition('.')[2].replace('.', '/')}/")

    def into_wings(self) -> int:
        """Imports of a wing's modules by the core."""
        of_wings = {room for rooms in self.budgets["wings"].values() for room in rooms}
        outside = of_wings | {TOP, "api"}
        return sum(
            count
            for (importer, imported), count in self.arrows.items()
            if importer not in outside and imported in of_wings
        )

    def counts(self) -> Counts:
        """What has a budget and is not a size of a room."""
        names = [name for module in self.modules for name in module.names()]
        any_uses = sum(
            isinstance(n, ast.Name) and n.id == "Any" for m in self.modules for n in m.nodes
        )
        lengths = sorted(lines for module in self.modules for lines, _ in module.functions())
        return {
            "functions over 60 lines": sum(lines > LONG_FUNCTION for lines in lengths),
            "files over 300 lines": sum(module.lines > 300 for module in self.modules),
            "circles between modules": len(self.circles),
            "imports of the wings by the core": self.into_wings(),
            "uses of Any": any_uses,
            "optional fields": sum(module.optional_fields() for module in self.modules),
            "docstring sentences over 25 words": sum(m.long_sentences() for m in self.modules),
            "names with words that name nothing": sum(map(len, map(poor_words, names))),
        }


def poor_words(name: str) -> set[str]:
    """The words of `WORDS` in a name."""
    return WORDS.intersection(name.lower().split("_"))


def listed_paths(budgets: dict) -> dict[str, tuple[int, int]]:
    """Files and lines of what the sections of the architecture page name."""
    paths = {}
    for name, path in budgets["listed"].items():
        files = files_of_section(path["section"])
        paths[name] = (len(files), sum(Module(file).lines for file in files))
    return paths


def excesses(kind: str, units: tuple[str, ...], counted: dict, budgets: dict) -> list[str]:
    """Messages about what exceeds its budget, or has none."""
    problems = []
    for name, values in counted.items():
        if name not in budgets:
            problems.append(f"{kind} {name!r} has no budget: add a line to tools/house.toml")
            continue
        limits = budgets[name]
        for unit, value, limit in zip(units, values, limits, strict=True):
            if value > limit:
                problems.append(
                    f"{kind} {name!r}: {value:,} {unit}, budget {limit:,}: make it smaller, or "
                    "raise its line in tools/house.toml in this commit, with a comment on why"
                )
    return problems


def problems(house: House) -> list[str]:
    """All budgets that are exceeded and need no run."""
    budgets = house.budgets
    counts = {name: (count,) for name, count in house.counts().items()}
    limits = {name: (limit,) for name, limit in budgets["counts"].items()}
    listed = {name: path["most"] for name, path in budgets["listed"].items()}
    circles = [f"  circle: {circle}" for circle in house.circles]
    return [
        *excesses("room", ("lines", "files"), house.rooms, budgets["rooms"]),
        *excesses("total", ("lines", "files"), house.totals, budgets["totals"]),
        *excesses("path", ("files", "lines"), listed_paths(budgets), listed),
        *excesses("count", ("",), counts, limits),
        *(circles if len(circles) > budgets["counts"]["circles between modules"] else []),
    ]


def table(house: House) -> None:
    """Print everything that needs no run."""
    for title, sizes in (("room", house.rooms), ("total", house.totals)):
        print(f"\n{title:24}{'lines':>8}{'files':>7}")
        for name, (lines, files) in sizes.items():
            print(f"{name:24}{lines:8,}{files:7}")
    functions = sorted(each for module in house.modules for each in module.functions())
    lengths = [lines for lines, _ in functions]
    print(
        f"\nfunctions: {len(lengths):,}, median {statistics.median(lengths):g} lines, p95 ", end=""
    )
    print(f"{lengths[int(0.95 * len(lengths))]}; longest: ", end="")
    print(", ".join(f"{name} {lines}" for lines, name in functions[:-6:-1]))
    print(f"arrows between rooms: {len(house.arrows)}")
    for name, count in house.counts().items():
        print(f"{name}: {count:,}")
    for circle in house.circles:
        print(f"  circle: {circle}")
    names = (name for module in house.modules for name in module.names())
    words = Counter(word for name in names for word in poor_words(name))
    print(f"  words that name nothing: {dict(words.most_common())}")
    for name, (files, lines) in listed_paths(house.budgets).items():
        print(f"path of {name}, as the architecture page lists it: {files} files, {lines:,} lines")


def recorded_paths(house: House) -> list[str]:
    """Run what the budget file names, print what was entered, return the excesses."""
    problems = []
    for name, path in house.budgets["recorded"].items():
        entered = recorded(path["run"], path["window"], all_threads=path["all_threads"])
        files = {file: n for file, n in entered.files.items() if n >= path["least_lines"]}
        print(
            f"path of {name}, as a run enters it: {len(entered.files)} files of {entered.whole:,} "
            f"lines; at least {path['least_lines']} lines are entered in {len(files)}; "
            f"definitions {entered.definitions:,} lines"
        )
        counted = {name: (len(files), entered.definitions)}
        problems += excesses(
            "path", ("files", "lines of definitions"), counted, {name: path["most"]}
        )
    return problems


def main() -> None:
    """Print the tables, or check the budgets; exit with a message about each that is exceeded."""
    house = House(tomllib.loads(BUDGETS.read_text(encoding="utf-8")))
    if "--check" not in sys.argv:
        table(house)
    runs = recorded_paths(house) if "--run" in sys.argv else []
    if excess := [*problems(house), *runs]:
        sys.exit("\n".join(excess))


if __name__ == "__main__":
    main()
