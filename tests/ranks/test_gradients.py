"""The gradient of a mini-batch does not depend on ranks, replicas or micro-batches.

Reference: transformers' own model in one process, one response at a time, no packing, no FSDP,
with the objective written out from its formula.
"""

from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModel, AutoModelForCausalLM

from hybridrl.config.choices import Accumulation, Aggregation, RouterReplay
from hybridrl.data.partition import partitioner_for
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.training import Training
from tests.support.launch import run_on_ranks
from tests.support.role_configs import actor_config, critic_config, fsdp_config
from tests.support.tiny_hf import MORE, tiny_folder
from tests.support.training_batches import (
    PROMPTS,
    RESPONSES,
    batch_with_experts,
    scheduled,
    training_batch,
)
from tests.support.whole_weights import relative_difference

KL_COEF, CLIP, ENTROPY_COEF, TEMPERATURE, VALUE_CLIP = 0.1, 0.2, 0.01, 0.8, 0.2
LONGEST = max(p + r for p, r in zip(PROMPTS, RESPONSES, strict=True))
ALL = sum(PROMPTS) + sum(RESPONSES)


def gradients(worker, loss, max_tokens, batch=None):
    """Full gradients by name, of the whole batch as one mini-batch."""
    ranks = dist.get_world_size()
    shards = ranks // worker.config.fsdp.ulysses_size
    dealt = scheduled(
        batch or training_batch(),
        num_ranks=shards,
        mini_batch_size=8 if batch is None else len(batch.last_of_episodes),
        max_tokens=max_tokens,
        partition=partitioner_for(worker.config.fsdp),
    )
    (mini,) = dealt.shard(shards)[dist.get_rank() * shards // ranks].mini_batches()
    training = Training(worker.optimizer, loss, worker.config.fsdp)
    training.accumulate_gradients(*mini)
    full = {name: p.grad.full_tensor() for name, p in worker.model.named_parameters()}
    worker.optimizer.adamw.zero_grad()
    return len(mini[0]), full


def actor_and_critic_gradients(folder, replicas, spec_changes):
    """For each token budget: micro-batches, actor's gradients, critic's gradients."""
    ranks = dist.get_world_size()
    spec = fsdp_config(dp_shard=ranks // replicas, dp_replicate=replicas, **spec_changes)
    mesh = build_mesh(spec, "cpu")
    actor = ActorWorker(actor_config(folder, spec), mesh)
    actor.kl_coef = KL_COEF
    critic = CriticWorker(critic_config(folder, spec), mesh)
    found = {}
    for max_tokens in (LONGEST, 30, ALL):
        count, policy = gradients(actor, actor.policy_loss, max_tokens)
        _, value = gradients(critic, critic.value_loss, max_tokens)
        found[max_tokens] = (count, policy, value)
    return found


def rows(batch, *names):
    return zip(*(getattr(batch, name).rows() for name in names), strict=True)


def expected_policy_gradients(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return policy_gradients(model, training_batch())


def policy_gradients(model, batch, weights=None, images=lambda row, ids: {}, banned=()):
    """Of the sum over tokens, each with the weight of its response; by default of the mean.

    `images`: more arguments of the model for a row; logits of `banned` tokens are very low.
    """
    if weights is None:
        weights = [1 / int(batch.response_mask.values.sum())] * len(batch)
    total, weights = 0.0, iter(weights)
    fields = ("prompts", "responses", "response_mask", "old_log_probs", "ref_log_probs")
    named = enumerate(rows(batch, *fields, "advantages"))
    for row, (prompt, response, mask, old, ref, advantage) in named:
        ids = torch.cat([prompt, response])[None]
        logits = model(input_ids=ids, **images(row, ids)).logits[0]
        logits = logits.index_fill(-1, torch.tensor(banned, dtype=torch.int64), -1e30)
        log_p = (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        log_prob = log_p.gather(-1, response[:, None])[:, 0]
        ratio = (log_prob - old).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        k3 = (ref - log_prob).exp() - (ref - log_prob) - 1
        entropy = -(log_p.exp() * log_p).sum(-1)
        values = -surrogate + KL_COEF * k3 - ENTROPY_COEF * entropy
        total = total + next(weights) * values[mask].sum()
    total.backward()
    return {f"lm.{name}": p.grad for name, p in model.named_parameters()}


def expected_value_gradients(folder, head):
    backbone = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    weight, bias = head["head.weight"].requires_grad_(), head["head.bias"].requires_grad_()
    batch = training_batch()
    total = 0.0
    fields = ("prompts", "responses", "response_mask", "values", "returns")
    for prompt, response, mask, old, target in rows(batch, *fields):
        hidden = backbone(input_ids=torch.cat([prompt, response])[None]).last_hidden_state[0]
        value = (hidden[len(prompt) - 1 : -1] @ weight.T + bias)[:, 0]
        clipped = old + (value - old).clamp(-VALUE_CLIP, VALUE_CLIP)
        worse = torch.maximum((value - target) ** 2, (clipped - target) ** 2)
        total = total + 0.5 * worse[mask].sum()
    (total / batch.response_mask.values.sum()).backward()
    grads = {f"backbone.{name}": p.grad for name, p in backbone.named_parameters()}
    return grads | {"head.weight": weight.grad, "head.bias": bias.grad}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tied embeddings and biases: the model with the most to get wrong."""
    return tiny_folder("qwen2", tmp_path_factory.mktemp("gradients") / "qwen2")


def expected_gradients(folder):
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(3)) / 33
    weights = {"head.weight": head, "head.bias": torch.zeros(1)}
    both = expected_policy_gradients(folder), expected_value_gradients(folder, weights)
    return [{name: as_held(grad, folder.name) for name, grad in grads.items()} for grads in both]


def as_held(grad, family):
    """Experts of gpt-oss are transposed in transformers' model."""
    return grad.mT if family == "gpt_oss" and grad.dim() == 3 else grad


@pytest.fixture(scope="module")
def expected(folder):
    return expected_gradients(folder)


@pytest.mark.parametrize(
    ("ranks", "replicas", "spec_changes"),
    [
        (1, 1, {}),
        (2, 1, {}),
        (2, 2, {}),
        (2, 2, {"accumulation": Accumulation.sharded}),
        (4, 1, {"reshard_after_forward": False}),
        (4, 2, {"activation_checkpointing": True}),
    ],
)
def test_gradient_is_that_of_one_process_and_one_response_at_a_time(
    folder, expected, ranks, replicas, spec_changes
):
    check(run_on_ranks(actor_and_critic_gradients, ranks, folder, replicas, spec_changes), expected)


def check(results, expected):
    counts = {count for count, _, _ in results[0].values()}
    assert len(counts) > 1, "the budgets must lead to different micro-batches"
    for result in results:
        for _, policy, value in result.values():
            assert relative_difference(policy, expected[0]) < 1e-5
            assert relative_difference(value, expected[1]) < 1e-5


# Four episodes, of 3, 1, 3 and 1 token sequences, and their sampled tokens.
EPISODES = torch.tensor([0, 0, 0, 1, 2, 2, 2, 3])
SAMPLED = torch.tensor([12, 6, 18, 8])


def gradients_of_episodes(folder, aggregation):
    spec = fsdp_config(dp_shard=dist.get_world_size())
    algorithm = replace(actor_config(folder, spec).algorithm, aggregation=aggregation)
    actor = ActorWorker(actor_config(folder, spec, algorithm=algorithm), build_mesh(spec, "cpu"))
    actor.kl_coef, batch = KL_COEF, replace(training_batch(), episode=EPISODES)
    return [gradients(actor, actor.policy_loss, budget, batch) for budget in (LONGEST, ALL)]


@pytest.mark.parametrize("aggregation", [Aggregation.sequence_mean, Aggregation.sequence_sum])
def test_an_episode_counts_once_however_its_branches_are_dealt(folder, aggregation):
    results = run_on_ranks(gradients_of_episodes, 2, folder, aggregation)
    batch, longest = training_batch(), actor_config(folder, fsdp_config(1)).max_response_tokens
    by_length = 1 / SAMPLED[EPISODES] if aggregation is Aggregation.sequence_mean else None
    weights = torch.full((8,), 1 / longest) if by_length is None else by_length
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = policy_gradients(model, batch, (weights / 4).tolist())
    for (few, one), (many, other) in results:
        assert few != many
        assert relative_difference(one, expected) < 1e-5
        assert relative_difference(other, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MORE)
def test_gradient_of_every_family(name, ranks, tmp_path):
    folder = tiny_folder(name, tmp_path / name)
    results = run_on_ranks(actor_and_critic_gradients, ranks, folder, 1, {}, time_limit_s=280)
    check(results, expected_gradients(folder))


BALANCE = 0.3


def balance_losses(model, ids):
    """The load-balancing loss of one sequence, from transformers' logits of the routers."""
    config = model.config
    logits = model(input_ids=ids[None], output_router_logits=True).router_logits
    number, losses = logits[0].shape[-1], []
    for layer in logits:
        probs = layer.softmax(-1)
        chosen = probs.topk(config.num_experts_per_tok).indices.flatten()
        share = torch.bincount(chosen, minlength=number) / len(chosen)
        losses.append(number * (share * probs.mean(0)).sum())
    return torch.stack(losses).mean()


def balanced_gradients(folder, ranks_spec, episode):
    """Gradients of the load-balancing loss alone, and what routers are said to do."""
    spec = fsdp_config(dp_shard=dist.get_world_size(), **ranks_spec)
    found = []
    for coef in (0.0, BALANCE):
        config = actor_config(folder, spec, router_balance_coef=coef)
        actor = ActorWorker(config, build_mesh(spec, "cpu"))
        batch = replace(training_batch(), episode=episode)
        _, policy = gradients(actor, actor.policy_loss, 30, batch)
        found.append(policy)
    report = actor.routing.report(whole_sequences=True)
    return {name: found[1][name] - found[0][name] for name in policy}, report


@pytest.mark.parametrize("episode", [None, EPISODES], ids=["alone", "branches"])
@pytest.mark.parametrize(("ranks", "changes"), [(2, {"activation_checkpointing": True})])
def test_balance_loss_is_that_of_each_sequence(ranks, changes, episode, tmp_path):
    """Those of an episode share its weight by their sampled tokens."""
    folder = tiny_folder("qwen3_moe", tmp_path / "model")
    results = run_on_ranks(balanced_gradients, ranks, folder, changes, episode)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = training_batch()
    sequences = [torch.cat(pair) for pair in rows(batch, "prompts", "responses")]
    counts = batch.response_mask.counts()
    weights = (counts > 0) / 8 if episode is None else counts / SAMPLED[EPISODES] / 4
    losses = torch.stack([balance_losses(model, ids) for ids in sequences])
    (BALANCE * losses * weights).sum().backward()
    wanted = {f"lm.{name}": p.grad for name, p in model.named_parameters()}
    wanted = {n: torch.zeros(()) if g is None else g for n, g in wanted.items()}
    for difference, report in results:
        for name, found in difference.items():
            expected = wanted[name].expand_as(found) if wanted[name].ndim == 0 else wanted[name]
            expected = expected.reshape(found.shape)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert report["balance_loss"] == pytest.approx(float(losses.mean().detach()), rel=1e-5)
        assert 0 <= report["load_min"] < 1 / 6 < report["load_max"] <= 1
        assert 0 < report["entropy"] < 1.80  # log 6


def replayed_gradients(folder, spec_changes):
    """By mode: gradients, and what routers are said to do."""
    spec = fsdp_config(dp_shard=dist.get_world_size(), **spec_changes)
    found = {}
    for mode in (RouterReplay.replay, RouterReplay.record):
        actor = ActorWorker(actor_config(folder, spec, router_replay=mode), build_mesh(spec, "cpu"))
        actor.kl_coef = KL_COEF
        _, policy = gradients(actor, actor.policy_loss, 30, batch_with_experts())
        found[mode] = policy, actor.routing.report(whole_sequences=True)
    return found


def replay_in_transformers(model, batch):
    """Have the routers of transformers choose the batch's experts, for one sequence at a time."""
    sequences = [routed.view(-1, 2, 2).long() - 1 for routed in batch.routed_experts.rows()]

    def replayed(index, calls, gate, args, output):
        logits, _, own = output
        recorded = sequences[next(calls)][:, index]
        ids = torch.cat([recorded[:-1], own[-1:]])
        weights = logits.softmax(-1).gather(1, ids)
        return logits, weights / weights.sum(-1, keepdim=True), ids

    for index, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(partial(replayed, index, count()))


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {}),
        (2, {"activation_checkpointing": True}),
        (2, {"ulysses_size": 2}),
        (4, {}),
    ],
)
def test_replayed_experts_get_the_weights_of_the_router(ranks, changes, tmp_path):
    folder = tiny_folder("qwen3_moe", tmp_path / "model")
    results = run_on_ranks(replayed_gradients, ranks, folder, changes)
    wanted = {}
    for mode in (RouterReplay.replay, RouterReplay.record):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        batch = batch_with_experts()
        if mode is RouterReplay.replay:
            replay_in_transformers(model, batch)
        wanted[mode] = policy_gradients(model, batch)
    for result in results:
        for mode, (found, report) in result.items():
            shaped = {name: wanted[mode][name].reshape(g.shape) for name, g in found.items()}
            assert relative_difference(found, shaped) < 1e-5
            # 1 of 15 pairs of experts is the router's own.
            assert 0.8 < report["differing_choices"] < report["differing_tokens"] <= 1
