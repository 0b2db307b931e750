"""What a micro-batch's images become: each once, those of no row, and positions of tokens."""

from dataclasses import replace

import pytest
import torch

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.images import ImageRows
from hybridrl.data.ragged import Ragged
from hybridrl.distributed.forward.packing import pack
from hybridrl.distributed.forward.sequence_parallel import SequenceGroup
from hybridrl.distributed.forward.vision import image_packer, inputs_with_images, vision_parts
from tests.support.tiny_vision import PAD, VISION, pictures, prompt_of, tiny_vision_model

CPU = torch.device("cpu")


def batch_of(name, *sizes):
    """A response to each prompt; equal sizes are the same prompt."""
    made = {size: prompt_of(name, [7, 8, 9], pictures(*size)) for size in sizes}
    lengths = torch.full((len(sizes),), 2)
    values = Ragged(torch.zeros(2 * len(sizes)), lengths)
    return RolloutBatch(
        prompts=Ragged.from_rows([torch.tensor(made[size][0]) for size in sizes], torch.int64),
        responses=Ragged(torch.arange(2 * len(sizes)) + 20, lengths),
        response_mask=Ragged(torch.ones(2 * len(sizes), dtype=torch.bool), lengths),
        rollout_log_probs=values,
        group_id=torch.arange(len(sizes)),
        weight_version=torch.zeros(len(sizes), dtype=torch.int64),
        truncated=torch.zeros(len(sizes), dtype=torch.bool),
        images=ImageRows(tuple(made[size][1] for size in sizes)),
    )


ONE, TWO, NONE = ((64, 96),), ((96, 64), (64, 64)), ()


@pytest.mark.parametrize("name", VISION)
def test_each_image_goes_through_the_tower_once_and_no_image_through_as_a_small_one(name):
    model = tiny_vision_model(name)
    packer = image_packer(model)
    rows = batch_of(name, TWO, ONE, NONE, TWO)
    packed = pack(rows, CPU, images=packer)
    assert packed.images.order == [0, 1, 2, 0, 1]
    base = model.base_model
    states = inputs_with_images(base, packed.input_ids, packed.images)["inputs_embeds"][0]
    of_rows = states.split(rows.num_tokens.tolist())
    torch.testing.assert_close(of_rows[0][:-2], of_rows[3][:-2], rtol=0, atol=0)
    alone = pack(batch_of(name, ONE), CPU, images=packer)
    own = inputs_with_images(base, alone.input_ids, alone.images)["inputs_embeds"][0]
    torch.testing.assert_close(of_rows[1][:-2], own[:-2])
    none = pack(batch_of(name, NONE, NONE), CPU, images=packer)
    nothing = inputs_with_images(base, none.input_ids, none.images)["inputs_embeds"]
    assert none.images.order == [] and not len(none.images.places)
    text = base.get_input_embeddings()(none.input_ids)
    assert nothing.equal(text)
    (gradient,) = torch.autograd.grad(nothing.sum(), next(vision_parts(model)[0].parameters()))
    assert gradient.eq(0).all()


def test_tokens_that_are_not_those_of_the_images_end_the_run():
    packer = image_packer(tiny_vision_model("qwen3_vl"))
    batch = batch_of("qwen3_vl", ONE)
    fewer = replace(batch, prompts=Ragged.from_rows([torch.tensor([5, PAD, 6])], torch.int64))
    with pytest.raises(ValueError, match="1 tokens for images that have 6 states"):
        pack(fewer, CPU, images=packer)


def test_positions_are_those_of_each_sequence_in_time_height_and_width():
    packed = pack(
        batch_of("qwen3_vl", NONE, ONE), CPU, images=image_packer(tiny_vision_model("qwen3_vl"))
    )
    text, time, height, width = packed.position_ids[:, 0].tolist()
    assert text == [*range(5), *range(13)]
    # Behind the image, of two by three states, positions go on from its longer side.
    rest = [4, 5, 6, 7, 8, 9]
    assert time == [*range(5), 0, *[1] * 6, *rest]
    assert height == [*range(5), 0, 1, 1, 1, 2, 2, 2, *rest]
    assert width == [*range(5), 0, 1, 2, 3, 1, 2, 3, *rest]


def test_mistral_counts_tokens():
    packer = image_packer(tiny_vision_model("mistral3"))
    packed = pack(batch_of("mistral3", ONE), CPU, images=packer)
    assert packed.position_ids.dim() == 2


def test_batches_without_images_run_no_tower():
    batch = replace(batch_of("qwen3_vl", NONE), images=None)
    packed = pack(batch, CPU, images=image_packer(tiny_vision_model("qwen3_vl")))
    assert packed.images is None and packed.position_ids.shape == (1, 5)


def test_images_need_a_tower_and_whole_sequences():
    with pytest.raises(ValueError, match="without a tower"):
        pack(batch_of("qwen3_vl", ONE), CPU)
    packer = image_packer(tiny_vision_model("qwen3_vl"))
    with pytest.raises(ValueError, match="share sequences"):
        pack(batch_of("qwen3_vl", ONE), CPU, SequenceGroup("group", 2, 0), images=packer)
