"""Processors of models that take images: the same on all machines, with or without torchvision."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from hybridrl.config.errors import ConfigError

# Folder of transformers with the processor, where it is not that of the model.
_FOLDERS = {"qwen3_5": "qwen3_vl", "mistral3": "pixtral"}
# Transformers asks for it because of videos, and imports it with the code of images.
_TORCHVISION = "torchvision.transforms.v2"


def load_processor(folder: Path) -> ProcessorMixin:
    """Load the processor of a model in Hugging Face format: tokenizer and images, no videos.

    Images are resized by PIL, also beside torchvision, which rounds otherwise.

    Raises:
        ConfigError: the folder has no usable processor.
    """
    try:
        return _loaded(folder)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"model.path = {folder}: its image processor cannot be loaded "
            f"({reason[0] if reason else type(error).__name__}).\n"
            "The folder needs preprocessor_config.json or processor_config.json; copy those of the "
            "model."
        ) from error


def _loaded(folder: Path) -> ProcessorMixin:
    kind = AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type
    with without_videos():
        own: Any = processor_class(kind)
        parts = [
            AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False),
            AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
            None,  # of videos
        ]
        settings, _ = own.get_processor_dict(folder)
        processor: ProcessorMixin = own.from_args_and_dict(
            parts[: len(own.get_attributes())], settings
        )
    return processor


def processor_class(kind: str) -> type[ProcessorMixin]:
    """Import the class of processors of a model type; call it within `without_videos`."""
    module = _FOLDERS.get(kind, kind)
    own = import_module(f"transformers.models.{module}.processing_{module}")
    return getattr(own, PROCESSOR_MAPPING_NAMES[kind])


@contextmanager
def without_videos() -> Iterator[None]:
    """Within this context, processors are imported and built without a part for videos."""
    absent = {} if find_spec("torchvision") else {_TORCHVISION: MagicMock()}
    with (
        patch.dict(sys.modules, absent),
        patch.object(ProcessorMixin, "check_argument_for_proper_class"),
    ):
        yield
