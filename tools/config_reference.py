"""Tables of all config keys with their defaults and meanings, from the comments in conf/."""

import html
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml


class Key(NamedTuple):
    """A key of a file in conf/: its path, its default as written, the comment above it."""

    path: str
    default: str
    meaning: str


def config_reference(conf: Path) -> str:
    """Return a section for each group, with a table for each of its choices, in Markdown."""
    groups: dict[str, list[Path]] = {"": [conf / "config.yaml"]}
    for path in sorted(conf.rglob("*.yaml")):
        group = path.parent.relative_to(conf).as_posix()
        if group not in (".", "recipe"):
            groups.setdefault(group, []).append(path)
    return "\n".join(line for group, files in groups.items() for line in _section(group, files))


def _section(group: str, files: list[Path]) -> Iterator[str]:
    yield f"\n## {group or 'Top level'}\n"
    for path in files:
        text = path.read_text(encoding="utf-8")
        if group:
            yield f"### `{group}={path.stem}`\n"
        if about := _about(text):
            yield f"{about}\n"
        package = "" if "@package _global_" in text else group.replace("/", ".")
        if rows := list(keys(text, package)):
            yield "| key | default | meaning |\n|---|---|---|"
            yield from (f"| `{row.path}` | {_cell(row.default)} | {row.meaning} |" for row in rows)
            yield ""


def keys(text: str, package: str) -> Iterator[Key]:
    """Yield the keys of a YAML file that have a value; each with the comment above it."""
    lines = text.splitlines()
    tree = yaml.compose(text)
    if isinstance(tree, yaml.MappingNode):
        yield from _keys(tree, package, lines)


def _keys(node: yaml.MappingNode, prefix: str, lines: list[str]) -> Iterator[Key]:
    for name, value in node.value:
        if name.value in ("defaults", "hydra") and name.start_mark.column == 0:
            continue
        path = f"{prefix}.{name.value}" if prefix else name.value
        meaning = _comment_above(name.start_mark.line, lines)
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from _keys(value, path, lines)
        else:
            default = "".join(lines[name.start_mark.line].partition(":")[2:]).strip()
            yield Key(path, default, meaning)


def _comment_above(line: int, lines: list[str]) -> str:
    found: list[str] = []
    while line > 0 and (text := lines[line - 1].strip()).startswith("#"):
        found.insert(0, text.lstrip("# "))
        line -= 1
    return _escaped(" ".join(found))


def _about(text: str) -> str:
    """Return the comment at the head of a file, up to the first empty line or key."""
    found = []
    for line in text.splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("#"):
            break
        found.append(line.lstrip("# "))
    return _escaped(" ".join(found)) if found and _ends_before_key(text) else ""


def _ends_before_key(text: str) -> bool:
    """Return whether an empty line or `defaults` separates the head's comment from the keys."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return bool(lines) and (not lines[0].strip() or lines[0].startswith("defaults"))


def _cell(default: str) -> str:
    return f"<code>{_escaped(default)}</code>" if default else ""


def _escaped(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|")
