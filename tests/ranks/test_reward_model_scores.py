"""The reward model scores what transformers' own model scores, however it is sharded."""

import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from hybridrl.config.choices import Offload
from hybridrl.config.errors import ConfigError
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.reward_model import RewardModelWorker
from tests.support.launch import run_on_ranks
from tests.support.offload_cases import shard_bytes
from tests.support.role_configs import fsdp_config, reward_model_config
from tests.support.tiny_hf import tiny_reward_model
from tests.support.training_batches import scheduled, training_batch

NAMES = ("llama", "qwen2")
# Columns are the policy's: 51 inputs of this down_proj do not divide over 2 shards.
COLUMNS = ["model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.o_proj.weight"]
CASES = {
    "one rank": (1, {"dp_shard": 1}),
    "two ranks": (2, {"dp_shard": 2, "columns": COLUMNS, "offload": Offload.idle_all}),
    "two ranks share sequences": (2, {"dp_shard": 2, "ulysses_size": 2}),
}


def scored(folders, changes):
    """By model: the scores of all responses in the batch's order, and bytes left while at rest."""
    spec = fsdp_config(**changes)
    mesh, found = build_mesh(spec, "cpu"), {}
    world = dist.get_world_size()
    shards = world // spec.ulysses_size
    for name, folder in folders.items():
        worker = RewardModelWorker(reward_model_config(folder, spec), mesh)
        # the budget leaves several responses to a micro-batch, and responses alone in one
        dealt = scheduled(training_batch(), num_ranks=shards, mini_batch_size=4, max_tokens=20)
        results = [None] * world
        mine = dealt.shard(shards)[dist.get_rank() * shards // world]
        dist.all_gather_object(results, worker.compute_scores(mine))
        worker.rest()
        found[name] = dealt.join(results[:: world // shards]), shard_bytes(worker)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("reward_model")
    return {name: tiny_reward_model(name, root / name, intermediate_size=51) for name in NAMES}


@pytest.fixture(scope="module")
def expected(folders):
    """transformers' scores, one sequence after the other."""
    batch, scores = training_batch(), {}
    for name, folder in folders.items():
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        rows = zip(batch.prompts.rows(), batch.responses.rows(), strict=True)
        with torch.no_grad():
            logits = [model(input_ids=torch.cat(row)[None]).logits[0, 0] for row in rows]
        scores[name] = torch.stack(logits)
    return scores


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_transformers(case, folders, expected):
    """On each response's last token, and 0 before it; away from the device at rest."""
    ranks, changes = CASES[case]
    for found in run_on_ranks(scored, ranks, folders, changes):
        for name in NAMES:
            scores, left = found[name]
            assert expected[name].std() > 0.1
            torch.testing.assert_close(
                torch.stack([row[-1] for row in scores.rows()]),
                expected[name],
                rtol=1e-5,
                atol=1e-5,
            )
            assert scores.values.dtype == torch.float32
            assert all((row[:-1] == 0).all() for row in scores.rows())
            assert (left == 0) == (changes.get("offload") is Offload.idle_all)


def refusal(folder):
    spec = fsdp_config(dp_shard=1)
    try:
        RewardModelWorker(reward_model_config(folder, spec), build_mesh(spec, "cpu"))
    except ConfigError as error:
        return str(error)


def test_a_checkpoint_without_its_head_is_refused(folders, tmp_path):
    """config.json promises one, so that only the weights themselves tell."""
    torn = shutil.copytree(folders["llama"], tmp_path / "torn")
    weights = load_file(torn / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, torn / "model.safetensors", metadata={"format": "pt"})
    (found,) = run_on_ranks(refusal, 1, torn)
    assert f"reward_model.model.path = {torn} lacks 1 of its weights: score.weight" in found
