"""Images in requests: read from data: URLs, in the model's tokens and tensors.

Parts of messages have the forms of chat completions (image_url), responses (input_image) and
messages (image with a source). Later turns repeat earlier images, as do the episodes of a prompt.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from hybridrl.agents.episode import RequestError
from hybridrl.agents.record import Images
from hybridrl.config.planner.shape import NamedModel
from hybridrl.config.schema import ModelConfig
from hybridrl.data.images import ImageRows, PromptImages, image_rows
from hybridrl.data.sources.image_tokens import ImageProcessor
from hybridrl.data.sources.images import ImageFile, read_image
from hybridrl.models.resolve import takes_images

# Images whose URLs are remembered.
READ = 32
FORM = "Send a data: URL, data:image/png;base64,..."


class RequestImages:
    """Images of requests to a model that takes some. Methods raise RequestError for faults.

    `blind` describes models that read what the policy does, but no images.
    """

    def __init__(self, model: ModelConfig, blind: Sequence[str]) -> None:
        self._processor, self._blind = ImageProcessor(model), blind
        self._read = lru_cache(READ)(_read)

    def read(self, url: str) -> ImageFile:
        """Return the image of a data: URL."""
        for name in self._blind:
            why = f"{name} takes no images, and reads what the policy does."
            raise RequestError(why, param="messages")
        return self._read(url)

    def expanded(self, ids: Sequence[int], images: Sequence[ImageFile]) -> list[int]:
        """Return the token ids of a rendered text with those of its images."""
        try:
            return self._processor.expanded_untrusted(ids, images)
        except ValueError as error:
            raise RequestError(f"The prompt has {error}.", param="messages") from error

    def processed(self, images: Sequence[ImageFile]) -> PromptImages:
        """Return the images' tensors: the same object for as long as someone holds it."""
        return self._processor.processed(images)

    def of_rows(self, rows: Sequence[Images]) -> ImageRows | None:
        """Return the images of token sequences; those with the same images share them."""
        return image_rows(self._processor.processed_rows(rows))


def images_of(model: ModelConfig, others: Sequence[NamedModel] = ()) -> RequestImages | None:
    """Return the images of requests to a model, which `others` read, too; None if it takes none."""
    if not takes_images(model.path):
        return None
    return RequestImages(model, [f"{x.key} = {x.path}" for x in others if not takes_images(x.path)])


def url_of(part: Mapping[str, object]) -> str | None:
    """Return the URL in a part of a message that is an image; None for others."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return url
        case {"type": "image_url" | "input_image", "image_url": str(url)}:
            return url
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return url
        case {
            "type": "image",
            "source": {"type": "base64", "media_type": str(kind), "data": str(data)},
        }:
            return f"data:{kind};base64,{data}"
    return None


def _read(url: str) -> ImageFile:
    if not url.startswith("data:"):
        why = f"An image has the URL {url[:100]!r}; the endpoint loads none."
        raise RequestError(f"{why} {FORM}", param="messages")
    try:
        return read_image(url, Path())
    except ValueError as error:
        raise RequestError(f"The messages have an {error}.", param="messages") from error
