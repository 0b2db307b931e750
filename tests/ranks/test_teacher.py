"""Teachers score what transformers' own models score, and teach the gradient of the formula.

Reference: transformers in one process, one response at a time, all logits at once.
"""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hybridrl.config.choices import Offload, TeacherObjective
from hybridrl.data.ragged import Ragged
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.teacher import TeacherWorker
from hybridrl.workers.training import Training
from tests.support.launch import run_on_ranks
from tests.support.role_configs import actor_config, fsdp_config, teacher_config
from tests.support.tiny_hf import tiny_folder
from tests.support.training_batches import scheduled, training_batch

TEMPERATURE, COEF = 0.8, 0.7
# The responses of each of two teachers; one micro-batch has only the second's.
CHOSEN = [0, 1, 0, 1, 1, 1, 0, 1]
CASES = {
    "one rank": (1, {"dp_shard": 1, "offload": Offload.idle_all}),
    "two ranks": (2, {"dp_shard": 2, "offload": Offload.idle_all}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("teachers")
    return {
        "student": tiny_folder("llama", root / "student"),
        "qwen3": tiny_folder("qwen3", root / "qwen3"),
        "qwen2": tiny_folder("qwen2", root / "qwen2"),
    }


def taught_batch(teachers=2):
    """The batch with a teacher for each response, which reads a longer prompt before some."""
    batch = training_batch()
    prompts = [
        torch.cat([torch.tensor([9, 8, 7]), row]) if index % 3 == 0 else row
        for index, row in enumerate(batch.prompts.rows())
    ]
    chosen = {"teacher": torch.tensor(CHOSEN)} if teachers > 1 else {}
    return batch.adding(teacher_prompts=Ragged.from_rows(prompts, torch.int32), **chosen)


def dealt_batch(batch, ranks):
    return scheduled(batch, num_ranks=ranks, mini_batch_size=8, max_tokens=24)


def scored_and_taught(folders, changes, objective, settings):
    """Log-probs of the teachers in the batch's order, and the student's gradients."""
    spec = fsdp_config(**changes)
    mesh, ranks = build_mesh(spec, "cpu"), dist.get_world_size()
    models = {name: str(folders[name]) for name in ("qwen3", "qwen2")}
    config = teacher_config(models, spec, objective=objective, coef=COEF, **settings)
    actor = ActorWorker(actor_config(folders["student"], spec, entropy_coef=0.0), mesh)
    teacher = TeacherWorker(config, mesh)
    roles = {"actor": actor, "teacher": teacher}
    for role in roles.values():
        role.connect(roles)
    dealt = dealt_batch(taught_batch(), ranks)
    mine, parts = dealt.shard(ranks)[dist.get_rank()], [None] * ranks
    dist.all_gather_object(parts, teacher.compute_log_probs(mine))
    (mini,) = mine.mini_batches()
    training = Training(actor.optimizer, actor.policy_loss, spec)
    actor.begin()  # which offloads the teachers; their heads are copies
    training.accumulate_gradients(*mini)
    full = {name: p.grad.full_tensor() for name, p in actor.model.named_parameters()}
    return dealt.join(parts), full, training.sums


def logits(model, prompt, response):
    output = model(input_ids=torch.cat([prompt, response]).long()[None]).logits[0]
    return (output[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)


@pytest.fixture(scope="module")
def references(folders):
    return {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for name, folder in folders.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_teachers_score_their_rows_and_teach_the_divergence(case, folders, references):
    """Reverse KL over the vocabulary, a mean over the tokens that count; rewards teach nothing."""
    ranks, changes = CASES[case]
    batch, log_q, log_p = taught_batch(), [], []
    student = references["student"]
    student.zero_grad()
    for index, row in enumerate(
        zip(batch.prompts.rows(), batch.teacher_prompts.rows(), batch.responses.rows(), strict=True)
    ):
        prompt, read, response = row
        teacher = references[("qwen3", "qwen2")[CHOSEN[index]]]
        with torch.no_grad():
            log_q.append(logits(teacher, read, response))
        log_p.append(logits(student, prompt, response))
    p, q = torch.cat(log_p), torch.cat(log_q)
    mask = batch.response_mask.values
    per_token = (p.exp() * (p - q)).sum(-1)
    (COEF * per_token[mask].mean()).backward()
    expected = {f"lm.{name}": p.grad for name, p in student.named_parameters()}
    sampled = q.gather(-1, batch.responses.values[:, None])[:, 0]
    for scores, gradients, sums in run_on_ranks(
        scored_and_taught, ranks, folders, changes, TeacherObjective.reverse_kl, {}
    ):
        torch.testing.assert_close(scores.values, sampled, rtol=1e-5, atol=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
        assert {"teacher_divergence", "ratio_mean"} <= sums.keys()


def taught_by_itself(folder, objective, top_k):
    """The largest divergence, gradient and difference of log-probs to a teacher that is equal."""
    spec = fsdp_config(dp_shard=1)
    mesh = build_mesh(spec, "cpu")
    actor = ActorWorker(actor_config(folder, spec, entropy_coef=0.0), mesh)
    teacher = TeacherWorker(
        teacher_config(str(folder), spec, objective=objective, top_k=top_k), mesh
    )
    roles = {"actor": actor, "teacher": teacher}
    for role in roles.values():
        role.connect(roles)
    (mine,) = dealt_batch(training_batch(), 1).shard(1)
    difference = teacher.compute_log_probs(mine).values - actor.compute_log_probs(mine).values
    (mini,) = mine.mini_batches()
    training = Training(actor.optimizer, actor.policy_loss, spec)
    training.accumulate_gradients(*mini)
    largest = max(float(p.grad.full_tensor().abs().max()) for p in actor.model.parameters())
    total = 0.0 if actor.teacher is None else float(training.sums["teacher_divergence"])
    return float(difference.abs().max()), largest, total


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("objective", ["reverse_kl", "forward_kl", "jensen_shannon"])
def test_the_policy_learns_nothing_from_itself(objective, top_k, folders):
    """Exactly: the paths are the same."""
    (result,) = run_on_ranks(
        taught_by_itself, 1, folders["student"], TeacherObjective(objective), top_k
    )
    assert result == (0.0, 0.0, 0.0)
