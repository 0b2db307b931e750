"""Answers of environments with images: read, in the model's tokens and tensors.

An answer is a text, or parts of a message as programs send them (docs/vision.md). What is wrong
with one is a ValueError, of which its response alone fails.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from hybridrl.config.planner.families import placeholder_ids
from hybridrl.config.planner.shape import NamedModel
from hybridrl.config.schema import ModelConfig
from hybridrl.data.images import PromptImages
from hybridrl.data.sources.image_tokens import ImageProcessor
from hybridrl.data.sources.images import ImageFile, ImageText, Slots, with_images
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.values import ABSENT
from hybridrl.environments.base import Text
from hybridrl.models.resolve import read_model_config, takes_images
from hybridrl.processes.messages import visible
from hybridrl.trainer.episodes.responses import Response


def files_of(text: str) -> tuple[ImageFile, ...]:
    """Return the images of an answer."""
    return text.images if isinstance(text, ImageText) else ()


class AnswerImages:
    """Images of answers, for a model that may take none, and `others` that read what it does."""

    def __init__(self, model: ModelConfig, others: Sequence[NamedModel]) -> None:
        self._model = model
        named = [("model.path", model.path), *((one.key, one.path) for one in others)]
        self._blind = [f"{key} = {path}" for key, path in named if not takes_images(path)]
        self._placeholders = frozenset(placeholder_ids(read_model_config(model.path)))

    def read(self, answer: Text) -> str:
        """Return the text of an answer, with its images if it has any.

        Raises:
            ValueError: a part is neither text nor image, an image cannot be read, or a model takes
                none.
        """
        if isinstance(answer, str):
            return answer
        text = with_images(Slots.of_parts(answer), ABSENT, Path())
        assert isinstance(text, str)
        files = files_of(text)
        if files and self._blind:
            raise ValueError(f"its answer has an image, but {self._blind[0]} takes none")
        return ImageText(visible(text), files) if files else visible(text)

    @cached_property
    def _processor(self) -> ImageProcessor:
        return ImageProcessor(self._model)

    def expanded(self, ids: list[int], text: str) -> list[int]:
        """Return the token ids of an answer with those of its images.

        Raises:
            ValueError: the text itself has a token that stands for an image, or the processor
                refuses one.
        """
        if files := files_of(text):
            return self._processor.expanded_untrusted(ids, files)
        if wrong := self._placeholders.intersection(ids):
            raise ValueError(f"its answer has token {min(wrong)}, which stands for images, as text")
        return ids

    def processed(
        self, prompts: Sequence[Prompt], responses: Sequence[Response]
    ) -> list[PromptImages | None]:
        """Return the images of prompts and of the answers in responses, where these have some."""
        if not any(response.images for response in responses):
            return [None] * len(responses)
        return self._processor.processed_rows(
            [
                (*(prompt.images.files if prompt.images else ()), *response.images)
                if response.images
                else ()
                for prompt, response in zip(prompts, responses, strict=True)
            ]
        )
