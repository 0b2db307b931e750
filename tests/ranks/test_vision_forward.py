"""Images in packed forwards: log-probs, values and gradients are those of transformers alone.

Reference: transformers' own models in one process, one response at a time, with the images' tensors
as arguments, no packing, no FSDP.
"""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModel, AutoModelForImageTextToText

from hybridrl.config.choices import Accumulation
from hybridrl.config.planner.families import placeholder_ids
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.images import ImageRows
from hybridrl.data.ragged import Ragged
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.training import Training
from tests.ranks.test_gradients import KL_COEF, policy_gradients
from tests.support.launch import run_on_ranks
from tests.support.role_configs import actor_config, critic_config, fsdp_config
from tests.support.tiny_vision import (
    PAD,
    VISION,
    pictures,
    prompt_of,
    tiny_vision_folder,
)
from tests.support.training_batches import scheduled
from tests.support.whole_weights import relative_difference

# Sizes of each row's pictures; the second and third are responses to one prompt.
PICTURES = ((), ((64, 96),), ((64, 96),), ((96, 64), (64, 64)), (), ((40, 100),), (), ())
TOWER = ("visual", "vision_tower", "multi_modal_projector")


def vision_batch(name):
    """Eight responses, of which four have one image or two."""
    generator = torch.Generator().manual_seed(1)
    prompts, images = [], []
    for row, sizes in enumerate(PICTURES):
        words = torch.randint(5, 500, (2 + row % 3,), generator=generator).tolist()
        ids, made = prompt_of(name, words, pictures(*sizes, seed=len(sizes)))
        prompts.append(ids)
        images.append(made)
    prompts[2], images[2] = prompts[1], images[1]
    lengths = torch.tensor([4, 9, 2, 6, 12, 5, 3, 8])

    def normal(mean=0.0):
        return Ragged(mean + 0.3 * torch.randn(int(lengths.sum()), generator=generator), lengths)

    ids = torch.randint(5, 500, (int(lengths.sum()),), generator=generator)
    mask = torch.ones(len(ids), dtype=torch.bool)
    mask[[5, 6, 20]] = False
    return RolloutBatch(
        prompts=Ragged.from_rows([torch.tensor(row) for row in prompts], torch.int64),
        responses=Ragged(ids, lengths),
        response_mask=Ragged(mask, lengths),
        rollout_log_probs=normal(-6.2),
        group_id=torch.arange(8),
        weight_version=torch.zeros(8, dtype=torch.int64),
        truncated=torch.zeros(8, dtype=torch.bool),
        images=ImageRows(tuple(images)),
        added={
            "old_log_probs": normal(-6.2),
            "ref_log_probs": normal(-6.2),
            "values": normal(),
            "advantages": normal(),
            "returns": normal(),
        },
    )


def arguments(name, batch):
    """Of transformers' model for a row."""

    def of_row(row, ids):
        images = batch.images.rows[row]
        if images is None:
            return {}
        kinds = {} if name == "mistral3" else {"mm_token_type_ids": (ids == PAD).int()}
        return {**images.tensors, **kinds}

    return of_row


def trained(worker, loss, batch, max_tokens):
    """Whole gradients, and of each micro-batch whether it has images."""
    ranks = dist.get_world_size()
    dealt = scheduled(batch, num_ranks=ranks, mini_batch_size=8, max_tokens=max_tokens)
    ((micros, totals),) = dealt.shard(ranks)[dist.get_rank()].mini_batches()
    if dist.get_rank() % 2:  # so that images meet responses without
        micros.reverse()
    training = Training(worker.optimizer, loss, worker.config.fsdp)
    training.accumulate_gradients(micros, totals)
    named = worker.model.named_parameters()
    whole = {name: p.grad.full_tensor() for name, p in named if p.grad is not None}
    worker.optimizer.adamw.zero_grad()
    return whole, [any(row is not None for row in micro.images.rows) for micro in micros]


def on_ranks(name, folder, changes):
    """Gradients of actor and critic, log-probs, and the first ratio."""
    ranks, batch = dist.get_world_size(), vision_batch(name)
    spec = fsdp_config(dp_shard=ranks, activation_checkpointing=True, **changes)
    mesh = build_mesh(spec, "cpu")
    actor = ActorWorker(actor_config(folder, spec, train_vision=True), mesh)
    frozen = ActorWorker(actor_config(folder, spec), mesh)
    critic = CriticWorker(critic_config(folder, spec), mesh)
    actor.kl_coef = frozen.kl_coef = KL_COEF
    policy, with_images = trained(actor, actor.policy_loss, batch, max_tokens=16)
    of_text, _ = trained(frozen, frozen.policy_loss, batch, max_tokens=60)
    value, _ = trained(critic, critic.value_loss, batch, max_tokens=60)
    dealt = scheduled(batch, num_ranks=ranks, mini_batch_size=4, max_tokens=50)
    parts = [None] * ranks
    mine = dealt.shard(ranks)[dist.get_rank()]
    dist.all_gather_object(parts, actor.compute_log_probs(mine))
    old = dealt.join(parts)
    metrics = actor.update(
        dealt.adding(old_log_probs=old).shard(ranks)[dist.get_rank()], 1, kl_coef=KL_COEF
    )
    head = {f"head.{k}": p.full_tensor() for k, p in critic.model.head.named_parameters()}
    states = sum(param.numel() for param in frozen.optimizer.parameters)
    return policy, of_text, value, old, metrics, with_images, head, states


def expected(name, folder):
    """Of transformers alone: gradients of the policy, and log-probs at temperature 0.8."""
    batch = vision_batch(name)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    banned = placeholder_ids(model.config.to_dict())
    images = arguments(name, batch)
    gradients = policy_gradients(model, batch, None, images, banned)
    log_probs = []
    for row, (prompt, response) in enumerate(
        zip(batch.prompts.rows(), batch.responses.rows(), strict=True)
    ):
        ids = torch.cat([prompt, response])[None]
        with torch.no_grad():
            logits = model(input_ids=ids, **images(row, ids)).logits[0, len(prompt) - 1 : -1] / 0.8
        logits[:, banned] = -torch.inf
        log_probs.append(logits.log_softmax(-1).gather(-1, response[:, None])[:, 0])
    return gradients, torch.cat(log_probs)


def value_gradients(name, folder, head):
    batch = vision_batch(name)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    images, total = arguments(name, batch), 0.0
    fields = ("prompts", "responses", "response_mask", "values", "returns")
    for row, fields_ in enumerate(
        zip(*(getattr(batch, field).rows() for field in fields), strict=True)
    ):
        prompt, response, mask, old, target = fields_
        ids = torch.cat([prompt, response])[None]
        hidden = model(input_ids=ids, **images(row, ids)).last_hidden_state[0]
        value = (hidden[len(prompt) - 1 : -1] @ head["head.weight"].T + head["head.bias"])[:, 0]
        clipped = old + (value - old).clamp(-0.2, 0.2)
        worse = torch.maximum((value - target) ** 2, (clipped - target) ** 2)
        total = total + 0.5 * worse[mask].sum()
    (total / batch.response_mask.values.sum()).backward()
    return {f"backbone.{name}": p.grad for name, p in model.named_parameters()}


def is_of_tower(name):
    return any(part in name for part in TOWER)


CASES = [
    *((name, 1, {}) for name in VISION),
    *((name, 2, {}) for name in VISION),
    ("qwen3_vl", 2, {"accumulation": Accumulation.sharded, "reshard_after_forward": False}),
    *(
        pytest.param((name, 2, {"compile": True}), marks=pytest.mark.slow)
        for name in ("qwen2_5_vl", "qwen3_vl", "mistral3")
    ),
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def run(request, tmp_path_factory):
    name, ranks, changes = request.param
    folder = tiny_vision_folder(name, tmp_path_factory.mktemp("vision"))
    return name, folder, run_on_ranks(on_ranks, ranks, name, folder, changes)


def test_log_probs_and_gradients_are_transformers(run):
    name, folder, ranks = run
    policy, of_text, value, old, metrics, _, head, states = ranks[0]
    gradients, log_probs = expected(name, folder)
    torch.testing.assert_close(old.values, log_probs, rtol=0, atol=1e-5)
    tower = {key: gradient for key, gradient in gradients.items() if is_of_tower(key)}
    text = {key: gradient for key, gradient in gradients.items() if key not in tower}
    assert policy.keys() == gradients.keys()
    for part in (tower, text):
        assert relative_difference({key: policy[key] for key in part}, part) < 1e-5
    assert relative_difference(of_text, text) < 1e-5
    assert states == sum(gradient.numel() for gradient in text.values())
    expected_values = value_gradients(name, folder, head)
    of_layers = {k: g for k, g in expected_values.items() if not is_of_tower(k)}
    own = {key: gradient for key, gradient in value.items() if not key.startswith("head")}
    assert relative_difference(own, of_layers) < 1e-5
    assert metrics["actor/first_log_ratio_max"] == 0.0 < metrics["actor/log_ratio_max"]


def test_ranks_without_an_image_join_those_with_one(run):
    *_, ranks = run
    flags = [with_images for *_, with_images, _, _ in ranks]
    if len(flags) > 1:
        assert any(one != other for one, other in zip(*flags, strict=True))
    else:
        assert {*flags[0]} == {True, False}
