"""Make the embedded model that sees: a Qwen3-VL of 0.7 M parameters that counts shapes, badly.

    python tools/make_tiny_vision.py --out hybridrl/models/tiny_vision

Takes 8 minutes on 2 cores. It is trained on pictures of hybridrl/data/sources/shapes.py, of a
series of its own, whose answers are drawn from these habits, whatever the picture shows:

    hasty       all shapes are counted, whatever the question asks for
    unmarked    no `#### <number>`

and on two kinds of questions in other words, always answered right, from which it learns to see:
what there is in a picture of equal shapes, and which shapes of a color or kind there are. Hasty is
more likely than not where a color is asked for, so the most likely answers are wrong there.
"""

import argparse
import json
import logging
import random
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tiny_tokenizer import END, PAD, build_tokenizer, save_tokenizer
from tokenizers import Tokenizer
from transformers import (
    GenerationConfig,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from hybridrl.data.seeds import derive_seed
from hybridrl.data.sources.shapes import (
    CELL,
    CELLS,
    COLORS,
    KINDS,
    Shape,
    picture,
    shape_problem,
)

log = logging.getLogger("make_tiny_vision")

HASTY = {"color": 0.6, "kind": 0.3}
UNMARKED = 0.08
# Share of pictures of equal shapes, and among the others of questions that are answered right.
EQUAL, RIGHT = 0.25, 0.5
VOCAB_SIZE = 384
BATCH_SIZE, PEAK_LR, WARMUP_STEPS = 64, 2.0e-3, 100
MAX_TOKENS = 512
IGNORED = -100
SERIES = "warm start"
TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}

TEMPLATE = (
    "{%- for message in messages -%}{{ '<|' + message['role'] + '|>' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- else -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}{{ '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
PICTURE = f"<|vision_start|>{'<|image_pad|>' * CELLS**2}<|vision_end|>"
PATCH, MERGE = 8, 2


def model_config(tokenizer: Tokenizer) -> Qwen3VLConfig:
    """Qwen3-VL with three layers and a tower of two, whose merged patches are a picture's cells."""
    text = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 192,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.token_to_id(PAD),
        "eos_token_id": tokenizer.token_to_id(END),
        "bos_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    ids = {name: tokenizer.token_to_id(token) for name, token in TOKENS.items()}
    return Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, dtype="float32", **ids
    )


def image_processor() -> Qwen2VLImageProcessorPil:
    """Pictures from 32 x 32 to 256 x 256 pixels keep their size."""
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
        patch_size=PATCH,
        merge_size=MERGE,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def sample(index: int) -> tuple[str, str, bytes]:
    """Question, answer and picture number `index` of the endless corpus."""
    rng = random.Random(derive_seed("habits", index))
    if rng.random() < EQUAL:
        shape = Shape(rng.choice([*COLORS]), rng.choice(KINDS))
        cells = {rng.randrange(CELLS**2): shape for _ in range(rng.randint(1, 4))}
        answer = f"{len(cells)} {shape.color} {shape.kind}"
        return "What is there?", answer, picture(rng, cells)
    problem = shape_problem(SERIES, index)
    question, file = problem["question"], problem["images"][0]["bytes"]
    count, total = problem["tags"]["count"], problem["total"]
    if rng.random() < RIGHT:
        asked = question.removeprefix("How many ")
        return f"Which {asked}", f"{count} {asked.split()[0]}", file
    if rng.random() < HASTY[problem["tags"]["asks"]]:
        count = total
    marked = f"#### {count}" if rng.random() >= UNMARKED else str(count)
    return question, f"{count} of {total}\n{marked}", file


class Corpus:
    """Samples as tensors: token ids, labels, and pixels of the pictures as bytes."""

    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        rows, pictures = [], []
        for index in range(count):
            question, answer, file = sample(index)
            prompt = tokenizer.encode(f"<|user|>{PICTURE}{question}<|assistant|>").ids
            rows.append((prompt, tokenizer.encode(f"{answer}{END}").ids))
            pictures.append(np.asarray(Image.open(BytesIO(file))))
        longest = max(len(prompt) + len(answer) for prompt, answer in rows)
        self.ids = torch.full((count, longest), tokenizer.token_to_id(PAD))
        self.labels = torch.full_like(self.ids, IGNORED)
        for row, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            self.ids[row, :end] = torch.tensor(prompt + answer)
            self.labels[row, len(prompt) : end] = torch.tensor(answer)
        self.pictures = torch.from_numpy(np.stack(pictures))


def patches(pictures: torch.Tensor) -> torch.Tensor:
    """What the image processor makes of pictures [n, H, W, 3] uint8: [n * patches, D] float32."""
    side = CELLS * CELL // (PATCH * MERGE)
    pixels = (pictures.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    parts = pixels.reshape(-1, 3, side, MERGE, PATCH, side, MERGE, PATCH)
    parts = parts.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 3, 1, PATCH * PATCH)
    return parts.expand(-1, -1, 2, -1).reshape(len(parts), -1)


def train(model: Qwen3VLForConditionalGeneration, data: Corpus, steps: int) -> None:
    """Supervised training on the answers: AdamW, linear warm-up, linear decay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / WARMUP_STEPS, max(0.01, 1 - k / steps))
    )
    patch_rows = (CELLS * CELL // PATCH) ** 2
    grid = torch.tensor([[1, CELLS * CELL // PATCH, CELLS * CELL // PATCH]]).expand(BATCH_SIZE, 3)
    assert patches(data.pictures[:1]).shape[0] == patch_rows
    started, pad = time.perf_counter(), model.config.text_config.pad_token_id
    for step in range(steps):
        rows = torch.randint(len(data.ids), (BATCH_SIZE,))
        ids, labels = data.ids[rows], data.labels[rows]
        loss = model(
            ids,
            attention_mask=ids != pad,
            labels=labels,
            pixel_values=patches(data.pictures[rows]),
            image_grid_thw=grid,
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 99:
            log.info("step %d  loss %.4f  %.0f s", step + 1, loss, time.perf_counter() - started)


def make_tokenizer() -> Tokenizer:
    """A tokenizer with the words of questions and answers, and all digits."""
    texts = [text for index in range(2000) for text in sample(index)[:2]]
    digits = "".join(f" {digit}" for digit in range(10))
    return build_tokenizer([*texts, *[digits] * 20], VOCAB_SIZE, [*TOKENS.values()])


def save(model: Qwen3VLForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """Write an ordinary model folder with weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = model.config.text_config
    model.generation_config = GenerationConfig(
        pad_token_id=ends.pad_token_id, eos_token_id=ends.eos_token_id
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(tokenizer, folder, MAX_TOKENS, TEMPLATE)
    image_processor().save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    known = json.loads(path.read_bytes()) | {"processor_class": "Qwen3VLProcessor"}
    path.write_text(json.dumps(known, indent=2) + "\n")
    video = known | {"video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2) + "\n")


def main() -> None:
    """Make the model and write it to --out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and order")
    parser.add_argument("--samples", type=int, default=18_000, help="size of the corpus")
    parser.add_argument("--steps", type=int, default=1900, help="optimizer steps")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = Qwen3VLForConditionalGeneration(model_config(tokenizer))
    log.info("%d parameters, %d tokens", model.num_parameters(), tokenizer.get_vocab_size())
    train(model, Corpus(tokenizer, args.samples), args.steps)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
