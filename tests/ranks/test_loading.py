"""Loading and saving under FSDP2: every rank has its rows of the checkpoint, bit for bit."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModel, AutoModelForCausalLM

from hybridrl.distributed.forward.log_probs import Entropy
from hybridrl.distributed.forward.packing import pack
from hybridrl.distributed.fsdp import (
    load_sharded_critic,
    load_sharded_policy,
)
from hybridrl.distributed.mesh import build_mesh, device_of
from hybridrl.distributed.regions import named_shards, shards_of
from hybridrl.distributed.storage.export import write_model
from tests.support.launch import run_on_ranks
from tests.support.role_configs import fsdp_config, model_config
from tests.support.tiny_hf import CONFIGS, MORE, tiny_folder
from tests.support.training_batches import training_batch
from tests.support.whole_weights import InMemory, full_state_dict

TEMPERATURE = 0.8


def load_and_look(folders, target):
    """Per model: shards before and after a forward, the whole state dict, the log-probs."""
    spec = fsdp_config(dp_shard=dist.get_world_size())
    mesh = build_mesh(spec, "cpu")
    seen = {}
    for name, folder in folders.items():
        policy = load_sharded_policy(model_config(folder), spec, mesh, chunk_tokens=7)
        before = named_shards(policy)
        with torch.no_grad():
            packed = pack(training_batch(), device_of(mesh))
            log_probs = policy(packed, TEMPERATURE, Entropy.omit).log_probs
        after = named_shards(policy)
        full = full_state_dict(policy)
        if dist.get_rank() == 0:
            write_model(InMemory(full), folder, target / name)
        seen[name] = {
            "shards": {shard.name: (shard.shape, shard.local().clone()) for shard in before},
            "same": all(
                torch.equal(a.local(), b.local()) for a, b in zip(before, after, strict=True)
            ),
            "full": full,
            "log_probs": log_probs,
        }
    critic = load_sharded_critic(model_config(next(iter(folders.values()))), spec, mesh, seed=3)
    head = {name: p.detach().full_tensor() for name, p in critic.head.named_parameters()}
    backbone = {name: p.detach().full_tensor() for name, p in critic.backbone.named_parameters()}
    return seen, head, backbone


NAMES = [*CONFIGS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What two ranks saw of a model; one start of the processes serves CONFIGS, another MORE."""
    results = {}

    def of(name):
        group = name in MORE
        if group not in results:
            root = tmp_path_factory.mktemp("loading")
            folders = {n: tiny_folder(n, root / n) for n in (MORE if group else CONFIGS)}
            seen = run_on_ranks(load_and_look, 2, folders, root / "saved", time_limit_s=280)
            results[group] = folders, root / "saved", seen
        return results[group]

    return of


@pytest.mark.parametrize("name", NAMES)
def test_shards_are_the_rows_of_from_pretrained(loaded, name):
    """Names as in the checkpoint, tied duplicates included; rows cut as by torch.chunk."""
    folders, _, ranks = loaded(name)
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    expected = model.state_dict()  # with buffers
    assert "lm_head.weight" in expected and any(".embed" in parameter for parameter in expected)
    for rank, (seen, *_) in enumerate(ranks):
        shards = seen[name]["shards"]
        assert shards.keys() == expected.keys()
        for parameter, (shape, local) in shards.items():
            whole = expected[parameter]  # experts are [2 E, I, H], there [E, 2 I, H] or transposed
            is_transposed = name == "gpt_oss" and whole.dim() == 3
            whole = whole.mT if is_transposed else whole.view(shape)
            rows = whole.chunk(2)
            mine = rows[rank] if rank < len(rows) else whole[:0]
            assert torch.equal(local, mine), (parameter, rank)


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_leaves_the_shards_as_they_are(loaded, name):
    _, _, ranks = loaded(name)
    assert all(seen[name]["same"] for seen, *_ in ranks)


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_are_those_of_from_pretrained(loaded, name):
    """So rotary frequencies and ties survived being built without weights."""
    folders, _, ranks = loaded(name)
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    batch, expected = training_batch(), []
    for prompt, response in zip(batch.prompts.rows(), batch.responses.rows(), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0]
        log_p = (logits[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        expected.append(log_p.gather(-1, response[:, None])[:, 0])
    for seen, *_ in ranks:
        torch.testing.assert_close(
            seen[name]["log_probs"], torch.cat(expected), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_folder_loads_to_the_same_bits(loaded, name):
    folders, saved, ranks = loaded(name)
    again = AutoModelForCausalLM.from_pretrained(saved / name, dtype="auto")
    original = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    for (parameter, found), wanted in zip(
        again.named_parameters(), original.parameters(), strict=True
    ):
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted), parameter
    assert again.generation_config.temperature == 0.7
    assert (saved / name / "tokenizer.json").read_text() == '{"version": "1.0"}\n'
    assert not list(saved.glob(".*")), "no partial folder stays behind"
    config = json.loads((saved / name / "config.json").read_text())
    assert config["architectures"] == [type(original).__name__]
    assert [bool(seen[name]["full"]) for seen, *_ in ranks] == [True, False]


def test_the_critic_has_the_backbone_and_one_small_head(loaded):
    folders, _, ranks = loaded("llama")
    model = AutoModel.from_pretrained(folders["llama"], dtype=torch.float32)
    for _, head, backbone in ranks:
        for name, wanted in model.named_parameters():
            assert torch.equal(backbone[name], wanted), name
        assert torch.equal(head["weight"], ranks[0][1]["weight"])
        assert head["weight"].shape == (1, 32)
        # 32 normal numbers over 33: the norm is near sqrt(32) / 33 = 0.17
        assert 0.05 < float(head["weight"].norm()) < 0.5
        assert float(head["bias"]) == 0.0 and math.isfinite(float(head["weight"].sum()))


def both_kinds_of_shards(folder):
    """Of transformers' own module with fused experts under FSDP2, and of the trainer's policy."""
    spec = fsdp_config(dp_shard=dist.get_world_size())
    mesh = build_mesh(spec, "cpu")
    policy = load_sharded_policy(model_config(folder), spec, mesh, chunk_tokens=7)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in (*module.model.layers, module):
        fully_shard(layer, mesh=mesh["dp_shard"])
    found = [shards_of(module), named_shards(policy)]
    return [[(s.name, s.shape, s.dim, s.local().clone()) for s in shards] for shards in found]


def test_a_module_with_fused_experts_has_the_shards_of_the_policy(tmp_path):
    """So `hybridrl.Resharder` takes it."""
    folder = tiny_folder("qwen3_moe", tmp_path / "model")
    for module, policy in run_on_ranks(both_kinds_of_shards, 2, folder):
        for (*one, values), (*other, expected) in zip(module, policy, strict=True):
            assert one == other
            assert torch.equal(values, expected), one
