"""Writes the tables of docs/coming_from.md from hybridrl/config/other_trainers.txt."""

from pathlib import Path

from hybridrl.config.keys import NO_KEY, OtherName, other_names

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming_from.md"


def main() -> None:
    """Replace each trainer's table."""
    text = PAGE.read_text(encoding="utf-8")
    for trainer in dict.fromkeys(other.trainer for other in other_names()):
        head, rest = text.split(f"## {trainer}'s keys\n", 1)
        _, sign, tail = rest.partition("\n## ")
        text = f"{head}## {trainer}'s keys\n\n{table(trainer)}{sign}{tail}"
    PAGE.write_text(text, encoding="utf-8")


def table(trainer: str) -> str:
    """Return the table of one trainer's keys, in Markdown."""
    rows = [_row(other) for other in other_names() if other.trainer == trainer]
    return "\n".join([f"| {trainer} | hybridrl |", "|---|---|", *rows]) + "\n"


def _row(other: OtherName) -> str:
    ours = [] if other.ours == NO_KEY else [f"`{key}`" for key in other.ours.split(", ")]
    parts = (", ".join(ours), other.difference)
    return f"| `{other.key}` | {': '.join(part for part in parts if part)} |"


if __name__ == "__main__":
    main()
