"""Reshards into vLLM models whose loaders do more than copy rectangles, without a trainer's model.

The weights are those of a checkpoint, each a parameter that is cut by rows. Two checkpoints are
resharded one after the other, and each time compared with what vLLM loads from its folder.
"""

import re
from contextlib import ExitStack
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybridrl.distributed.experts import CheckpointTensor
from hybridrl.distributed.mesh import AXES
from hybridrl.distributed.regions import NamedShard
from hybridrl.reshard.resharder import Resharder
from hybridrl.reshard.route import Route
from hybridrl.reshard.transfers import SourceLayout
from hybridrl.rollout.loaded import loader_trace
from hybridrl.rollout.trace import live_tensors
from hybridrl.rollout.vllm import compat as vllm_compat
from hybridrl.rollout.vllm import experts as vllm_experts
from hybridrl.rollout.vllm.engine import in_process
from tests.support.reshard_cases import differences, set_rank_environment
from tests.support.tiny_hf import PARTIAL_ROPE, YARN_OF_ALL

SIZES: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
YARN = YARN_OF_ALL | {"original_max_position_embeddings": 128}
# What each family adds; vLLM needs more than transformers' defaults.
OWN: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "global_head_dim": 64,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 500,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": YARN,
    },
    "deepseek_v3": {
        "head_dim": None,
        "kv_lora_rank": 512,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "n_group": 2,
        "topk_group": 1,
        "num_mtp_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "qwen3_next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_hidden_layers": 4,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 96,
        "rope_parameters": PARTIAL_ROPE,
    },
}
# Weights that a trainer holds with the last two dims in the other order.
TRANSPOSED = ("experts.gate_up_proj", "experts.down_proj")


def is_expert(name: str) -> bool:
    """An expert's tensor: a trainer holds several in a parameter of three dims, here one."""
    return re.search(r"\.experts\.\d+\.", name) is not None


class LoaderCase(NamedTuple):
    """A family, the engine's dtype and its number of ranks."""

    family: str
    dtype: str
    tp: int

    def __str__(self) -> str:
        return f"{self.family}-{self.dtype}-tp{self.tp}"


def config_of(family: str) -> PreTrainedConfig:
    chosen = {key: value for key, value in (SIZES | OWN[family]).items() if value is not None}
    return CONFIG_MAPPING[family](**chosen)


def write_checkpoints(root: Path, family: str) -> None:
    """Checkpoints A and B, float32, with values that differ everywhere, of buffers too."""
    for seed, which in enumerate("AB"):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.add_(torch.randn_like(tensor) * 0.1)
        model.save_pretrained(root / family / which)


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


class Trainer:
    """Stands where FSDP2's module would: it holds this rank's rows of each weight."""

    def __init__(self, folder: Path) -> None:
        self.take(folder)
        self.sources = [
            CheckpointTensor(
                name,
                tuple(tensor.shape),
                name,
                at=(0,) if is_expert(name) else (),
                transposed=name.endswith(TRANSPOSED),
            )
            for name, tensor in read_folder(folder).items()
        ]

    def take(self, folder: Path) -> None:
        """Hold the weights of another folder."""
        self._weights = {}
        for name, tensor in read_folder(folder).items():
            held = tensor.transpose(-1, -2) if name.endswith(TRANSPOSED) else tensor
            self._weights[name] = held[None] if is_expert(name) else held.contiguous()

    def shards(self) -> list[NamedShard]:
        return [
            NamedShard(name, tuple(tensor.shape), partial(self._rows, name))
            for name, tensor in self._weights.items()
        ]

    def _rows(self, name: str) -> torch.Tensor:
        whole = self._weights[name]
        layout = SourceLayout(name, tuple(whole.shape), dist.get_world_size())
        region = layout.region(dist.get_rank())
        return whole[region.offset[0] :][: region.shape[0]]


def run_loader_case(case: LoaderCase, folder: Path) -> dict[str, Any]:
    """What the reshard showed on this rank."""
    set_rank_environment()
    torch.set_num_threads(1)
    with in_process("cpu"), ExitStack() as stack:
        from vllm import LLM
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        kernel, keep = cpu_moe.CPUUnquantizedExperts, vllm_experts._keep_weights
        stack.enter_context(patch.object(kernel, "process_weights_after_loading", keep))
        stack.enter_context(vllm_compat.models_inspected_here())
        stack.enter_context(vllm_compat.own_class(folder / "A"))
        options = {
            "skip_tokenizer_init": True,
            "dtype": case.dtype,
            "tensor_parallel_size": case.tp,
            "distributed_executor_backend": "external_launcher",
            "max_model_len": 128,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "kv_cache_memory_bytes": 64 << 20,
            "seed": 0,
        }
        if case.family == "deepseek_v3":  # the other backend packs weights
            options["attention_config"] = {"backend": "CPU_MLA"}
        llm = LLM(str(folder / "A"), load_format="dummy", **options)
        model = llm.apply_model(lambda model: model)[0]
        trainer = Trainer(folder / "A")
        trace, tensors, loaded = loader_trace(llm, trainer.sources)
        mesh = dist.init_device_mesh("cpu", (1, case.tp), mesh_dim_names=AXES)
        side = trainer.shards(), trace, tensors, Route.colocated(mesh)
        resharder = Resharder(*side, bucket_mb=1)
        seen: dict[str, Any] = {"trace": trace}
        for version, which in enumerate("AB"):
            trainer.take(folder / which)
            resharder.sync(version, verify=True)
            loaded.load()
            live = {name: tensor.clone() for name, tensor in live_tensors(model).items()}
            seen[f"differs_{which}"] = differences(live, loaded_alone(llm, folder / which))
    return seen


def loaded_alone(llm: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What vLLM itself loads from a folder into another model of the same config."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = copy(llm.llm_engine.vllm_config)
    config.model_config = copy(config.model_config)
    config.load_config = copy(config.load_config)
    config.model_config.model = str(folder)
    config.load_config.load_format = "auto"
    config.compilation_config = copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    return live_tensors(model)
