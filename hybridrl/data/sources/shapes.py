"""Embedded data set with pictures: rows that ask to count coloured shapes, generated from a seed.

    question   How many red shapes are there? or How many circles are there?
    images     a picture of 64 x 64 pixels with 2 to 9 shapes in a grid of four by four
    answer     how many of them, and on the last line `#### <number>`
    tags       "asks" ("color" or "kind"), "count"

Answers are 1 to 5, each as likely, so who does not look is right in a fifth of the cases. Training
and held-out pictures are drawn from series of their own.
"""

import random
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridrl.data.seeds import derive_seed

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

NUM_TRAIN, NUM_HELD_OUT = 2048, 320
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 200, 40),
}
KINDS = ("circles", "squares", "triangles")
MOST, MOST_OTHERS = 5, 4
# Cells in a row, and pixels of one.
CELLS, CELL = 4, 16
# Two of three questions ask for a color.
_ASKED = ("color", "color", "kind")


class Shape(NamedTuple):
    """A shape of a picture: a name of COLORS, and one of KINDS."""

    color: str
    kind: str


def shape_problems(series: str, count: int) -> list[dict[str, Any]]:
    """Return the first problems of a series."""
    return [shape_problem(series, index) for index in range(count)]


def shape_problem(series: str, index: int) -> dict[str, Any]:
    """Return problem `index` of the infinite series with this name."""
    rng = random.Random(derive_seed("shapes", series, index))
    asks, count = rng.choice(_ASKED), rng.randint(1, MOST)
    names: Sequence[str] = [*COLORS] if asks == "color" else KINDS
    asked, *others = rng.sample(names, len(names))
    values = [asked] * count + rng.choices(others, k=rng.randint(1, MOST_OTHERS))
    free: Sequence[str] = KINDS if asks == "color" else [*COLORS]
    pairs = [(value, rng.choice(free)) for value in values]
    shapes = [Shape(*(pair if asks == "color" else pair[::-1])) for pair in pairs]
    cells = dict(zip(rng.sample(range(CELLS**2), len(shapes)), shapes, strict=True))
    return {
        "question": f"How many {asked if asks == 'kind' else f'{asked} shapes'} are there?",
        "images": [{"bytes": picture(rng, cells)}],
        "answer": f"{count} of {len(shapes)}\n#### {count}",
        "total": len(shapes),
        "tags": {"asks": asks, "count": str(count)},
    }


def picture(rng: random.Random, cells: Mapping[int, Shape]) -> bytes:
    """Draw shapes in their cells, which are numbered row by row; return a PNG file."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (CELLS * CELL, CELLS * CELL), (rng.randint(225, 255),) * 3)
    draw = ImageDraw.Draw(image)
    for cell, shape in cells.items():
        _draw(draw, rng, cell, shape)
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _draw(draw: "ImageDraw", rng: random.Random, cell: int, shape: Shape) -> None:
    side = rng.randint(9, 13)
    row, column = divmod(cell, CELLS)
    left, top = (CELL * n + rng.randint(1, CELL - 1 - side) for n in (column, row))
    box = (left, top, left + side, top + side)
    shade = tuple(max(0, min(255, value + rng.randint(-20, 20))) for value in COLORS[shape.color])
    if shape.kind == "circles":
        draw.ellipse(box, shade)
    elif shape.kind == "squares":
        draw.rectangle(box, shade)
    else:
        draw.polygon([(left, box[3]), (left + side // 2, top), (box[2], box[3])], shade)
