"""Training on GPUs: the packed kernel, forward and backward, and gradients on 1, 2 and 4."""

from importlib.metadata import distributions

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.torch_version import TorchVersion
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.config.choices import DType
from hybridrl.distributed.forward import attention
from hybridrl.distributed.mesh import build_mesh
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.critic import CriticWorker
from hybridrl.workers.training import Training
from tests.support.launch import run_on_ranks
from tests.support.role_configs import actor_config, critic_config, fsdp_config
from tests.support.tiny_hf import tiny_folder
from tests.support.training_batches import my_part, training_batch, with_old_log_probs
from tests.support.whole_weights import flat, relative_difference

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 1, reason="needs an NVIDIA GPU"),
]
LENGTHS = [70, 1, 300, 129]


def attention_case(heads, kv_heads, head_size):
    """Packed bf16 queries, keys and values on the GPU, and their boundaries."""
    generator = torch.Generator("cuda").manual_seed(0)
    packed = [
        torch.randn(
            sum(LENGTHS), n, head_size, dtype=torch.bfloat16, device="cuda", generator=generator
        ).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]
    ends = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    return packed, ends


def has_flash_attention_4():
    """Whether this installation runs FlashAttention 4 on this GPU."""
    is_new = TorchVersion(torch.__version__) >= (2, 14)
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    return is_new and is_hopper and any(distributions(name="flash-attn-4"))


@pytest.mark.parametrize("window", [None, 32])
def test_kernel_agrees_with_the_padded_path_where_prompts_are_shared(window):
    """The last 1 to 129 tokens of each sequence have queries; all have keys."""
    attention.choose_kernel()
    (query, key, value), ends = attention_case(12, 2, 128)
    counts = torch.tensor([30, 1, 129, 64])
    own = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    query = query.detach()[: int(own[-1])].requires_grad_()
    bounds = own.int().cuda(), int(counts.max()), ends, max(LENGTHS)
    fast = attention._varlen((query, key, value), bounds, None, window)
    exact = [x.detach().float().requires_grad_() for x in (query, key, value)]
    slow = attention._padded(exact, bounds, None, window)
    weights = torch.randn_like(slow)
    fast_grads = torch.autograd.grad((fast.float() * weights).sum(), (query, key, value))
    slow_grads = torch.autograd.grad((slow * weights).sum(), exact)
    for one, other in zip((fast, *fast_grads), (slow, *slow_grads), strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one.float(), other, rtol=0.02, atol=0.01 * scale)


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"),
    [(8, 8, 64), (14, 2, 64), (12, 2, 128), (4, 1, 256), (4, 2, 8), (4, 2, 80), (4, 2, 24)],
)
def test_kernel_agrees_with_the_padded_path(heads, kv_heads, head_size, window):
    """Output and all three gradients; the padded path runs in float32."""
    attention.choose_kernel()
    (query, key, value), ends = attention_case(heads, kv_heads, head_size)
    assert attention.has_kernel(query.device, query.dtype, head_size)
    weights, bounds = torch.randn_like(query), (ends, max(LENGTHS)) * 2
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        fast = attention._varlen((query, key, value), bounds, None, window)[..., :head_size]
        torch.cuda.synchronize()
    kernels = [event.key for event in seen.key_averages()]
    is_second = any("pytorch_flash" in name for name in kernels)  # FlashAttention 2, of torch
    assert is_second is not has_flash_attention_4(), kernels
    fast_grads = torch.autograd.grad((fast * weights).float().sum(), (query, key, value))
    exact = [x.detach().float().requires_grad_() for x in (query, key, value)]
    slow = attention._padded(exact, bounds, None, window)
    slow_grads = torch.autograd.grad((slow * weights.float()).sum(), exact)
    for found, wanted in zip((fast, *fast_grads), (slow, *slow_grads), strict=True):
        scale = float(wanted.abs().max())
        torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.01 * scale)


@pytest.mark.parametrize("attend", [attention.packed_attention, attention.tower_attention])
@pytest.mark.parametrize("head_size", [72, 80, 100])
def test_gradients_of_heads_that_flash_attention_4_gets_wrong(head_size, attend):
    """Within 2 % of those in float32, which other kernels compute."""
    attention.choose_kernel()
    found, _ = attention_case(4, 4, head_size)
    found = [x.detach()[:480].requires_grad_() for x in found]
    ends = torch.arange(0, 481, 160, device="cuda", dtype=torch.int32)
    gradients = []
    for inputs in (found, [x.detach().float().requires_grad_() for x in found]):
        by_head = (x.transpose(0, 1)[None] for x in inputs)
        output, _ = attend(None, *by_head, None, cu_seq_lens_q=ends, max_length_q=160)
        weights = torch.linspace(-1, 1, output.numel(), device="cuda").view_as(output)
        gradients.append(torch.autograd.grad((output.float() * weights).sum(), inputs))
    for one, other in zip(*gradients, strict=True):
        assert (one.float() - other).norm() < 0.02 * other.norm()


def test_packed_model_agrees_with_sdpa_on_each_sequence():
    """A whole model in bf16, forward and backward, against transformers' own attention."""
    attention.register_packed_attention()
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    tokens = torch.randint(0, 1000, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    tokens = tokens.cuda()
    ends = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    outcomes = []
    for name in (attention.PACKED_ATTENTION, "sdpa"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=name
        ).cuda()
        if name == "sdpa":
            logits = torch.cat([model(input_ids=r[None]).logits[0] for r in tokens.split(LENGTHS)])
        else:
            positions = torch.cat([torch.arange(n, device="cuda") for n in LENGTHS])
            logits = model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                cu_seq_lens_q=ends,
                cu_seq_lens_k=ends,
                max_length_q=max(LENGTHS),
                max_length_k=max(LENGTHS),
            ).logits[0]
        log_p = logits.float().log_softmax(-1)
        log_p[:, 0].sum().backward()
        grads = torch.cat([p.grad.float().flatten() for p in model.parameters()])
        outcomes.append((log_p.detach(), grads))
    (packed, packed_grads), (alone, alone_grads) = outcomes
    assert float((packed - alone).abs().mean()) < 0.01
    assert float((packed_grads - alone_grads).norm() / alone_grads.norm()) < 0.03


def train_step(folder, dtype, replicas, activation_checkpointing, compile_layers=False):
    """A step's metrics, and the full gradients of the whole batch under three token budgets."""
    spec = fsdp_config(
        dp_shard=dist.get_world_size() // replicas,
        dp_replicate=replicas,
        param_dtype=dtype,
        activation_checkpointing=activation_checkpointing,
        compile=compile_layers,
    )
    mesh = build_mesh(spec, "cuda")
    actor = ActorWorker(actor_config(folder, spec), mesh)
    critic = CriticWorker(critic_config(folder, spec), mesh)
    actor.kl_coef = 0.1
    grads = []
    for max_tokens in (18, 30, 1000):
        training = Training(actor.optimizer, actor.policy_loss, spec)
        (mini,) = my_part(training_batch(), 8, max_tokens).mini_batches()
        training.accumulate_gradients(*mini)
        named = actor.model.named_parameters()
        grads.append({name: p.grad.full_tensor().cpu() for name, p in named})
        actor.optimizer.adamw.zero_grad()
    part = my_part(with_old_log_probs(training_batch(), actor))
    return grads, actor.update(part, 1, 0.1) | critic.update(part, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder("qwen2", tmp_path_factory.mktemp("gpu") / "qwen2")


@pytest.mark.parametrize("activation_checkpointing", [False, True])
@pytest.mark.parametrize("dtype", list(DType))
def test_one_gpu_trains_and_its_first_ratio_is_one(folder, dtype, activation_checkpointing):
    ((_, metrics),) = run_on_ranks(
        train_step, 1, folder, dtype, 1, activation_checkpointing, device_type="cuda"
    )
    assert metrics["actor/first_log_ratio_max"] == 0.0
    assert metrics["actor/log_ratio_max"] > 0.0
    assert metrics["actor/skipped_steps"] == metrics["critic/skipped_steps"] == 0
    assert metrics["actor/grad_norm"] > 0 and metrics["critic/grad_norm"] > 0


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_compiled_layers_train_like_eager_ones_and_their_first_ratio_is_one(
    folder, activation_checkpointing
):
    """In bfloat16, with every packed length in one compiled graph."""
    ((eager, _),) = run_on_ranks(
        train_step, 1, folder, DType.bfloat16, 1, False, device_type="cuda"
    )
    ((compiled, metrics),) = run_on_ranks(
        train_step, 1, folder, DType.bfloat16, 1, activation_checkpointing, True, device_type="cuda"
    )
    for found, wanted in zip(compiled, eager, strict=True):
        assert relative_difference(found, wanted) < 0.03
    assert metrics["actor/first_log_ratio_max"] == 0.0
    assert metrics["actor/log_ratio_max"] > 0.0


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_several_gpus_have_the_gradient_of_one(folder, ranks, replicas):
    """float32 compute, so what differs is the order of sums alone."""
    if ranks > GPUS:
        pytest.skip(f"needs {ranks} GPUs, found {GPUS}")
    arguments = (folder, DType.float32)
    ((single, _),) = run_on_ranks(train_step, 1, *arguments, 1, False, device_type="cuda")
    several = run_on_ranks(train_step, ranks, *arguments, replicas, False, device_type="cuda")
    for grads in (single, *(grads for grads, _ in several)):
        for found in grads:
            assert relative_difference(found, single[0]) < 1e-5
    for _, metrics in several:
        assert metrics["actor/first_log_ratio_max"] == 0.0


@pytest.mark.parametrize(
    ("dtype", "compile_layers"),
    [(DType.float32, False), (DType.bfloat16, False), (DType.bfloat16, True)],
)
def test_experts_train_and_their_first_ratio_is_one(dtype, compile_layers, tmp_path):
    """Grouped matrix products, forward and backward, with recomputed layers."""
    folder = tiny_folder("qwen3_moe", tmp_path / "model")
    ((grads, metrics),) = run_on_ranks(
        train_step, 1, folder, dtype, 1, True, compile_layers, device_type="cuda"
    )
    assert metrics["actor/first_log_ratio_max"] == 0.0
    assert metrics["actor/log_ratio_max"] > 0.0
    assert metrics["actor/skipped_steps"] == metrics["critic/skipped_steps"] == 0
    assert 0 <= metrics["router/load_min"] < 1 / 6 < metrics["router/load_max"]
    experts = [flat({n: g}) for n, g in grads[0].items() if "experts" in n]
    assert len(experts) == 4 and all(grad.norm() > 0 for grad in experts)
