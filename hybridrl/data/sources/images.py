"""Images of problems: read and checked by row, and where they stand in messages.

One is a path (seen from the file that names it), a data: URL, bytes, or the hub's object of bytes
and path. It stands in the column data.images_key, or in a part of a chat message.
"""

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsIndex

from hybridrl.config.command.input_errors import is_address
from hybridrl.data.sources.values import ABSENT

if TYPE_CHECKING:
    from PIL.Image import Image

# A question, or chat messages.
Prompt = str | list[dict[str, str]]

# Place of an image in a text.
MARK = "<image>"
# Names of an image in objects, the first that is not null.
_NAMES = ("bytes", "path", "image", "image_url", "url")
# Models read a fraction of so many pixels; a small file may have many more.
MOST_PIXELS = 2**25
# EXIF tag of the orientation; from this value on width and height are exchanged.
_ORIENTATION, _TURNED = 0x0112, 5
# Keeps columns of images readable in examples.
_SHOWN = 100


class Size(NamedTuple):
    """Size of an image in pixels."""

    width: int
    height: int


@dataclass(frozen=True)
class ImageFile:
    """Image as a file, which has been decoded once.

    Attributes:
        source: its path, or its bytes.
        size: after rotation by its EXIF tag.
        key: hash of its bytes.
    """

    source: Path | bytes
    size: Size
    key: str

    @property
    def url(self) -> str:
        """The file as a data: URL."""
        from PIL import Image

        content = _content(self.source)
        with Image.open(BytesIO(content)) as image:
            kind = image.get_format_mimetype()
        return f"data:{kind};base64,{b64encode(content).decode()}"

    def open(self) -> "Image":
        """Return the image, upright, in RGB; transparent parts are white."""
        from PIL import Image, ImageOps

        with Image.open(BytesIO(_content(self.source))) as image:
            upright = ImageOps.exif_transpose(image)
        if not upright.has_transparency_data:
            return upright.convert("RGB")
        clear = upright.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")


class ImageText(str):
    """Text of a message with images, each of which stands at a MARK."""

    images: tuple[ImageFile, ...]

    def __new__(cls, text: str, images: Sequence[ImageFile]) -> Self:  # noqa: D102
        self = super().__new__(cls, text)
        self.images = tuple(images)
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return ImageText, (str(self), self.images)

    @property
    def parts(self) -> list[dict[str, str]]:
        """The text and its images in the form that chat templates read."""
        first, *others = self.split(MARK)
        parts = [{"type": "text", "text": first}]
        for text in others:
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        return [part for part in parts if part != {"type": "text", "text": ""}]


def images_in(messages: Sequence[Mapping[str, str]]) -> tuple[ImageFile, ...]:
    """Return the images of messages, in order."""
    texts = (message["content"] for message in messages)
    return tuple(image for text in texts if isinstance(text, ImageText) for image in text.images)


def read_image(value: object, folder: Path) -> ImageFile:
    """Read and decode an image; ValueError with what is wrong."""
    source = _source(value, folder)
    where = f"image {str(source)[:_SHOWN]}"
    if isinstance(source, bytes):
        where = f"image of {len(source):,} bytes"
    try:
        content = _content(source)
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror}") from error
    return ImageFile(source, _decoded_size(content, where), hashlib.sha256(content).hexdigest())


def _decoded_size(content: bytes, where: str) -> Size:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(content)) as image:
            is_turned = image.getexif().get(_ORIENTATION, 0) >= _TURNED
            size = Size(*(image.size[::-1] if is_turned else image.size))
            mode, is_large = image.mode, size.width * size.height > MOST_PIXELS
            if not is_large:
                image.draft("L", (1, 1))  # JPEG is decoded at an eighth of its size
                image.load()
    except UnidentifiedImageError as error:
        raise ValueError(f"{where} is of no format that Pillow reads") from error
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and more
        raise ValueError(f"{where} cannot be decoded: {error}") from error
    if is_large:
        named = f"{size.width} x {size.height} pixels, more than {MOST_PIXELS:,}"
        raise ValueError(f"{where} has {named}: make it smaller")
    if mode.startswith(("I", "F")):  # whose brightest parts a conversion would clip
        raise ValueError(f"{where} has more than 8 bits a colour (mode {mode}): convert it")
    return size


def _source(value: object, folder: Path) -> Path | bytes:
    """Return the path or bytes of an image; ValueError if it is something else."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, Mapping):
        return _source(_inner(value), folder)
    if not isinstance(value, str) or not value:
        kind = type(value).__name__
        raise ValueError(f"an image is {kind}, expected a path, bytes, or an object with one")
    if value.startswith("data:"):
        try:
            return b64decode(value.partition(",")[2], validate=True)
        except ValueError as error:
            raise ValueError(f"an image is a data: URL, but not in Base64: {error}") from error
    name = value.removeprefix("file://")
    if is_address(name):
        raise ValueError(f"image {name} is an address on the network: download it")
    return folder / Path(name).expanduser()


def _inner(value: Mapping[str, object]) -> object:
    return next((value[name] for name in _NAMES if value.get(name) is not None), None)


def _content(source: Path | bytes) -> bytes:
    return source if isinstance(source, bytes) else source.read_bytes()


class Slots(str):
    """Text of a message in parts, before its images are read.

    Each MARK is an image: its value, or None for one of the column.
    """

    given: tuple[object, ...]

    @classmethod
    def of_parts(cls, parts: Sequence[Any]) -> Self:
        """Join the parts of a message; ValueError for parts that are neither text nor image."""
        texts, given = list[str](), list[object]()
        for part in parts:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
                given += [None] * part["text"].count(MARK)
            elif kind in ("image", "image_url"):
                texts.append(MARK)
                given.append(_inner(part))
            else:
                raise ValueError(f"a message has a part of type {kind}, expected text or image")
        slots = cls("".join(texts))
        slots.given = tuple(given)
        return slots


def with_images(prompt: Prompt, column: object, folder: Path) -> Prompt:
    """Return a row's prompt with its images read; the same object if it has none.

    Those of the column, if it is not ABSENT, stand at MARKs, or without MARKs before the first
    message of the user. ValueError if their numbers differ.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    texts = [message["content"] for message in messages]
    values = column if isinstance(column, list) else [] if column in (None, ABSENT) else [column]
    if values and not any(MARK in text for text in texts):
        asked = next((n for n, message in enumerate(messages) if message["role"] == "user"), 0)
        texts[asked] = MARK * len(values) + texts[asked]
    marks = 0 if column is ABSENT else 1  # without a column they are text
    slots = [t.given if isinstance(t, Slots) else (None,) * (marks * t.count(MARK)) for t in texts]
    empty = sum(one is None for given in slots for one in given)
    if empty != len(values):
        raise ValueError(f"{len(values)} images, but {empty} times {MARK} in the text")
    rest = iter(values)
    images = [
        [read_image(next(rest) if one is None else one, folder) for one in given] for given in slots
    ]
    if not any(images):
        return prompt
    seen = [
        message | {"content": ImageText(text, own) if own else text}
        for message, text, own in zip(messages, texts, images, strict=True)
    ]
    return seen[0]["content"] if isinstance(prompt, str) else seen


def without_bytes(value: Any) -> Any:
    """Return a row's value for rewards: bytes and data: URLs of images by their beginning."""
    if isinstance(value, Mapping):
        return {name: without_bytes(one) for name, one in value.items()}
    if isinstance(value, list):
        return [*map(without_bytes, value)]
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    is_data = isinstance(value, str) and value.startswith("data:")
    return value[:_SHOWN] if is_data else value


def keys_of(prompt: Prompt) -> tuple[str, ...]:
    """Return the keys of the images in a question or its messages."""
    messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
    return tuple(image.key for image in images_in(messages))
