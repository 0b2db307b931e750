"""Animated SVG of a command's console.

    python tools/console_svg.py console.svg console.log hybridrl train +recipe=gsm8k_ppo

runs the command in a terminal, keeps the recording in console.log and console.log.timing, and draws
it. Without a command it draws an earlier recording. util-linux's `script` records, pyte interprets
what the terminal got. The frames are moments of the run at equal distances; the animation is
shorter than the run, and its last frame stays longer. Needs `pip install -e '.[docs]'`.
"""

import argparse
import itertools
import os
import shlex
import subprocess
from collections.abc import Iterator
from html import escape
from pathlib import Path

import pyte
from pyte.screens import Char

COLUMNS, ROWS = 100, 32
# Pixels: size of a character cell, and the margin around the terminal.
WIDTH, HEIGHT, MARGIN = 8, 18, 14
SIZE = f"stty cols {COLUMNS} rows {ROWS}; "
FRAMES = 40
FRAME_S, LAST_FRAME_S = 0.5, 8.0
COLORS = {
    "default": "#d4d8dd",
    "black": "#6b7280",
    "red": "#ff8a80",
    "green": "#7ddf8f",
    "brown": "#f2c66d",
    "blue": "#82b4ff",
    "magenta": "#e29bff",
    "cyan": "#6fdbe8",
    "white": "#f0f2f4",
}


def record(command: list[str], log: Path) -> None:
    """Run a command in a terminal; write what it shows to `log`, and when, to `log`.timing."""
    line = SIZE + shlex.join(command)
    script = ["script", "--quiet", "--return", "--log-out", str(log)]
    script += ["--log-timing", f"{log}.timing", "--command", line]
    terminal = {**os.environ, "TERM": "xterm-256color"}
    subprocess.run(script, check=True, stdin=subprocess.DEVNULL, env=terminal)


def chunks(log: Path) -> Iterator[tuple[float, bytes]]:
    """Yield the seconds since the start and the bytes that the terminal got then."""
    # The first line names the command; the timing file does not count it.
    header, _, data = log.read_bytes().partition(b"\n")
    command = header.partition(SIZE.encode())[2].partition(b'" <')[0]
    yield 0.0, b"$ " + command + b"\r\n"
    seconds, position = 0.0, 0
    for line in Path(f"{log}.timing").read_text().splitlines():
        delay, count = line.split()
        seconds += float(delay)
        yield seconds, data[position : position + int(count)]
        position += int(count)


def frames(log: Path) -> list[list[str]]:
    """Return the rows of each frame as SVG."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    recorded = list(chunks(log))
    found, moment = [], 0.0
    for seconds, data in recorded:
        while moment < seconds and len(found) < FRAMES - 1:
            found.append([row_svg(screen, row) for row in range(ROWS)])
            moment += recorded[-1][0] / (FRAMES - 1)
        stream.feed(data)
    return [*found, [row_svg(screen, row) for row in range(ROWS)]]


def row_svg(screen: pyte.Screen, row: int) -> str:
    """Return a row of the screen as <text> elements, one for each stretch of one style."""
    elements, column = [], 0
    for style, group in itertools.groupby((screen.buffer[row][x] for x in range(COLUMNS)), styled):
        text = "".join(char.data for char in group)
        if shown := text.rstrip():
            elements.append(
                f'<text x="{column * WIDTH}"{style} textLength="{len(shown) * WIDTH}">'
                f"{escape(shown, quote=False)}</text>"
            )
        column += len(text)
    return "".join(elements)


def styled(char: Char) -> str:
    """Return the attributes of <text> that a character needs."""
    color = COLORS.get(char.fg.removeprefix("bright"), f"#{char.fg}")
    fill = "" if color == COLORS["default"] else f' fill="{color}"'
    return fill + ' font-weight="bold"' * char.bold + ' font-style="italic"' * char.italics


def svg(rows_of_frames: list[list[str]]) -> str:
    """Return the animation: all frames side by side, of which a window shows one at a time."""
    width, height = COLUMNS * WIDTH, ROWS * HEIGHT
    distinct = dict.fromkeys(row for rows in rows_of_frames for row in rows if row)
    names = {row: f"r{number}" for number, row in enumerate(distinct)}
    defined = "\n".join(f'<g id="{names[row]}">{row}</g>' for row in distinct)
    drawn, keys = [], []
    last = len(rows_of_frames) - 1
    for number, rows in enumerate(rows_of_frames):
        used = (
            f'<use href="#{names[row]}" y="{y * HEIGHT}"/>' for y, row in enumerate(rows) if row
        )
        drawn.append(f'<g transform="translate({number * width},0)">{"".join(used)}</g>')
        share = number * FRAME_S / (last * FRAME_S + LAST_FRAME_S)
        keys.append(f"{share:.3%}{{transform:translate({-number * width}px,0)}}")
    frame = (width + 2 * MARGIN, height + 2 * MARGIN)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {frame[0]} {frame[1]}">
<style>
text {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px;
  white-space: pre; }}
#film {{ transform: translate({-last * width}px,0);
  animation: film {last * FRAME_S + LAST_FRAME_S}s step-end infinite; }}
@media (prefers-reduced-motion: reduce) {{ #film {{ animation: none; }} }}
@keyframes film {{ {" ".join(keys)} }}
</style>
<defs>
{defined}
</defs>
<rect width="100%" height="100%" rx="8" fill="#1b1f24"/>
<svg x="{MARGIN}" y="{MARGIN}" width="{width}" height="{height}">
<g transform="translate(0,{HEIGHT - 5})" fill="{COLORS["default"]}"><g id="film">
{chr(10).join(drawn)}
</g></g></svg></svg>
"""


def main() -> None:
    """Record if there is a command, then draw."""
    parser = argparse.ArgumentParser(description="Animated SVG of a command's console.")
    parser.add_argument("svg", type=Path)
    parser.add_argument("log", type=Path, help="the recording")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.command:
        record(options.command, options.log)
    options.svg.write_text(svg(frames(options.log)))


if __name__ == "__main__":
    main()
