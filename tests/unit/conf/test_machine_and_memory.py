"""What the machine has, and what a run needs of it: parsing, counts against real models, sums."""

import functools
import json
import os
from io import StringIO

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from hybridrl.config.checks.installation import cpu_head_sizes
from hybridrl.config.planner.machine import (
    GIB,
    GPU,
    Machine,
    Node,
    local_machine,
    memory_limit,
    parse_nvidia_smi,
    torch_threads,
    visible_gpus,
)
from hybridrl.config.planner.memory import (
    host_parts,
    pinned_bytes,
    rank_phases,
    staged_bytes,
    tightest_node,
    workload,
)
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.plan.tables import plan
from tests.support.composing import (
    FASTEST_SET,
    GPU_NODE,
    H200,
    LAPTOP,
    QWEN,
    TINY,
    examined,
    named,
    only,
    problems,
)
from tests.support.tiny_hf import MORE

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
        (Qwen3Config, {"head_dim": 16}),
    ],
)
def test_parameters_are_those_of_the_real_model(config_class, more, tied):
    config = config_class(**SIZES, **more, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = model_shape(json.loads(config.to_json_string()))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.backbone_parameters == sum(p.numel() for p in model.model.parameters())


@pytest.mark.parametrize("name", MORE)
def test_sizes_of_every_family_are_those_of_the_real_model(name):
    """Parameters, and the linear layers that LoRA adapts."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MORE[name])
    shape = model_shape(json.loads(MORE[name].to_json_string()))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    layers = model.model.layers
    assert sum(n * kind.parameters for kind, n in shape.counted) == sum(
        p.numel() for p in layers.parameters()
    )
    others = (".mlp.", ".router.") if shape.experts else ()
    found = {
        name.rpartition(".")[2]: (layer.out_features, layer.in_features)
        for name, layer in reversed([*layers.named_modules()])  # the first layer's count
        if isinstance(layer, torch.nn.Linear)
        and not any(part in name for part in others)
        # vLLM folds the one into others; peft refuses the other.
        and not name.endswith(("kv_b_proj", "mixer.out_proj"))
    }
    assert shape.linear_layers == found


def test_qwen_0_5b_has_its_published_size():
    """494,032,768 parameters on the model's page (0.49 B, 0.36 B without embedding)."""
    assert model_shape(QWEN).parameters == 494_032_768


@functools.cache
def gpu_phases(*overrides, gpu_bytes=140 * GIB):
    config = examined(["hardware=gpu", *overrides], machine=GPU_NODE).config
    return {p.name: p.parts for p in rank_phases(config, model_shape(QWEN), gpu_bytes)}


def test_memory_of_an_update_is_the_sum_of_its_parts():
    """P parameters on 8 ranks: weights 4 bytes each, two moments 8."""
    parameters = model_shape(QWEN).parameters
    parts = gpu_phases()["update actor"]
    assert parts["actor weights"] == parts["ref weights"] == 4 * parameters // 8
    assert parts["actor AdamW"] == 8 * parameters // 8
    # Tied, so a critic lacks no head of its own; it has a scalar one of 896 weights and a bias.
    assert parts["critic weights"] == 4 * (parameters + 897) // 8
    assert parts["critic AdamW"] == 8 * (parameters + 897) // 8
    # vLLM does not sleep: everything fits side by side.
    assert parts["rollout weights"] == 2 * parameters


def test_the_cache_has_what_a_step_can_use():
    """128 responses of 1,040 tokens an engine; 24 layers x 2 x 2 x 64 x 2 bytes a token."""
    assert gpu_phases()["rollout"]["KV cache"] == pytest.approx(128 * 1040 * 12_288, rel=1e-3)
    assert "KV cache" not in gpu_phases("rollout.gpu_memory_utilization=0.02")["rollout"]


def test_activations_and_logits_of_half_a_billion_parameters():
    """16,384 tokens of Qwen2.5-0.5B, eager, by hand from hidden 896, MLP 4864, 14 + 2 heads of 64.

    A layer keeps, per token: norms 16 x 896, attention 4 x 16 x 64, MLP 8 x 4864. Beside 24 layers:
    the last norm 6 x 896, and of every response token its state and that one's gradient, 4 x 896.
    Logits: 2 x 151,936.
    """
    given = ["actor.mini_batch_size=1024", "actor.max_tokens_per_gpu=16384"]
    config = examined(["hardware=gpu", *given], machine=GPU_NODE).config
    assert workload(config).micro_batches == 8  # 128 responses of 1024 tokens on each of 8 ranks
    parts = gpu_phases(*given, "fsdp.compile=false")["update actor"]
    layer = 14_336 + 4_096 + 38_912
    assert parts["activations"] == 16_384 * (24 * layer + 5_376 + 3_584)
    assert parts["logits"] == 16_384 * 303_872
    assert parts["gradients"] == 4 * model_shape(QWEN).parameters  # accumulation=full
    assert parts["gradient of the head"] == 4 * 151_936 * 896


def test_gradients_of_one_micro_batch_appear_as_activations_go():
    """At the loss there are none yet; sharded accumulation holds an eighth."""
    assert gpu_phases("actor.mini_batch_size=128")["update actor"]["gradients"] == 0
    sharded = gpu_phases("fsdp.accumulation=sharded", "actor.mini_batch_size=1024")
    assert sharded["update actor"]["gradients"] == 4 * model_shape(QWEN).parameters // 8


WEIGHTS = {"actor weights", "critic weights", "ref weights"}
MOMENTS = {"actor AdamW", "critic AdamW"}


@pytest.mark.parametrize(
    ("offload", "phase", "present"),
    [
        ("none", "rollout", WEIGHTS | MOMENTS),
        ("idle_optimizer", "rollout", WEIGHTS),
        ("idle_optimizer", "score", WEIGHTS),
        ("idle_optimizer", "update critic", WEIGHTS | {"critic AdamW"}),
        ("idle_all", "reshard", {"actor weights"}),
        ("idle_all", "rollout", set()),
        ("idle_all", "score", {"actor weights"}),
        ("idle_all", "update critic", {"critic weights", "critic AdamW"}),
        ("idle_all", "update actor", {"actor weights", "actor AdamW"}),
    ],
)
def test_offload_leaves_what_the_phase_uses(offload, phase, present):
    parts = gpu_phases(f"fsdp.offload={offload}")[phase]
    assert parts.keys() & (WEIGHTS | MOMENTS) == present


@pytest.mark.parametrize(
    ("sleep", "present"),
    [
        ("all", set()),
        ("kv_cache", {"rollout weights"}),
        ("none", {"rollout weights", "KV cache"}),
    ],
)
def test_what_vllm_keeps_asleep_counts_in_training(sleep, present):
    parts = gpu_phases(f"rollout.sleep={sleep}")["update actor"]
    assert parts.keys() & {"rollout weights", "KV cache", "vLLM's buffers"} == present


def test_a_run_that_does_not_fit_is_told_of_offload():
    small = Machine((Node("small", 16, 512 * GIB, gpus=(GPU("L4", 22 * GIB),)),))
    overrides = ["hardware=gpu", *FASTEST_SET, "actor.mini_batch_size=16"]
    problem = examined(overrides, machine=small).report.problems[0]
    assert problem.id == "gpu_memory" and "GPU has 22.0 GiB" in problem.why
    assert "fsdp.offload=idle_all" in problem.remedy


def test_pinned_memory_must_fit_the_node():
    """0.5 B parameters on one GPU: 12 bytes of actor and critic, 4 of ref, 28 in all: 12.9 GiB."""
    node = Node("tight", 16, 18 * GIB, gpus=(H200,))
    overrides = ["hardware=gpu", "fsdp.offload=idle_all", "actor.mini_batch_size=16"]
    config = examined(overrides, machine=Machine((node,))).config
    pinned = pinned_bytes(config, model_shape(QWEN))
    assert pinned == pytest.approx(28 * 494_032_768, rel=1e-3)
    problem = only(*overrides, machine=Machine((node,)))
    assert (problem.id, problem.key, problem.value) == ("host_memory", "fsdp.offload", "idle_all")
    assert "each of a node's 1 GPUs takes offload 12.9 GiB" in problem.why
    assert "the node (or its cgroup) has 18.0 GiB" in problem.why
    roomy = Machine((Node("roomy", 16, 64 * GIB, gpus=(H200,)),))
    assert not problems(*overrides, machine=roomy)
    assert not problems(*overrides[::2], machine=Machine((node,)))


def test_the_copy_that_checkpoints_are_written_from_must_fit_the_node():
    """0.5 B parameters on one GPU: 12 bytes of actor and of critic: 11.0 GiB beside 5.5."""
    tight = Machine((Node("tight", 16, 16 * GIB, gpus=(H200,)),))
    overrides = ["hardware=gpu", "actor.mini_batch_size=16"]
    config = examined(overrides, machine=tight).config
    assert staged_bytes(config, model_shape(QWEN)) == pytest.approx(24 * 494_032_768, rel=1e-3)
    assert named(*overrides, machine=tight) == [("host_memory", "checkpoint.every_steps")]
    assert not problems(*overrides, "checkpoint.every_steps=0", machine=tight)


def test_host_memory_that_is_not_pinned_must_fit_the_node_too():
    """Eight processes of 4 GiB, and of each weight an eighth on its way to the GPU."""
    overrides = ["hardware=gpu", "checkpoint.every_steps=0"]
    config = examined(overrides, machine=GPU_NODE).config
    parts = host_parts(config, model_shape(QWEN))
    assert parts == {
        "process": 4 * GIB,
        "loading": 4 * 151_936 * 896 // 8,
        "offload": 0,
        "checkpoint staging": 0,
        "teachers' states": 0,
    }
    node = Node("tight", 16, 32 * GIB, gpus=(H200,) * 8)
    problem = only(*overrides, machine=Machine((node,)))
    assert (problem.id, problem.key) == ("host_memory", "cluster.gpus_per_node")
    assert problem.value == 8 and "together 34.0 GiB" in problem.why
    console = Console(width=160, file=StringIO())
    console.print(plan(config, model_shape(QWEN), GPU_NODE))
    assert "Host memory of one rank: 4.1 GiB (process 4.0 GiB" in console.file.getvalue()


def test_each_node_needs_memory_for_its_own_ranks_alone():
    """Two ranks and one, on nodes of which the third, a head with little memory, gets none."""
    overrides = ["hardware=gpu", "fsdp.offload=idle_all", "cluster.nodes=2"]
    overrides += ["actor.mini_batch_size=24", "placement.slots_on_nodes=[2,1]"]

    def refused(*gib):
        nodes = [Node(f"n{k}", 16, size * GIB, gpus=(H200,) * k) for k, size in enumerate(gib)]
        found = examined(overrides, machine=Machine(tuple(nodes))).report.problems
        return [problem.why for problem in found if problem.id == "host_memory"]

    assert refused(2, 18, 32) == []
    (problem,) = refused(2, 18, 20)
    assert "each of a node's 2 GPUs takes" in problem and "has 20.0 GiB" in problem


def test_a_head_of_ray_without_cpus_is_no_obstacle():
    """As `ray start --head --num-cpus=0` has it: no slot can come there."""
    nodes = (Node("head", 0, 4 * GIB), Node("worker", 2, 32 * GIB))
    found = examined(["hardware=cpu"], machine=Machine(nodes))
    assert found.report.problems == []
    assert found.config.reward.num_processes == 1


def test_offload_without_a_gpu_is_refused():
    found = named("hardware=cpu", "fsdp.offload=idle_optimizer")
    assert found == [("cpu_offload", "fsdp.offload")]
    assert not problems("hardware=cpu", "fsdp.offload=none")


def test_on_cpu_vllm_stays_in_memory_and_slots_add_up():
    config = examined(["hardware=cpu", "cluster.gpus_per_node=2", "algorithm.kl.coef=0"]).config
    phases = rank_phases(config, model_shape(TINY), None)
    assert all(p.parts["KV cache"] == 64 * 2**20 for p in phases)
    assert all("ref weights" not in p.parts for p in phases)
    peak = max(p.total for p in phases)
    assert tightest_node(config, LAPTOP, peak) == (2, 2 * peak + int(1.5 * GIB), 32 * GIB)


def test_checkpointing_keeps_less():
    given = ["hardware=gpu", "actor.max_tokens_per_gpu=16384"]
    plain = examined(given, machine=GPU_NODE).config
    less = examined([*given, "fsdp.activation_checkpointing=true"], machine=GPU_NODE).config
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


def test_torch_takes_few_threads_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert [torch_threads(on_gpu=False, processes=n) for n in (1, 4, 100)] == [64, 16, 1]
    assert [torch_threads(on_gpu=True, processes=n) for n in (1, 4, 16)] == [8, 8, 4]


def test_a_head_size_that_vllm_lacks_on_cpus_is_refused():
    """Sizes of the installed vLLM, if there is one."""
    tiny = TINY | {"head_dim": 16}
    if not cpu_head_sizes():
        pytest.skip("needs vLLM")
    problem = only("hardware=cpu", model=tiny)
    assert problem.id == "head_size" and "attention heads of size 32, 64" in problem.expected
    assert "have 16" in problem.why
    assert problems("hardware=gpu", machine=GPU_NODE, model=QWEN | {"head_dim": 16}) == []
