"""What the machine has, and what a run needs of it: parsing, counts against real models, sums."""

import json

import pytest
import torch
from composing import GPU_NODE, LAPTOP, QWEN, TINY, examined
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from hybridrl.config.machine import (
    GIB,
    GPU,
    Machine,
    Node,
    local_machine,
    memory_limit,
    parse_nvidia_smi,
    visible_gpus,
)
from hybridrl.config.memory import node_peak, rank_phases
from hybridrl.config.model_shape import model_shape

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 101,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("config_class", "more"),
    [
        (LlamaConfig, {}),
        (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
        (Qwen2Config, {}),
        (Qwen3Config, {}),
        (Qwen3Config, {"attention_bias": True, "head_dim": 16}),
    ],
)
def test_parameters_are_those_of_the_real_model(config_class, more, tied):
    config = config_class(**SIZES, **more, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = model_shape(json.loads(config.to_json_string()))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.backbone_parameters == sum(p.numel() for p in model.model.parameters())


def test_qwen_0_5b_has_its_published_size():
    """494,032,768 parameters on the model's page (0.49 B, 0.36 B without embedding)."""
    assert model_shape(QWEN).parameters == 494_032_768


def test_memory_of_an_update_is_the_sum_of_its_parts():
    """P parameters on 8 ranks: actor 12 bytes (weights, two moments) and 4 of gradients each."""
    config = examined(["hardware=gpu"], machine=GPU_NODE).config
    shape = model_shape(QWEN)
    update = {p.name: p for p in rank_phases(config, shape, 140 * GIB)}["update actor"]
    assert update.parts["actor weights and AdamW"] == 12 * shape.parameters // 8
    assert update.parts["gradients"] == 4 * shape.parameters // 8
    assert update.parts["ref weights"] == 4 * shape.parameters // 8
    # Tied, so a critic lacks no head of its own; it has a scalar one of 896 weights and a bias.
    assert update.parts["critic weights and AdamW"] == 12 * (shape.parameters + 897) // 8
    assert "rollout weights" not in update.parts  # vLLM sleeps
    assert update.total == sum(update.parts.values())


def test_on_cpu_vllm_stays_in_memory_and_slots_add_up():
    config = examined(["hardware=cpu", "cluster.gpus_per_node=2", "algorithm.kl.coef=0"]).config
    phases = rank_phases(config, model_shape(TINY), None)
    assert all(p.parts["KV cache"] == 64 * 2**20 for p in phases)
    assert all("ref weights" not in p.parts for p in phases)
    peak = max(p.total for p in phases)
    assert node_peak(config, phases) == 2 * peak + int(1.5 * GIB)


def test_checkpointing_keeps_less():
    plain = examined(["hardware=gpu"], machine=GPU_NODE).config
    less = examined(["hardware=gpu", "fsdp.activation_checkpointing=true"], machine=GPU_NODE).config
    shape = model_shape(QWEN)
    kept = [rank_phases(c, shape, 140 * GIB)[4].parts["activations"] for c in (plain, less)]
    assert kept[1] < kept[0] / 10


def _root(tmp_path, files):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:       1048576 kB\nMemFree: 5 kB\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, GIB),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "1000\n"}, 1000),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, GIB),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/host/path\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",
            },
            2000,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/mine\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/mine/memory.limit_in_bytes": "3000\n",
            },
            3000,
        ),
    ],
    ids=["none", "v2 parent", "v2 unlimited", "v1 in a container", "v1 own group"],
)
def test_memory_is_what_the_cgroup_leaves(tmp_path, files, expected):
    assert memory_limit(_root(tmp_path, files)) == expected


def test_this_machine_has_cores_and_memory():
    (node,) = local_machine().nodes
    assert node.cores >= 1
    assert node.memory_bytes > GIB // 4


def test_nvidia_smi_lines_are_read():
    text = "GPU-1, NVIDIA H200, 143771\nGPU-2, Odd, Name, 1024\nNo devices\nGPU-3, GB10, [N/A]\n"
    assert parse_nvidia_smi(text) == [
        ("GPU-1", GPU("NVIDIA H200", 143771 * 2**20)),
        ("GPU-2", GPU("Odd, Name", GIB)),
    ]


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, "abc"), ("", ""), ("-1", ""), ("2,0", "ca"), ("GPU-b", "b"), ("0,7,1", "a")],
)
def test_cuda_visible_devices_is_followed(visible, names):
    found = [(f"GPU-{name}", GPU(name, 1)) for name in "abc"]
    assert "".join(gpu.name for gpu in visible_gpus(found, visible)) == names


def test_machines_are_described_in_one_line():
    assert LAPTOP.describe() == "no NVIDIA GPU, 2 cores, 32 GiB RAM"
    two = Machine(tuple(Node(n, 1, GIB, (GPU("H200", 140 * GIB),)) for n in "ab"))
    assert two.describe() == "2 nodes, 2 x H200 (140 GiB), 2 cores, 2 GiB RAM"
