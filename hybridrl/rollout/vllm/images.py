"""Images of prompts in vLLM: tensors of the driver, placed by vLLM's own code for images.

    Request.images -> items of vLLM -> placeholders in the request's ids -> features of its request

vLLM's processor says which ids stand for each image. So a prompt whose placeholders are expanded
twice, or not at all, ends the run before it is sampled. The vision tower's states of an image have
the number of the last sync in their key. They are dropped at each sync, so none outlives new
weights. NAMES are the private names in use.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import BatchFeature, ProcessorMixin

from hybridrl.config.planner.families import placeholder_ids
from hybridrl.config.schema import ModelConfig
from hybridrl.data.images import PromptImages
from hybridrl.data.requests import Request
from hybridrl.data.sources.image_tokens import ImageProcessor
from hybridrl.data.sources.images import read_image
from hybridrl.models.processors import load_processor
from hybridrl.models.resolve import read_model_config

NAMES: tuple[tuple[str, str], ...] = (
    ("vllm.engine.arg_utils", "EngineArgs.limit_mm_per_prompt EngineArgs.mm_processor_cache_gb"),
    ("vllm.multimodal", "MULTIMODAL_REGISTRY"),
    ("vllm.multimodal.inputs", "MultiModalFeatureSpec MultiModalKwargsItems.from_hf_inputs"),
    ("vllm.multimodal.inputs", "PlaceholderRange.get_num_embeds"),
    ("vllm.multimodal.parse", "ImageProcessorItems MultiModalDataItems"),
    (
        "vllm.multimodal.processing",
        "BaseMultiModalProcessor._find_mm_placeholders "
        "BaseMultiModalProcessor._get_mm_fields_config "
        "BaseMultiModalProcessor._get_mm_prompt_updates",
    ),
    ("vllm.multimodal.processing.context", "InputProcessingContext.get_hf_processor"),
    ("vllm.multimodal.processing.processor", "PlaceholderFeaturesInfo.to_range"),
    ("vllm.multimodal.registry", "MultiModalRegistry._create_processing_ctx"),
    ("vllm.v1.core.encoder_cache_manager", "EncoderCacheManager.reset"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.reset_encoder_cache"),
    ("vllm.v1.worker.gpu.mm.encoder_cache", "EncoderCache.reset_encoder_cache"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reset_encoder_cache"),
)


@contextmanager
def driver_processes(folder: Path) -> Iterator[dict[str, object]]:
    """Within this context, vLLM's code for images is built around the driver's processor.

    Yields arguments of vLLM's `LLM`, none for a model without images.
    """
    if not _placeholders(str(folder)):
        yield {}
        return
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal.processing.context import InputProcessingContext
    from vllm.multimodal.registry import MultiModalRegistry

    processor = copy(load_processor(folder))
    vars(processor)["video_processor"] = processor.image_processor  # vLLM reads its settings

    class Context(InputProcessingContext):
        def get_hf_processor(self, *args: object, **options: object) -> ProcessorMixin:
            return processor

    def create(self: object, model_config: object, tokenizer: object = None) -> Context:
        return Context(model_config, processor.tokenizer)

    options: dict[str, object] = {
        "limit_mm_per_prompt": {"image": 1, "video": 0},  # where vLLM measures memory
        "mm_processor_cache_gb": 0,
        "skip_tokenizer_init": False,
    }
    if "mm_device_do_normalize" in EngineArgs.__dataclass_fields__:  # not in 0.25
        # By buffers in the engine, which no sync would write.
        options["mm_device_do_normalize"] = False
    with patch.object(MultiModalRegistry, "_create_processing_ctx", create):
        yield options


def image_inputs(model: ModelConfig, runner: Any) -> "ImageInputs | None":
    """Return the images of a model runner's requests, and ban placeholders; None without images.

    Call it within `driver_processes`.

    Raises:
        RuntimeError: vLLM makes something else of images than the driver.
    """
    if not (placeholders := _placeholders(model.path)):
        return None
    ban(runner.get_model(), placeholders)
    images = ImageInputs(runner)
    images.compare(ImageProcessor(model))
    return images


def _placeholders(path: str) -> list[int]:
    return placeholder_ids(read_model_config(path))


def ban(model: Any, tokens: Sequence[int]) -> None:
    """Give tokens no probability in a model of vLLM, whatever a request asks for.

    No tensor holds them: vLLM, which loads the model now, would lose it in its sleep.
    """
    compute, runs = model.compute_logits, list[slice]()
    for token in sorted(tokens):
        start = runs.pop().start if runs and runs[-1].stop == token else token
        runs.append(slice(start, token + 1))

    def compute_logits(hidden: Tensor) -> Tensor | None:
        logits: Tensor | None = compute(hidden)
        if logits is not None:
            for run in runs:
                logits[:, run] = -math.inf
        return logits

    model.compute_logits = compute_logits


# vLLM's form of a prompt's images: tensors, key and place of each.
Features = Sequence[Any]
# Width and height of images that are compared at the start.
TRIED = ((150, 96), (70, 130))


class _Items(NamedTuple):
    """A prompt's images in vLLM: tensors of each, and the ids that stand for each."""

    tensors: Sequence[object]
    updates: Mapping[str, Sequence[Any]]


class ImageInputs:
    """Images of requests in the form that vLLM takes.

    Args:
        runner: vLLM's model runner.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        self._runner = runner
        self._processor = MULTIMODAL_REGISTRY.create_processor(runner.model_config)
        self._token: int = self._processor.info.get_hf_processor().image_token_id
        self._items: WeakKeyDictionary[PromptImages, _Items] = WeakKeyDictionary()
        self._resets = 0
        # Of the last request, whose group shares them.
        self._last: tuple[list[int], PromptImages | None, Features | None] = [], None, None

    def features(self, request: Request) -> Features | None:
        """Return `mm_features` of a request of vLLM's engine core; None without images.

        Raises:
            RuntimeError: the prompt has other placeholders than vLLM would make of the images.
        """
        prompt, images, features = self._last
        if request.prompt is not prompt or request.images is not images:
            features = self._placed(request.prompt, request.images)
            self._last = request.prompt, request.images, features
        return features

    def _placed(self, ids: list[int], images: PromptImages | None) -> Features | None:
        from vllm.multimodal.inputs import MultiModalFeatureSpec

        items = self._items_of(images)
        matches = self._processor._find_mm_placeholders(ids, items.updates).get("image", [])
        places = [match.to_range() for match in matches]
        lengths = [len(updates[0].content.full) for updates in items.updates.get("image", ())]
        placed = sum(place.get_num_embeds() for place in places)
        if (count := ids.count(self._token)) != placed or len(places) != len(lengths):
            raise RuntimeError(
                f"a prompt has {count} tokens {self._token} of images, in which vLLM finds "
                f"{len(places)} of its {len(lengths)} images, with {placed} tokens. Their "
                f"placeholders have {lengths} tokens each, expanded once. Token ids: {ids}"
            )
        if images is None:
            return None
        named = (f"{key}-{self._resets}" for key in images.keys)
        return [
            MultiModalFeatureSpec(tensors, "image", name, place, name)
            for tensors, name, place in zip(items.tensors, named, places, strict=True)
        ]

    def _items_of(self, images: PromptImages | None) -> _Items:
        if images is None:
            return _Items((), {})
        if images not in self._items:
            self._items[images] = self._made(images)
        return self._items[images]

    def _made(self, images: PromptImages) -> _Items:
        """Return vLLM's form of images, which shares their tensors where the dtype is the same."""
        from vllm.multimodal.inputs import MultiModalKwargsItems
        from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems

        dtype, tensors = self._runner.model_config.dtype, images.tensors
        inputs: dict[str, Any] = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
        sizes = [(1, 1)] * len(images)
        if "image_sizes" in tensors:  # as large as the largest image: the rest is padding
            sizes = tensors["image_sizes"].tolist()
            padded = zip(inputs["pixel_values"], sizes, strict=True)
            inputs["pixel_values"] = [pixels[:, :h, :w] for pixels, (h, w) in padded]
        made = BatchFeature(inputs)
        fields = self._processor._get_mm_fields_config(made, {})
        items = MultiModalKwargsItems.from_hf_inputs(made, fields)
        # vLLM reads their number and sizes alone.
        shown = [torch.empty(3, *size, device="meta") for size in sizes]
        data = MultiModalDataItems({"image": ImageProcessorItems(shown)})
        return _Items(items["image"], self._processor._get_mm_prompt_updates(data, {}, items))

    def compare(self, processor: ImageProcessor) -> None:
        """Compare the driver's form of images with what vLLM makes of them, bit for bit.

        Raises:
            RuntimeError: they differ.
        """
        from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems

        files, ids = [read_image(_noise(*size), Path()) for size in TRIED], [self._token]
        expanded, _ = processor.expanded(ids * len(files), files)
        ours = self._placed(expanded, processor.processed(files)) or ()
        raw = MultiModalDataItems({"image": ImageProcessorItems([file.open() for file in files])})
        made = self._processor(ids * len(files), raw)
        theirs = zip(made["mm_kwargs"]["image"], made["mm_placeholders"]["image"], strict=True)
        if expanded != made["prompt_token_ids"]:
            what = f"token ids: {expanded} and {made['prompt_token_ids']}"
        elif [(one.data, one.mm_position) for one in ours] != [*theirs]:
            what = "tensors or places of tokens"
        else:
            return
        raise RuntimeError(
            f"of two images of {' and '.join(map(str, TRIED))} pixels the driver's processor and "
            f"vLLM make different {what}. The trainer would not see what vLLM samples from. "
            "Install the versions of vLLM and transformers pinned in requirements/"
        )

    def reset(self, core: Any) -> None:
        """Drop all states of images from before a sync, also those of open requests.

        Raises:
            RuntimeError: vLLM has kept some.
        """
        self._resets, self._last = self._resets + 1, ([], None, None)
        scheduler, executor = core.engine_core.scheduler, core.engine_core.model_executor
        scheduler.reset_encoder_cache()
        executor.reset_encoder_cache()
        held = self._runner.encoder_cache  # an object since vLLM has a second model runner
        held = held if isinstance(held, dict) else held.encoder_outputs
        kept = sorted({*held, *scheduler.encoder_cache_manager.cached})
        if kept or core.engine_core.mm_receiver_cache is not None:
            raise RuntimeError(f"vLLM still holds images from before the reshard: {kept}")


def _noise(width: int, height: int) -> bytes:
    """Return a file of random pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := BytesIO(), "PNG")
    return file.getvalue()
