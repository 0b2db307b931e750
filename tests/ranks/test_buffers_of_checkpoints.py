"""Buffers of a checkpoint, such as factors of layers: loaded, moved, exported, never trained."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hybridrl.config.choices import Init
from hybridrl.distributed import fsdp, weights
from hybridrl.distributed.experts import CheckpointTensor
from hybridrl.distributed.fsdp import load_sharded_critic, load_sharded_policy
from hybridrl.distributed.mesh import build_mesh
from hybridrl.distributed.regions import named_shards
from hybridrl.distributed.weights import checkpoint_sources, empty_model
from tests.support.launch import run_on_ranks
from tests.support.role_configs import fsdp_config, model_config
from tests.support.tiny_hf import tiny_folder
from tests.support.whole_weights import full_state_dict

NAME = "model.layers.1.scale"
VALUES = torch.tensor([3.0, 5.0, 7.0])


def with_buffer(auto, folder):
    """Llama with a factor in a layer, and a buffer that no checkpoint has."""
    model = empty_model(auto, folder)
    model.base_model.layers[1].register_buffer("scale", torch.ones(3))
    model.base_model.layers[1].register_buffer("computed", torch.ones(2), persistent=False)
    return model


def look(folder):
    """What a rank has of the buffer in each role."""
    spec = fsdp_config(dp_shard=dist.get_world_size())
    mesh = build_mesh(spec, "cpu")
    with patch.object(fsdp, "empty_model", with_buffer):
        policy = load_sharded_policy(model_config(folder), spec, mesh, chunk_tokens=7)
        drawn = load_sharded_policy(model_config(folder, Init.random), spec, mesh, chunk_tokens=7)
        critic = load_sharded_critic(model_config(folder), spec, mesh, seed=3)
    with patch.object(weights, "empty_model", with_buffer):
        sources = checkpoint_sources(folder)
    shards = named_shards(policy)
    return {
        "last": shards[-1].name,
        "frozen": [shard.name for shard in shards if shard.frozen],
        "shape": shards[-1].shape,
        "local": shards[-1].local().clone(),
        "whole": full_state_dict(policy).get(NAME),
        "drawn": drawn.lm.get_buffer(NAME).clone(),
        "critic": critic.backbone.layers[1].scale.clone(),
        "source": sources[-1],
    }


def test_a_buffer_is_loaded_moved_and_exported(tmp_path):
    folder = tiny_folder("llama", tmp_path / "llama")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {NAME: VALUES}, file, metadata={"format": "pt"})
    for rank, one in enumerate(run_on_ranks(look, 2, folder)):
        assert (one["last"], one["frozen"], one["shape"]) == (NAME, [NAME], (3,))
        assert torch.equal(one["local"], VALUES[2 * rank :][:2])
        assert torch.equal(one["critic"], VALUES)
        assert torch.equal(one["drawn"], torch.ones(3)), "as the model sets it"
        assert one["source"] == CheckpointTensor(NAME, (3,), NAME)
        if rank == 0:
            assert torch.equal(one["whole"], VALUES)
