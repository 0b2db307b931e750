"""What the reshard tests run on every rank: real FSDP2 shards, a real vLLM, and vLLM's own loader.

A case names a model, a dtype and a mesh. Two sets of weights, A and B, are resharded one after
the other, and each time compared with what vLLM loads from a checkpoint of the same weights.
"""

import copy
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from hybridrl.config.choices import DType, Layout, Offload, RolloutWeights, RouterReplay, SleepMode
from hybridrl.config.planner.multicast import turn_off_multicast
from hybridrl.config.schema import FSDPConfig, RolloutConfig
from hybridrl.data.requests import Requests, SamplingParams
from hybridrl.distributed.forward.recurrent import pack_recurrences
from hybridrl.distributed.fsdp import load_sharded_policy
from hybridrl.distributed.mesh import build_mesh, device_of
from hybridrl.distributed.offload import offloadable_weights
from hybridrl.distributed.regions import named_shards
from hybridrl.reshard.resharder import Resharder
from hybridrl.reshard.route import Route
from hybridrl.rollout.sampler import Peers
from hybridrl.rollout.trace import live_tensors
from hybridrl.rollout.vllm.compat import cpu_start, models_inspected_here, own_class
from hybridrl.rollout.vllm.experts import experts_as_loaded
from hybridrl.rollout.vllm.fp8 import PER_CHANNEL
from hybridrl.workers.rollout import RolloutWorker
from tests.support import role_configs
from tests.support.batches import requests_of
from tests.support.role_configs import fsdp_config, model_config
from tests.support.tiny_hf import (
    AFTER_DENSE,
    ALL,
    DEEPSEEK_YARN,
    LONG_ROPE,
    SCALED_BY_POSITION,
    YARN_OF_ALL,
    spread,
)

# A prompt longer than a block of the KV cache (128 on CPUs) meets the prefix cache.
LENGTHS, MAX_PROMPT, MAX_RESPONSE = (4, 5, 140), 144, 12
SIZES = {
    "vocab_size": 501,  # odd: uneven shards, and padding in vLLM
    "hidden_size": 256,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}
HEAD, WINDOW, ONE_HEAD = {"head_dim": 64}, {"sliding_window": 16}, {"num_key_value_heads": 1}
EXPERT = {"moe_intermediate_size": 96}
MOE_SIZES = EXPERT | {"shared_expert_intermediate_size": 160}
DELTA = HEAD | {"linear_key_head_dim": 32, "linear_value_head_dim": 64}
# vLLM's latent attention on CPUs has these sizes alone.
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
LATENT |= {"q_lora_rank": 48, "qk_nope_head_dim": 48, "v_head_dim": 32}
LATENT |= {"head_dim": 64, "qk_head_dim": 112}  # transformers sets these when it reads a config
# Sizes of families that SIZES lacks.
OWN: dict[str, dict[str, Any]] = {
    "llama": HEAD,
    "qwen2": {},
    "qwen3": HEAD,
    "mistral": HEAD | WINDOW,
    "mistral_tied": ONE_HEAD | {"head_dim": 32},
    "phi3": WINDOW,
    "phi3_tied": ONE_HEAD
    | {
        "rope_parameters": LONG_ROPE
        | {"short_factor": [1.0, 1.3] * 8, "long_factor": [1.5, 4.0] * 8}
    },
    "olmo2": {},
    "olmo3": WINDOW,
    "granite": {},
    "granite_tied": ONE_HEAD,
    "smollm3": {},
    "smollm3_untied": ONE_HEAD,
    "gemma3": HEAD | WINDOW,
    "gemma3_untied": HEAD | WINDOW | ONE_HEAD,
    "qwen3_moe": HEAD | EXPERT | {"num_experts": 16},  # FP8 routers: a multiple of 16
    "qwen3_moe_tied": ONE_HEAD | EXPERT,
    "qwen2_moe": MOE_SIZES,
    "olmoe": {"intermediate_size": 96, "pad_token_id": 0},
    "mixtral": {"intermediate_size": 96},
    "gemma4": HEAD
    | WINDOW
    | {"num_hidden_layers": 4, "vocab_size_per_layer_input": 501}
    | {"per_layer_config": {1: {"head_dim": 128}, 3: {"head_dim": 128}}},
    "gemma4_untied": HEAD
    | WINDOW
    | {"per_layer_config": {1: {"head_dim": 128, "num_key_value_heads": 1}}}
    | {"vocab_size_per_layer_input": 501},
    "gemma4_moe": HEAD
    | WINDOW
    | EXPERT
    | {"per_layer_config": {1: {"head_dim": 128}}, "vocab_size_per_layer_input": 501},
    "gpt_oss": HEAD
    | WINDOW
    | {
        "intermediate_size": 128,
        "rope_parameters": YARN_OF_ALL | {"original_max_position_embeddings": 64},
    },
    "ministral3": HEAD
    | WINDOW
    | {"rope_parameters": SCALED_BY_POSITION | {"original_max_position_embeddings": 256}},
    "exaone4": WINDOW,
    "glm4": HEAD,
    "stablelm": {},
    "seed_oss": HEAD,
    "nemotron": {"head_dim": 64},
    "qwen3_5": DELTA,
    "qwen3_5_tied": DELTA,
    "qwen3_5_moe": DELTA | MOE_SIZES,
    "qwen3_next": DELTA | MOE_SIZES,
    # Keys that vLLM's model reads, and transformers' does not have.
    "lfm2": {"conv_dim": 256, "block_dim": 256},
    "nemotron_h": {"head_dim": 64, "num_hidden_layers": None, "mamba_head_dim": 32},
    "glm4_moe_lite": EXPERT | LATENT,
    "deepseek_v3": EXPERT
    | LATENT
    | {"rope_parameters": DEEPSEEK_YARN | {"original_max_position_embeddings": 64}},
}


def wider(name: str) -> PreTrainedConfig:
    """A model of tests/support/tiny_hf.py with the sizes of this file."""
    config = copy.deepcopy(ALL[name])
    sizes = SIZES | OWN[name]
    config.update({key: size for key, size in sizes.items() if size is not None})
    return config


CONFIGS = {name: wider(name) for name in OWN} | {
    "llama_tied": LlamaConfig(**SIZES, num_key_value_heads=4, tie_word_embeddings=True),
    "qwen2_untied": Qwen2Config(**SIZES, **ONE_HEAD, tie_word_embeddings=False),
    "qwen3_tied": Qwen3Config(**SIZES, **ONE_HEAD, **HEAD, tie_word_embeddings=True),
}
# Names of weights that are cut by columns: without experts, and with.
ROW_PARALLEL = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
WITH_EXPERTS = ("self_attn.o_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
OF_LAYER = ("experts.gate_up_proj", "experts.down_proj")
SHARED_EXPERT = (*WITH_EXPERTS, "mlp.shared_expert.down_proj.weight")
SHARED_EXPERTS = (*WITH_EXPERTS, "mlp.shared_experts.down_proj.weight")
BY_COLUMNS = dict.fromkeys(("qwen3_moe", "qwen3_moe_tied", "olmoe", "mixtral"), WITH_EXPERTS)
BY_COLUMNS["qwen2_moe"] = SHARED_EXPERT
BY_COLUMNS["gemma4_moe"] = ("self_attn.o_proj.weight", "mlp.down_proj.weight", *OF_LAYER)
BY_COLUMNS["gpt_oss"] = (*WITH_EXPERTS, "mlp.experts.gate_up_proj_bias")
# Those of models whose two layers differ.
_DELTA_RULE = ("linear_attn.out_proj.weight", "self_attn.o_proj.weight")
_CONVOLUTION = ("conv.out_proj.weight", "self_attn.out_proj.weight")
OF_LAYERS = {
    name: [f"{layer}.{part}" for layer in range(2) for part in (mixers[layer], *rest)]
    for name, mixers, rest in (
        ("qwen3_5", _DELTA_RULE, ROW_PARALLEL[1:]),
        ("qwen3_5_tied", _DELTA_RULE, ROW_PARALLEL[1:]),
        ("qwen3_5_moe", _DELTA_RULE, SHARED_EXPERT[1:]),
        ("qwen3_next", _DELTA_RULE, SHARED_EXPERT[1:]),
        ("lfm2", _CONVOLUTION, ("feed_forward.w2.weight",)),
    )
} | {"nemotron_h": [f"{n}.mixer.{name}_proj.weight" for n, name in enumerate(("out", "o", "down"))]}
BY_COLUMNS |= dict.fromkeys(AFTER_DENSE, SHARED_EXPERTS)
_FIRST = [*(f"0.{name}" for name in ROW_PARALLEL), *(f"1.{name}" for name in SHARED_EXPERTS)]
OF_LAYERS |= dict.fromkeys(AFTER_DENSE, _FIRST)
OF_LAYERS["gemma4"] = [f"{layer}.{name}" for layer in range(4) for name in ROW_PARALLEL]


@dataclass(frozen=True)
class Case:
    """One model on one mesh; the number of ranks is that of the process group."""

    model: str
    dtype: DType
    tp: int
    dp_replicate: int = 1
    enforce_eager: bool = True
    layout: Layout = Layout.aligned
    expert_parallel: bool = False
    weights: RolloutWeights = RolloutWeights.dtype

    def __str__(self) -> str:
        experts = "-experts_whole" * self.expert_parallel
        layout = f"{self.layout}{experts}{'-fp8' * self.is_fp8}"
        return f"{self.model}-{self.dtype}-tp{self.tp}-replicas{self.dp_replicate}-{layout}"

    @property
    def is_fp8(self) -> bool:
        return self.weights is RolloutWeights.fp8

    @property
    def rounding(self) -> float:
        """Largest mean difference of log-probs from those in float32, nats."""
        return 0.4 if self.is_fp8 else 0.1

    def spec(self) -> FSDPConfig:
        """The sharding spec on the ranks of the process group; columns not yet known."""
        return fsdp_config(
            dist.get_world_size() // self.dp_replicate,
            self.dp_replicate,
            layout=self.layout,
            tensor_parallel_size=self.tp,
        )


class Actor:
    """Stands where the actor's worker would: its weights can be set, and idle on the host."""

    def __init__(self, folder: Path, spec: FSDPConfig, mesh: Any, **trained: bool) -> None:
        self._load = lambda path: load_sharded_policy(model_config(path), spec, mesh, 64, **trained)
        self._policy = self._load(folder)
        self._weights = offloadable_weights(self._policy, Offload.idle_all, device_of(mesh))

    def named_shards(self) -> list[Any]:
        return named_shards(self._policy)

    def begin(self) -> None:
        self._weights.wait()

    def rest(self) -> None:
        self._weights.offload()

    @torch.no_grad()
    def take_weights(self, folder: Path) -> None:
        self.begin()
        for own, other in zip(self.named_shards(), named_shards(self._load(folder)), strict=True):
            own.local().copy_(other.local())


def write_folders(root: Path, models: list[str]) -> None:
    """Checkpoints A and B of each model, float32, under root/<model>/<A or B>."""
    for name in models:
        for seed, which in enumerate("AB"):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(torch.randn_like(param) * 0.1)
                spread(model, name)
            model.save_pretrained(root / name / which)


def rollout_config(case: Case, folder: Path, **changes: Any) -> RolloutConfig:
    values: dict[str, Any] = {
        "tensor_parallel_size": case.tp,
        "expert_parallel": case.expert_parallel,
        "max_prompt_tokens": MAX_PROMPT,
        "max_response_tokens": MAX_RESPONSE,
        "dtype": case.dtype,
        "weights": case.weights,
        "enforce_eager": case.enforce_eager,
    }
    return role_configs.rollout_config(folder, **(values | changes))


def prompts(
    temperature: float = 1.0,
    count: int = 3,
    *,
    rows: Sequence[list[int]] | None = None,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop: tuple[int, ...] = (),
    max_tokens: int | Sequence[int] = MAX_RESPONSE,
    each: int = 2,
    **call: Any,
) -> Requests:
    if rows is None:
        rows = [[(7 * i + 3 * j) % 90 + 5 for j in range(LENGTHS[i])] for i in range(count)]
    params = SamplingParams(temperature, top_p, top_k, stop_token_ids=stop)
    options = {"max_tokens": max_tokens, "each": each, "first_id": 40, "step": 3}
    return requests_of(rows, params, **options, returns_recorded=True, **call)


def run_cases(cases: list[Case], root: Path, device_type: str) -> dict[str, dict[str, Any]]:
    """What each case showed on this rank, by the case's text."""
    set_rank_environment()
    if device_type == "cuda":
        turn_off_multicast()
    seen: dict[str, dict[str, Any]] = {}
    workers: list[RolloutWorker] = []
    for case in cases:
        if workers:
            forget_tensor_parallel_groups()
        workers.append(build_worker(case, root / case.model, device_type))
        seen[str(case)] = run_case(case, workers[-1], root / case.model)
    return seen


def set_rank_environment() -> None:
    """What vLLM reads of a rank."""
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))


def forget_tensor_parallel_groups() -> None:
    """Let another engine be built in this process, perhaps of another size."""
    from vllm.distributed.parallel_state import destroy_model_parallel

    destroy_model_parallel()


def build_worker(case: Case, folder: Path, device_type: str, **changes: Any) -> RolloutWorker:
    recorded = RouterReplay.record if case.model in BY_COLUMNS else RouterReplay.none
    changes = {"router_replay": recorded} | changes
    config = rollout_config(case, folder / "A", **changes)
    return RolloutWorker(config, build_mesh(case.spec(), device_type))


def run_case(case: Case, worker: RolloutWorker, folder: Path) -> dict[str, Any]:
    if case.model == "llama" and case.enforce_eager:  # a compiled forward reads the parameter
        keep_as_buffer(worker, "model.norm.weight")
    columns = worker.columns(case.spec())
    actor = Actor(folder / "A", replace(case.spec(), columns=columns), worker.mesh)
    worker.connect({"actor": actor})
    seen: dict[str, Any] = {"columns": columns}
    seen["shared_memory"] = shared_memory()
    seen["early"] = error_of(lambda: worker.generate(prompts()))

    for version, which in ((1, "A"), (2, "B")):
        actor.take_weights(folder / which)
        seen[f"metrics_{which}"] = worker.reshard(version)
        live = {name: t.clone() for name, t in live_tensors(worker.engine._model).items()}
        seen[f"rollout_{which}"] = worker.generate(prompts())
        seen[f"again_{which}"] = worker.generate(prompts())
        loaded = loaded_by_vllm(worker.config, folder / which)
        held = {name: tensor for name, tensor in live.items() if name in loaded}
        seen[f"differs_{which}"] = differences(held, loaded)
        seen[f"errors_{which}"] = log_prob_errors(seen[f"rollout_{which}"], folder / which)
        if case.model in BY_COLUMNS:
            batches = [seen[f"{name}_{which}"] for name in ("rollout", "again")]
            seen[f"experts_{which}"] = [differing_experts(b, folder / which) for b in batches]
        worker.sleep()
        seen["asleep"] = error_of(lambda: worker.generate(prompts()))
    seen["greedy"] = greedy_pair(worker)
    seen["nobody"] = len(worker.generate(prompts(count=0)))
    if worker.mesh.device_type == "cpu":
        seen["kept"] = kept(worker)
    seen["corrupted"] = corrupted(worker)
    if worker.mesh.device_type == "cuda":
        seen["captured"] = beside_a_capture(worker, actor)
    seen |= refusals(worker, actor)
    return seen


def shared_memory() -> list[str]:
    """Names that vLLM's tensor parallelism on CPUs has left under /dev/shm."""
    ident = os.environ.get("VLLM_DIST_IDENT")  # set by vLLM's CPU worker
    return [] if ident is None else [str(f) for f in Path("/dev/shm").glob(f"*{ident}*")]


def greedy_pair(worker: RolloutWorker) -> tuple[list[int], list[int]]:
    """Tokens of two greedy samples of one prompt."""
    worker.reshard(3)
    first, second, *_ = worker.generate(prompts(temperature=0.0)).responses.rows()
    return first.tolist(), second.tolist()


def kept(worker: RolloutWorker) -> dict[str, tuple[int | None, list[int]]]:
    """By sleep mode: the version that stays, and what is sampled before and after, without reshard.

    Only without a GPU may an engine change its mode.
    """
    found = {}
    for mode in SleepMode:
        worker.config.sleep = mode
        worker.reshard(3)
        batches = [worker.generate(prompts())]
        version = worker.sleep()
        if version is not None:
            batches.append(worker.generate(prompts()))
        found[mode.value] = (version, [batch.responses.values.tolist() for batch in batches])
    assert worker.config.sleep is SleepMode.all, "as it was"
    worker.reshard(3)
    return found


LAST_OF_LAYER = ("mlp.down_proj.weight", "w2_weight", "w2.weight", "mixer.o_proj.weight")


def corrupted(worker: RolloutWorker) -> dict[str, str]:
    """What verification says after one bit of one parameter flips on the last rank."""
    found = {}
    tensors = worker.engine.tensors()
    last = [name for name in tensors if name.startswith("model.layers.1.")]
    downs = [name for name in last if name.endswith(LAST_OF_LAYER)]
    embeddings = ("model.embed_tokens.weight", "model.embedding.weight")
    for name in (*downs, *(name for name in embeddings if name in tensors)):
        # On the embedding's last rank: padding, where tp > 1.
        element = tensors[name][-1].view(-1)[-1:]
        if dist.get_rank() == dist.get_world_size() - 1:
            element.view(torch.uint8)[0] ^= 1
        found[name] = error_of(lambda: worker.resharder.verify(4))
        if dist.get_rank() == dist.get_world_size() - 1:
            element.view(torch.uint8)[0] ^= 1
    worker.resharder.verify(5)  # the bits are back
    return found


def beside_a_capture(worker: RolloutWorker, actor: Actor) -> float:
    """What a graph adds, if weights arrived in another thread while this one captured it."""
    actor.begin()
    stream, own = torch.cuda.Stream(), torch.cuda.Stream()
    side = worker.engine.trace, worker.engine.tensors(), Route.colocated(worker.mesh)
    resharder = Resharder(actor.named_shards(), *side, 1)

    def sync() -> None:
        with torch.cuda.stream(stream):
            resharder.sync(6, verify=True)

    sync()  # compiles kernels
    graph, total = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(own), ThreadPoolExecutor(1) as thread:
        graph.capture_begin(capture_error_mode="thread_local")
        total.add_(1)
        thread.submit(sync).result()
        total.add_(1)
        graph.capture_end()
    graph.replay()
    return total.item()


def refusals(worker: RolloutWorker, actor: Actor) -> dict[str, str]:
    """What is said where ranks disagree, and about a prompt that is too long."""
    rank, engine, shards = dist.get_rank(), worker.engine, actor.named_shards()
    side = engine.trace, engine.tensors(), Route.colocated(worker.mesh)

    def resharder(shards: Any, bucket_mb: int) -> Resharder:
        return Resharder(shards, *side, bucket_mb)

    long = prompts(rows=[[1] * (MAX_PROMPT + 1), [1], [1]])
    trained = {shard.name for shard in shards if not shard.frozen}  # on all ranks
    cut = [
        replace(shard, local=lambda s=shard: s.local()[:-1]) if shard.name in trained else shard
        for shard in shards
    ]
    wrong_shards = resharder(cut, 1)

    def sync_cut_shards() -> None:
        actor.begin()
        wrong_shards.sync(1, verify=True)

    peers = Peers(engine.peers)
    peers.note([rank])
    return {
        "buckets": error_of(lambda: resharder(shards, 1 + rank)),
        "tokens": error_of(lambda: peers.of_first([])),
        "long": error_of(lambda: worker.generate(long)),
        "shape": error_of(sync_cut_shards),
    }


def error_of(call: Any) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def keep_as_buffer(worker: RolloutWorker, name: str) -> None:
    """Have this parameter be a buffer, which vLLM's loader writes as well."""
    path, _, key = name.rpartition(".")
    module = worker.engine._model.get_submodule(path)
    parameter = module._parameters.pop(key)
    module.register_buffer(key, parameter.data)


def loaded_by_vllm(config: RolloutConfig, folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of this rank as vLLM itself loads them from a checkpoint."""
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    on_gpu = torch.cuda.is_available()
    inspected = models_inspected_here()
    with inspected, experts_as_loaded(folder, "cuda" if on_gpu else "cpu") as more:
        more |= {} if on_gpu else {"attention_backend": "CPU_MLA"}
        more |= {"quantization": PER_CHANNEL} if config.weights is RolloutWeights.fp8 else {}
        vllm_config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=config.dtype.value,
            tensor_parallel_size=config.tensor_parallel_size,
            enable_expert_parallel=config.expert_parallel,
            distributed_executor_backend="external_launcher",
            max_model_len=MAX_PROMPT + MAX_RESPONSE,
            enforce_eager=True,
            **more,
        ).create_engine_config()
        start = nullcontext() if on_gpu else cpu_start()
        with start, own_class(folder), set_current_vllm_config(vllm_config):
            model = get_model(vllm_config=vllm_config)
    # Views that vLLM adds after loading (parts of kv_b_proj) come after what they are views of.
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        first.setdefault(parameter.untyped_storage().data_ptr(), name)
    return {name: model.get_parameter(name).data for name in first.values()}


def differences(live: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> list[str]:
    """Parameters that are not bit for bit the same, or that only one side has."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return sorted(live.keys() ^ loaded.keys()) + [
        name
        for name in live.keys() & loaded.keys()
        if live[name].shape != loaded[name].shape
        or live[name].dtype != loaded[name].dtype
        or not torch.equal(
            live[name].view(bits[live[name].itemsize]),
            loaded[name].view(bits[live[name].itemsize]),
        )
    ]


def bounds_of(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """What a model with recurrent layers wants of a sequence: the trainer here has packed them."""
    if not pack_recurrences(model):
        return {}
    bounds = torch.tensor([0, ids.shape[1]], dtype=torch.int32)
    lengths = {"max_length_q": ids.shape[1], "max_length_k": ids.shape[1], "use_cache": False}
    sequences = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "seq_idx": torch.zeros_like(ids)}
    return lengths | sequences


@torch.no_grad()
def log_prob_errors(rollout: Any, folder: Path) -> torch.Tensor:
    """|log-prob by transformers in float32 - log-prob by vLLM| of the sampled tokens, in nats."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    errors = []
    for prompt, response, reported in zip(
        rollout.prompts.rows(),
        rollout.responses.rows(),
        rollout.rollout_log_probs.rows(),
        strict=True,
    ):
        ids = torch.cat([prompt, response])[None]
        logits = model(ids, **bounds_of(model, ids)).logits[0, len(prompt) - 1 : -1]
        exact = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        errors.append((exact - reported).abs())
    return torch.cat(errors)


@torch.no_grad()
def differing_experts(rollout: Any, folder: Path) -> tuple[int, int]:
    """How many choices of experts are not those of transformers in float32, and of how many."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    of_layer = [layer._modules | layer.mlp._modules for layer in model.model.layers]
    pairs = zip(model.model.layers, of_layer, strict=True)
    layers = [layer for layer, modules in pairs if "experts" in modules]
    chosen = []
    for layer in layers:
        named = dict(layer.named_modules())
        (router,) = (named[n] for n in ("mlp.gate", "mlp.router", "router") if n in named)
        router.register_forward_hook(lambda router, args, output: chosen.append(output[2]))
    differing = total = 0
    rows = (rollout.prompts.rows(), rollout.responses.rows(), rollout.routed_experts.rows())
    for prompt, response, routed in zip(*rows, strict=True):
        tokens = torch.cat([prompt, response])
        *recorded, last = routed.view(len(tokens), len(layers), -1).long().sort(-1).values
        assert not last.any(), "the last token was sampled, not computed"
        model(tokens[None], **bounds_of(model, tokens[None]))
        expected = torch.stack(chosen, 1)[:-1].sort(-1).values + 1
        chosen.clear()
        differing += int((torch.stack(recorded) != expected).any(-1).sum())
        total += expected[..., 0].numel()
    return differing, total
