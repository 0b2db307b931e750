"""vLLM with images: what each rank of an engine does with two sets of weights of a tiny model."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from hybridrl.config.choices import DType
from hybridrl.config.planner.families import placeholder_ids
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.images import PromptImages
from hybridrl.data.requests import Request, Requests, SamplingParams
from hybridrl.data.sources.image_tokens import ImageProcessor
from hybridrl.models.resolve import read_model_config
from hybridrl.models.vocabulary import stop_token_ids
from hybridrl.rollout.engine import EnginePart
from hybridrl.rollout.sampler import Sampler
from hybridrl.rollout.trace import live_tensors
from hybridrl.rollout.vllm.engine import VLLMEngine
from hybridrl.rollout.vllm.images import ImageInputs
from tests.support.reshard_cases import (
    Actor,
    Case,
    build_worker,
    differences,
    error_of,
    rollout_config,
    set_rank_environment,
)
from tests.support.tiny_vision import PAD, pictures, prompt_of, tiny_vision_folder

# An engine that is collected takes the process group with it.
KEPT: list[Any] = []
RESPONSE = 12
GREEDY, SAMPLED = SamplingParams(0.0), SamplingParams(1.0)
# The other weights are these plus noise, in the tower as well.
NOISE = 0.05

Row = tuple[list[int], PromptImages | None]


def write_folders(name: str, root: Path) -> None:
    """Checkpoints A and B of a model of tests/support/tiny_vision.py."""
    for which in "AB":
        tiny_vision_folder(name, root / which)
    model = AutoModelForImageTextToText.from_pretrained(root / "A", dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(NOISE * torch.randn(param.shape, generator=generator))
    model.save_pretrained(root / "B")


def rows_of(name: str) -> list[Row]:
    """Prompts with no image, one and two; the third is longer than a block of the KV cache."""
    words = [(7 * k) % 90 + 5 for k in range(140)]
    return [
        prompt_of(name, words[:4], []),
        prompt_of(name, words[:4], pictures((64, 96))),
        prompt_of(name, words, pictures((96, 64), (64, 64), seed=1)),
    ]


def asked(
    rows: Sequence[Row], params: SamplingParams = SAMPLED, each: int = 2, **call: Any
) -> Requests:
    requests = [
        Request(f"{index}-{k}", ids, 5 * index + k, RESPONSE, params, images=images)
        for index, (ids, images) in enumerate(rows)
        for k in range(each)
    ]
    return Requests(requests, torch.arange(len(rows)).repeat_interleave(each), each, **call)


@torch.no_grad()
def log_prob_errors(batch: RolloutBatch, requests: Requests, model: PreTrainedModel) -> list[float]:
    """The largest |log-prob by transformers - by vLLM| of each prompt, placeholders banned."""
    config = read_model_config(model.name_or_path)
    largest: dict[int, float] = {}
    for request, response, reported, group in zip(
        requests.requests,
        batch.responses.rows(),
        batch.rollout_log_probs.rows(),
        batch.group_id.tolist(),
        strict=True,
    ):
        ids = torch.tensor([request.prompt + response.tolist()])
        images = {} if request.images is None else dict(request.images.tensors)
        if "image_grid_thw" in images:
            images["mm_token_type_ids"] = (ids == PAD).int()
        logits = model(input_ids=ids, **images).logits[0, len(request.prompt) - 1 : -1]
        logits[:, placeholder_ids(config)] = -math.inf
        exact = logits.log_softmax(-1).gather(1, response[:, None].long())[:, 0]
        error = float((exact - reported).abs().max())
        largest[group] = max(largest.get(group, 0.0), error)
    return [*largest.values()]


def look(name: str, root: Path) -> dict[str, Any]:
    """What an engine on one rank samples and refuses."""
    set_rank_environment()
    config = rollout_config(Case("any", DType.float32, tp=1), root / "A", max_prompt_tokens=200)
    engine = VLLMEngine(config, root / "A", stop_token_ids(root / "A"), "cpu")
    KEPT.append(engine)
    models = {
        which: AutoModelForImageTextToText.from_pretrained(root / which, dtype=torch.float32)
        for which in "AB"
    }
    sampler, rows = Sampler(engine, config), rows_of(name)

    def take(which: str) -> None:
        for part in EnginePart:
            engine.wake(part)
        engine._model.load_weights(models[which].state_dict().items())

    def sample(which: str) -> list[float]:
        return log_prob_errors(sampler.generate(asked(rows), 0), asked(rows), models[which])

    take("A")
    engine.sync()
    seen: dict[str, Any] = {"A": sample("A"), "again": sample("A")}
    seen["encoded"] = [*engine._core.engine_core.scheduler.encoder_cache_manager.cached]
    seen |= refused(engine, config.model, sampler, rows, name)
    biased = replace(SAMPLED, more={"logit_bias": {PAD: 100.0}})
    seen["banned"] = placeholder_ids(read_model_config(config.model.path))
    seen["biased"] = sampler.generate(asked(rows, biased), 0).responses.values.tolist()
    seen |= continued(engine, sampler, rows)
    sample("A")
    take("B")
    with patch.object(ImageInputs, "reset"):  # keeps states of images, and their keys
        engine.sync()
    seen["stale"] = sample("B")
    engine.sync()
    seen["B"] = sample("B")
    return seen


def refused(
    engine: VLLMEngine, model: Any, sampler: Sampler, rows: list[Row], name: str
) -> dict[str, Any]:
    """Errors for prompts with other placeholders than their images', and for another processor."""
    ids, images = rows[1]
    first = ids.index(PAD)
    wrong = {
        "twice": ids[:first] + ids[first : ids.index(PAD) + 1] * 3 + ids[first:],
        "none": [token for token in ids if token != PAD],
        "less": ids[:first] + ids[first + 1 :],
    }
    errors = {
        key: error_of(lambda row=row: sampler.generate(asked([(row, images)]), 0))
        for key, row in wrong.items()
    }
    errors["no_images"] = error_of(lambda: sampler.generate(asked([(ids, None)]), 0))
    processed = ImageProcessor.processed

    def otherwise(self: ImageProcessor, files: Any) -> PromptImages:
        made = processed(self, files)
        pixels = made.tensors["pixel_values"].clone()
        pixels.view(-1)[0] += 2**-20
        return PromptImages(made.keys, {**made.tensors, "pixel_values": pixels})

    inputs = engine._images
    assert inputs is not None
    errors["equal"] = error_of(lambda: inputs.compare(ImageProcessor(model)))
    with patch.object(ImageProcessor, "processed", otherwise):
        errors["other_pixels"] = error_of(lambda: inputs.compare(ImageProcessor(model)))
    shared = [inputs.features(one) for one in asked(rows[2:]).requests]
    return {"errors": errors, "shared": shared[0] is shared[1], "own": ids.count(PAD)}


def continued(engine: VLLMEngine, sampler: Sampler, rows: list[Row]) -> dict[str, Any]:
    """Greedy responses at once, in two calls, and held over a sync with their keys and values."""
    whole = sampler.generate(asked(rows, GREEDY, 1), 0)
    seen: dict[str, Any] = {"whole": [row.tolist() for row in whole.responses.rows()]}
    for kind, holds in (("grown", False), ("held", True)):
        first = sampler.generate(asked(rows, GREEDY, 1, token_budget=4.0, holds=holds), 0)
        engine.sync()
        begun = [row.tolist() for row in first.responses.rows()]
        more = [(ids + new, images) for (ids, images), new in zip(rows, begun, strict=True)]
        rest = asked(more, GREEDY, 1, holds=holds)
        left = [
            one._replace(max_tokens=RESPONSE - len(new))
            for one, new in zip(rest.requests, begun, strict=True)
        ]
        second = sampler.generate(replace(rest, requests=left), 0)
        ends = second.responses.rows()
        seen[kind] = [new + row.tolist() for new, row in zip(begun, ends, strict=True)]
        seen[f"parts_{kind}"] = begun
    return seen


def reshard(name: str, dtype: DType, tp: int, root: Path) -> dict[str, Any]:
    """Names of tensors that differ from vLLM's own load, after reshards of A and then B."""
    set_rank_environment()
    case = Case(name, dtype, tp)
    worker = build_worker(case, root, "cpu", max_prompt_tokens=200)
    KEPT.append(worker)
    columns = worker.columns(case.spec())
    trains = {"train_vision": True}
    actor = Actor(root / "A", replace(case.spec(), columns=columns), worker.mesh, **trains)
    worker.connect({"actor": actor})
    engine: Any = worker.engine
    seen: dict[str, Any] = {"written": sorted(engine.trace.parameters), "columns": columns}
    rows = rows_of(name)
    for version, which in ((1, "A"), (2, "B")):
        actor.take_weights(root / which)
        worker.reshard(version)
        live = tensors_of(engine._model)
        model = AutoModelForImageTextToText.from_pretrained(root / which, dtype=torch.float32)
        # The trainer in this process has packed Qwen3.5's recurrences.
        if dtype is DType.float32 and name != "qwen3_5":
            batch = worker.generate(asked(rows))
            seen[f"errors_{which}"] = log_prob_errors(batch, asked(rows), model)
        for tensor in engine.tensors().values():
            tensor.fill_(math.nan)
        engine._model.load_weights(model.state_dict().items())  # rounds where it should
        seen[f"differs_{which}"] = differences(live, tensors_of(engine._model))
    return seen


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Copies of a model's parameters and persistent buffers."""
    kept = {name for name, _ in model.named_parameters()} | model.state_dict().keys()
    return {name: x.clone() for name, x in live_tensors(model).items() if name in kept}
