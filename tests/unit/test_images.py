"""Images of a batch: responses to a prompt share them, also in another process."""

import pickle
from dataclasses import replace

import torch

from hybridrl.data.batch import RolloutBatch
from hybridrl.data.images import PromptImages, image_rows
from hybridrl.data.requests import Request, Requests, SamplingParams
from tests.support.batches import batch_of
from tests.support.fake_engine import FakeEngines

PARAMS = SamplingParams(1.0)


def images(number: int) -> PromptImages:
    pixels = torch.full((4, 3), float(number))
    return PromptImages((f"image-{number}",), {"pixel_values": pixels})


def test_selected_and_joined_rows_keep_their_images():
    first, second = images(1), images(2)
    batch = replace(batch_of([3, 1, 2]), images=image_rows([first, None, second]))
    assert batch.select([2, 0]).images.rows == (second, first)
    assert batch.adding(scores=batch.rollout_log_probs).images is batch.images
    joined = RolloutBatch.concat([batch, batch_of([1])], torch.tensor([3, 2, 1, 0]))
    assert joined.images.rows == (None, second, None, first)
    assert RolloutBatch.concat([batch_of([1]), batch_of([2])]).images is None


def test_responses_to_a_prompt_share_its_images_on_the_wire():
    prompts, shared = [[1, 2], [3]], [images(1), None]
    asked = [
        Request(f"{p}-{k}", prompts[p], k, 2, PARAMS, images=shared[p])
        for p in range(2)
        for k in range(3)
    ]
    requests = Requests(asked, torch.tensor([0] * 3 + [1] * 3), each=3)
    (pieces,) = requests.pieces(1)
    whole = Requests.assemble(pickle.loads(pickle.dumps([piece() for piece in pieces])))
    first, *others = [one.images for one in whole.requests]
    assert first.tensors["pixel_values"].tolist() == [[1.0] * 3] * 4 and first.keys == ("image-1",)
    assert all(one is first for one in others[:2]) and others[2:] == [None] * 3
    batch = pickle.loads(pickle.dumps(replace(batch_of([1, 1]), images=image_rows(shared[:1] * 2))))
    assert batch.images.rows[0] is batch.images.rows[1]


def test_answers_of_engines_get_the_images_that_were_sent():
    shared = images(1)
    asked = [Request(f"0-{k}", [1], k, 2, PARAMS, images=shared) for k in range(2)]
    answer = FakeEngines(lambda request: [7], 1).generate(Requests(asked, torch.tensor([0, 0]), 2))
    assert answer.images.rows == (shared, shared)
