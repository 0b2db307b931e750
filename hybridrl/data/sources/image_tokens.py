"""Images of prompts as the model reads them: their tokens, at load, and their tensors, when needed.

The model's own processor of transformers makes both. Token ids with expanded placeholders are the
only form of a prompt behind this module: nothing expands them again.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from hybridrl.config.errors import ConfigError
from hybridrl.config.planner.families import placeholder_ids
from hybridrl.config.schema import ModelConfig
from hybridrl.data.sources.images import ImageFile, Size
from hybridrl.models.resolve import plain_folder, read_model_config, takes_images

if TYPE_CHECKING:
    from torch import Tensor

    from hybridrl.data.images import PromptImages

# Sizes whose tokens are remembered.
MOST_SIZES = 2**16
# What a processor returns of texts.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class ImageProcessor:
    """Image processor of a model.

    Raises:
        ConfigError: the model takes no images, or its folder has no usable processor.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._processor = _loaded(model.path)
        self._placeholder = self._processor.image_token_id
        config = read_model_config(model.path)
        self._placeholders, self._video = placeholder_ids(config), config.get("video_token_id")
        settings = json.dumps(
            self._processor.image_processor.to_dict(), sort_keys=True, default=str
        )
        self._settings = hashlib.sha256(settings.encode()).hexdigest()[:16]
        # Tokens of an image by its size, or why it is refused.
        self._tokens: dict[Size, list[int] | ValueError] = {}
        self._processed = WeakValueDictionary[tuple[str, ...], "PromptImages"]()
        self._lock, self._locks = Lock(), dict[tuple[str, ...], Lock]()
        # Tokenizers set themselves up in a first call, which no other thread may meet.
        self.learn([Size(64, 64)])

    def learn(self, sizes: Iterable[Size]) -> None:
        """Find the tokens of images of these sizes, several at a time."""
        if len(self._tokens) > MOST_SIZES:
            self._tokens.clear()
        new = [size for size in sizes if size not in self._tokens]
        with ThreadPoolExecutor() as pool:
            self._tokens |= zip(new, pool.map(self._tokens_or_fault, new), strict=True)

    def expanded(
        self, ids: Sequence[int], images: Sequence[ImageFile]
    ) -> tuple[list[int], list[int]]:
        """Return a prompt's token ids with its images' tokens, and their number of each image.

        An image's tokens follow from its size alone.

        Raises:
            ValueError: the prompt has another number of placeholders, or a size is refused.
        """
        places = ids.count(self._placeholder)
        if places != len(images):
            text = self._processor.image_token
            raise ValueError(f"{len(images)} images, but {places} times {text} once rendered")
        tokens = [self._tokens_of(image.size) for image in images]
        each = iter(tokens)
        rows = (next(each) if token == self._placeholder else [token] for token in ids)
        return [token for row in rows for token in row], [*map(len, tokens)]

    def expanded_untrusted(self, ids: Sequence[int], images: Sequence[ImageFile]) -> list[int]:
        """Return the token ids of a text that nobody has checked, with its images' tokens.

        Raises:
            ValueError: as `expanded`, or it has further tokens that stand for images or videos.
        """
        expanded, _ = self.expanded(ids, images)
        for token in self._placeholders:  # around an image there is one of each
            if ids.count(token) > len(images) * (token != self._video):
                has = f"token {token} {ids.count(token)} times, which stands for an image or video"
                raise ValueError(f"{has}, and {len(images)} images: remove it from texts")
        return expanded

    def processed(self, files: Sequence[ImageFile]) -> "PromptImages":
        """Return the tensors of images: the same object for as long as someone holds it."""
        of_files = tuple(file.key for file in files)
        with self._lock:  # one of several threads with the same images reads them
            one = self._locks.setdefault(of_files, Lock())
        with one:
            if (known := self._processed.get(of_files)) is None:
                known = self._processed[of_files] = self._made(files)
        with self._lock:
            self._locks.pop(of_files, None)
        return known

    def processed_rows(self, rows: Sequence[Sequence[ImageFile]]) -> "list[PromptImages | None]":
        """Return the images of prompts, read together; None for those without."""
        if not any(rows):
            return [None] * len(rows)
        with ThreadPoolExecutor() as pool:
            return [*pool.map(lambda files: self.processed(files) if files else None, rows)]

    def _made(self, files: Sequence[ImageFile]) -> "PromptImages":
        from hybridrl.data.images import PromptImages

        features, ids = self._run([file.open() for file in files])
        assert ids == [token for file in files for token in self._tokens_of(file.size)]
        keys = tuple(f"{self._settings}-{file.key}" for file in files)
        return PromptImages(keys, features)

    def _tokens_of(self, size: Size) -> list[int]:
        self.learn([size])
        if isinstance(tokens := self._tokens[size], ValueError):
            raise tokens
        return tokens

    def _tokens_or_fault(self, size: Size) -> list[int] | ValueError:
        from PIL import Image

        try:
            return self._run([Image.new("RGB", size)])[1]
        except ValueError as error:
            return ValueError(f"an image of {size.width} x {size.height} pixels: {error}")

    def _run(self, images: Sequence[object]) -> tuple[dict[str, "Tensor"], list[int]]:
        """Return the tensors of images, and their tokens."""
        text = self._processor.image_token * len(images)
        made = self._processor(
            images=images, text=[text], return_tensors="pt", add_special_tokens=False
        )
        features = {name: value for name, value in made.items() if name not in _OF_TEXT}
        return features, made["input_ids"][0].tolist()


def _loaded(path: str) -> Any:
    if not takes_images(path):
        raise ConfigError(
            f"data.images_key: rows have images, but model.path = {path} takes none (its "
            "config.json has no vision_config).\nChoose a model that sees, such as "
            "model=embedded_vision, or leave the images out: data.images_key=null"
        )
    from hybridrl.models.processors import load_processor

    return load_processor(plain_folder(path))


class PromptFiles:
    """Image files of one prompt.

    Attributes:
        files: in the order of their placeholders.
        tokens: number of tokens of each.
    """

    def __init__(
        self, files: tuple[ImageFile, ...], tokens: list[int], processor: ImageProcessor
    ) -> None:
        self.files = files
        self.tokens = tokens
        self._processor = processor

    def processed(self) -> "PromptImages":
        """Return the images' tensors: the same object for as long as someone holds it."""
        return self._processor.processed(self.files)


def processed(prompts: Iterable[PromptFiles | None]) -> "list[PromptImages | None]":
    """Return the images of prompts, processed together."""
    ordered = list(prompts)
    if not any(ordered):
        return [None] * len(ordered)
    with ThreadPoolExecutor() as pool:
        return [*pool.map(lambda one: one and one.processed(), ordered)]
