"""Models that take images: what is refused by name, and what the plan says and counts."""

import json
from functools import partial
from io import StringIO

import pytest
import torch
from rich.console import Console

from hybridrl.config.planner.memory import largest, rank_phases, roles_of
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.images import ImageRows, PromptImages
from hybridrl.data.partition import partition_by_micro_batch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import UpdateSizes, images_cost, schedule
from hybridrl.plan.tables import plan
from tests.support.composing import GPU_NODE, TINY, examined, made, mistakes
from tests.support.tiny_vision import VISION, tiny_vision_model

CONFIG = json.loads(VISION["qwen3_vl"].to_json_string())
CONFIG["text_config"]["max_position_embeddings"] = 4096
GPU = ("hardware=gpu", "fsdp.compile=false")
MISTAKES = """
images_of_parts fsdp.ulysses_size fsdp.ulysses_size=2 | whole sequences
tower_under_lora actor.train_vision actor.train_vision=true lora=default | adapters
"""
ONE = "rollout.responses_per_prompt=1"
MISTAKES += f"""\
tower_of_rewards actor.train_vision actor.train_vision=true algorithm=bradley_terry {ONE} | frozen
"""
NO_TOWER = """
no_tower actor.train_vision actor.train_vision=true | no images
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_what_towers_do_not_allow_is_refused(mistake):
    assert made(mistake, *GPU, model=CONFIG, machine=GPU_NODE) == [mistake]


@pytest.mark.parametrize("mistake", mistakes(NO_TOWER))
def test_a_tower_that_is_not_there_is_not_trained(mistake):
    model = TINY | {"max_position_embeddings": 4096}
    assert made(mistake, "hardware=gpu", model=model, machine=GPU_NODE) == [mistake]


@pytest.mark.parametrize("name", VISION)
def test_sizes_of_a_tower_are_counted(name):
    model, vision = (
        tiny_vision_model(name),
        model_shape(json.loads(VISION[name].to_json_string())).vision,
    )
    own = {k: p.numel() for k, p in model.base_model.named_parameters() if "language" not in k}
    assert vision.parameters == sum(own.values())
    assert (vision.layers, vision.width, vision.intermediate, vision.merged) == (2, 64, 96, 4)
    side = 14 if name in ("qwen2_5_vl", "mistral3") else 16
    channels = 3 if name == "mistral3" else 6
    assert (vision.side, vision.values) == (side, channels * side**2)
    assert vision.patches([1, 4, 6]) == vision.patches([4 * side, 6 * side]) == 24


def test_a_tower_has_moments_only_if_it_is_trained():
    case = examined(GPU, model=CONFIG, machine=GPU_NODE)
    trained = examined([*GPU, "actor.train_vision=true"], model=CONFIG, machine=GPU_NODE)
    tower = case.shape.vision.parameters
    frozen, moving = (roles_of(one.config, one.shape)[0] for one in (case, trained))
    assert frozen.held == moving.held == case.shape.parameters
    assert frozen.trained == case.shape.parameters - tower and moving.trained == frozen.held
    least, most = (
        largest(p for p in rank_phases(one.config, one.shape, 1 << 37) if "update" in p.name).total
        for one in (case, trained)
    )
    assert most > least + 8 * tower // case.config.fsdp.shards


def rows_with(images):
    count = len(images)
    values = Ragged(torch.zeros(count), torch.ones(count, dtype=torch.int64))
    return RolloutBatch(
        prompts=values.like(torch.zeros(count, dtype=torch.int64)),
        responses=values.like(torch.zeros(count, dtype=torch.int64)),
        response_mask=values.like(torch.ones(count, dtype=torch.bool)),
        rollout_log_probs=values,
        group_id=torch.arange(count),
        weight_version=torch.zeros(count, dtype=torch.int64),
        truncated=torch.zeros(count, dtype=torch.bool),
        images=ImageRows(tuple(images)),
    )


def test_images_count_in_the_balance_of_ranks():
    """Of four equal responses those with the two large images are on different ranks."""
    shape = model_shape(CONFIG)
    large = PromptImages(("a",), {"image_grid_thw": torch.tensor([[1, 64, 64]])})
    sizes = UpdateSizes(
        2,
        4,
        1,
        4,
        float,
        partition_by_micro_batch,
        image_cost=partial(images_cost, shape, trains=False),
    )
    for images in ([large, large, None, None], [None, large, None, large]):
        dealt = schedule(rows_with(images), sizes, seed=1, step=1)
        for rank in (0, 1):
            rows = dealt.shard(2)[rank].batch.images.rows
            assert [row is large for row in sorted(rows, key=id)].count(True) == 1
    assert images_cost(shape, large, trains=True) == 3 * images_cost(shape, large, trains=False)


def test_the_plan_names_what_makes_states_of_images():
    case = examined(GPU, model=CONFIG, machine=GPU_NODE)
    console = Console(width=400, record=True, file=StringIO())
    console.print(plan(case.config, case.shape, GPU_NODE))
    text = console.export_text()
    assert "of these parameters, frozen; 2 layers, a token for each 4 patches of 16 x 16" in text
