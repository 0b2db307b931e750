"""Tiny random models that take images, one of each family, with tokenizers and processors."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForImageTextToText,
    Mistral3Config,
    PixtralImageProcessorPil,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen3_5Config,
    Qwen3VLConfig,
)

from hybridrl.data.images import PromptImages

# Tokens of images: one for each state of one, of videos, before and behind one.
PAD, VIDEO, BEGIN, END = 500, 501, 502, 503
WORDS = 500
QWEN_TOKENS = {PAD: "<|image_pad|>", VIDEO: "<|video_pad|>"}
QWEN_TOKENS |= {BEGIN: "<|vision_start|>", END: "<|vision_end|>"}
MISTRAL_TOKENS = {PAD: "[IMG]", VIDEO: "[IMG_BREAK]", BEGIN: "[IMG_END]"}
IDS = {"image_token_id": PAD, "video_token_id": VIDEO}
IDS |= {"vision_start_token_id": BEGIN, "vision_end_token_id": END}
# Sizes that vLLM's kernels for CPUs have.
TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 32}
DELTA = {f"linear_num_{kind}_heads": count for kind, count in (("key", 2), ("value", 4))}
DELTA |= {f"linear_{kind}_head_dim": 64 for kind in ("key", "value")}
DELTA |= {"num_hidden_layers": 4, "linear_conv_kernel_dim": 4}


def _rope(sections: list[int], **more: Any) -> dict[str, Any]:
    """Rotations by three positions, which take turns at frequencies, or one after the other."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    return {"rope_parameters": rope | more}


TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2}
TOWER |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128}
# Learned positions, of a grid of eight by eight.
GRID = {"patch_size": 16, "num_position_embeddings": 64}
WINDOWS = {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56}
INTERLEAVED = {"mrope_interleaved": True}
VISION = {
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config=TEXT | _rope([4, 6, 6]), vision_config=TOWER | WINDOWS, **IDS
    ),
    "qwen3_vl": Qwen3VLConfig(
        text_config=TEXT | HEADS | _rope([6, 5, 5], **INTERLEAVED),
        vision_config=TOWER | GRID | {"deepstack_visual_indexes": [0]},
        **IDS,
    ),
    "qwen3_5": Qwen3_5Config(
        text_config=TEXT
        | HEADS
        | DELTA
        | _rope([3, 3, 2], **INTERLEAVED, partial_rotary_factor=0.5),
        vision_config=TOWER | GRID,
        **IDS,
    ),
    "mistral3": Mistral3Config(
        text_config=TEXT | HEADS | {"model_type": "mistral", "sliding_window": None},
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 32,
            "patch_size": 14,
            "image_size": 112,
        },
        image_token_index=PAD,
        tie_word_embeddings=False,
    ),
}


def tiny_vision_model(name: str) -> PreTrainedModel:
    """A model of VISION with random weights, biases and norms included; float32, CPU."""
    torch.manual_seed(sum(map(ord, name)))
    config = type(VISION[name]).from_dict(json.loads(VISION[name].to_json_string()))
    model = AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    return model


PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "mistral3": "PixtralProcessor"}
PROCESSORS |= dict.fromkeys(("qwen3_vl", "qwen3_5"), "Qwen3VLProcessor")
CHAT_TEMPLATE = (
    "{% for m in messages %}w2 {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}"
    "{% endif %} {% endfor %}{% endif %} w3 {% endfor %}"
)


def image_processor(name: str) -> Any:
    """The image processor of a model of VISION, without torchvision."""
    if name == "mistral3":
        sides = {"height": 14, "width": 14}
        return PixtralImageProcessorPil(size={"longest_edge": 112}, patch_size=sides)
    side = 14 if name == "qwen2_5_vl" else 16
    sizes = {"shortest_edge": (2 * side) ** 2, "longest_edge": 16 * (2 * side) ** 2}
    return Qwen2VLImageProcessorPil(size=sizes, patch_size=side)


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are words `w<id>`; a picture is one token, with two around it."""
    special = MISTRAL_TOKENS if name == "mistral3" else QWEN_TOKENS
    words = {special.get(i, f"w{i}"): i for i in range(TEXT["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w4"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    picture = [PAD] if name == "mistral3" else [BEGIN, PAD, END]
    text = " ".join(special[token] for token in picture)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="w4",
        pad_token="w0",
        eos_token="w1",
        extra_special_tokens=list(special.values()),
        chat_template=CHAT_TEMPLATE.replace("IMAGE", text),
    )


def tiny_vision_folder(name: str, folder: Path) -> Path:
    """The same model as an ordinary folder, with the files of its processor and tokenizer."""
    tiny_vision_model(name).save_pretrained(folder)
    tokenizer_of(name).save_pretrained(folder)
    image_processor(name).save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    known = json.loads(path.read_bytes()) | {"processor_class": PROCESSORS[name]}
    path.write_text(json.dumps(known, indent=2))
    if name == "mistral3":
        made = {"processor_class": PROCESSORS[name], "patch_size": 14, "spatial_merge_size": 2}
        (folder / "processor_config.json").write_text(json.dumps(made, indent=2))
    else:
        kind = "Qwen2VL" if name == "qwen2_5_vl" else "Qwen3VL"
        video = known | {"video_processor_type": f"{kind}VideoProcessor"}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2))
    return folder


def pictures(*sizes: tuple[int, int], seed: int = 0) -> list[Image.Image]:
    """Random pictures of these heights and widths."""
    rng = np.random.default_rng(seed)
    drawn = (rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in sizes)
    return [Image.fromarray(array) for array in drawn]


def processed(name: str, images: list[Image.Image]) -> PromptImages:
    """What the image processor makes of a prompt's images."""
    sides = {"patch_size": 28} if name == "mistral3" else {}  # as its PixtralProcessor's
    made = image_processor(name)(images=images, return_tensors="pt", **sides)
    keys = tuple(hashlib.sha256(image.tobytes()).hexdigest() for image in images)
    return PromptImages(keys, {key: torch.as_tensor(made[key]) for key in made})


def placeholders(name: str, images: PromptImages) -> list[list[int]]:
    """Token ids of each image, expanded: of Mistral 3 rows with breaks between them."""
    if name == "mistral3":
        rows = [(h // 28, w // 28) for h, w in images.tensors["image_sizes"].tolist()]
        expanded = [([PAD] * width + [VIDEO]) * height for height, width in rows]
        return [[*ids[:-1], BEGIN] for ids in expanded]
    grids = images.tensors["image_grid_thw"].prod(-1).tolist()
    return [[BEGIN, *[PAD] * (count // 4), END] for count in grids]


def prompt_of(
    name: str, words: list[int], images: list[Image.Image]
) -> tuple[list[int], PromptImages | None]:
    """Token ids, an image before each of the first words, and what is made of the images."""
    if not images:
        return words, None
    made = processed(name, images)
    before = dict(enumerate(placeholders(name, made)))
    ids = [[*before.get(index, []), word] for index, word in enumerate(words)]
    return [token for part in ids for token in part], made
