"""Paths through the code: files and lines of definitions that a reader of one path meets.

A recorded path is the set of functions that a run enters between the begin and the end of one named
function (`window` in tools/house.toml), in the main threads of all its processes or in all threads.
The last call of the window counts, so that nothing of the run's start does. A function counts with
its whole definition, from its decorators to its last line; a file counts if a function of it is
entered. A listed path is what a section of docs/architecture.md names.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "hybridrl"
PAGE = REPO / "docs" / "architecture.md"
RUN = (
    "hardware=cpu seed=1 trainer.total_steps=2 data.prompts_per_step=4 actor.mini_batch_size=8 "
    "rollout.responses_per_prompt=4 data.num_eval_problems=4 eval.every_steps=0 "
    "eval.before_training=false checkpoint.every_steps=0 trainer.samples_every_steps=0 "
    "trainer.save_final_model=false tracking.report=false"
)


@dataclass(frozen=True)
class ReadPath:
    """Functions of a path as (file, first line, last line)."""

    functions: frozenset[tuple[Path, int, int]]

    @property
    def files(self) -> dict[Path, int]:
        """Lines of definitions per file."""
        lines: dict[Path, int] = {}
        for file, first, last in self.functions:
            lines[file] = lines.get(file, 0) + last - first + 1
        return lines

    @property
    def definitions(self) -> int:
        """Lines of the functions entered."""
        return sum(self.files.values())

    @property
    def whole(self) -> int:
        """Lines of the files entered."""
        return sum(len(file.read_text().splitlines()) for file in self.files)


def recorded(run: str, window: str, *, all_threads: bool) -> ReadPath:
    """Run hybridrl with the recorder of calls; return the path within the last call of `window`."""
    with tempfile.TemporaryDirectory(prefix="h") as folder:
        environment = os.environ | {
            "PYTHONPATH": f"{REPO / 'tools' / 'calls'}:{REPO}",
            "HOUSE_PACKAGE": str(PACKAGE),
            "HOUSE_CALLS": folder,
            "HOUSE_WINDOW": window,
        }
        command = [sys.executable, "-m", "hybridrl.main", *run.split(), *RUN.split()]
        command.append(f"hydra.run.dir={folder}/run")
        subprocess.run(command, cwd=REPO, env=environment, stdout=sys.stderr, check=True)
        texts = [file.read_text() for file in Path(folder).glob("*.calls")]
    events = sorted(
        (float(when), thread, event, function)
        for text in texts
        for when, thread, event, function in (line.split() for line in text.splitlines())
    )
    begins = [when for when, _, event, _ in events if event == "begin"]
    if not begins:
        sys.exit(
            f"tools/house.toml: no run of {run!r} calls {window!r}; name the function that does"
        )
    begin = begins[-1]
    end = next(when for when, _, event, _ in events if event == "end" and when > begin)
    entered = {
        function
        for when, thread, event, function in events
        if begin <= when <= end and event != "end" and (all_threads or thread == "main")
    }
    return ReadPath(
        frozenset(definition(*function.rsplit(":", 1)) for function in entered) - {None}
    )


def definition(file: str, line: str) -> tuple[Path, int, int] | None:
    """The outermost function or method around a line; None for a class body or a module."""
    for first, last in outermost_functions(ast.parse(Path(file).read_text()).body):
        if first <= int(line) <= last:
            return Path(file), first, last
    return None


def outermost_functions(body: list[ast.stmt]) -> list[tuple[int, int]]:
    """First and last lines of functions and methods; functions within functions belong to these."""
    spans = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            spans.append((first, node.end_lineno or first))
        elif isinstance(node, ast.ClassDef | ast.If | ast.Try):
            spans += outermost_functions(node.body)
    return spans


def files_of_section(title: str) -> list[Path]:
    """Files of hybridrl that a section of the architecture page names, also by their folder."""
    section = PAGE.read_text().split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    files: set[Path] = set()
    for name in re.findall(r"`([a-z_0-9/]+(?:\.py|/))", section):
        files |= set((PACKAGE / name).rglob("*.py")) if name.endswith("/") else {PACKAGE / name}
    return sorted(file for file in files if file.exists())
