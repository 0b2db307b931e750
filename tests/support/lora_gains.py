"""Log-prob gains of a trained policy as trainer and vLLM compute them, on one rank.

The policy gains log-prob on responses that it has sampled itself: every token has advantage 1.
"""

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from hybridrl.config.choices import DType, SleepMode
from hybridrl.config.schema import LoRAConfig
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.requests import Requests, SamplingParams
from hybridrl.data.schedule import ScheduledBatch
from hybridrl.reshard.copies import region_view
from hybridrl.workers.actor import ActorWorker
from hybridrl.workers.rollout import RolloutWorker
from tests.support.batches import requests_of
from tests.support.reshard_cases import Case, build_worker
from tests.support.role_configs import (
    actor_config,
    fsdp_config,
    lora_config,
    model_config,
    optim_config,
)
from tests.support.training_batches import scheduled

PROMPT_TOKENS, MAX_TOKENS = 24, 16384
# Sequences of one forward in float64, padded at their ends.
EXACT_ROWS = 16


class Size(NamedTuple):
    """Responses to sample: `each` of at most `tokens` tokens to each of `prompts` prompts."""

    prompts: int
    each: int
    tokens: int

    @property
    def responses(self) -> int:
        return self.prompts * self.each


class Gains(NamedTuple):
    """By number of optimizer steps.

    Attributes:
        share: vLLM's mean gain over the trainer's, both as they compute it.
        error: standard error of the share: kernels round differently with every change of weights.
        held: the same of the weights that each of them computes with, in float64.
        trained: the trainer's mean gain, nats per token.
        difference: mean |log-prob of vLLM - log-prob of the trainer|, nats.
    """

    share: dict[int, float]
    error: dict[int, float]
    held: dict[int, float]
    trained: dict[int, float]
    difference: dict[int, float]


def gains(
    folder: Path, rank: int, lr: float, at: tuple[int, ...], size: Size, device_type: str = "cpu"
) -> Gains:
    """Train for max(at) steps in bfloat16 and compare after each number of steps in `at`.

    Args:
        folder: the model.
        rank: of the adapters; 0 trains all weights.
        lr: learning rate.
        at: numbers of steps.
        size: of the batch.
        device_type: "cpu" or "cuda".
    """
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    worker, actor = build(folder, rank, lr, size, device_type)
    worker.reshard(0)
    batch = worker.generate(requests(size))
    ones = torch.ones_like(batch.rollout_log_probs.values)
    batch = batch.adding(advantages=batch.responses.like(ones))
    before = sides(worker, actor, batch)
    exact, found = ExactLogProbs(folder, batch, device_type), Gains({}, {}, {}, {}, {})
    held_before = exact.of(in_engine(worker)), exact.of(in_actor(actor))
    for step in range(1, max(at) + 1):
        worker.sleep()
        learn(actor, batch, step)
        if step in at:
            worker.reshard(step)
            sampled, trained = sides(worker, actor, batch)
            found.difference[step] = float((sampled - trained).abs().mean())
            gain, shown = trained - before[1], sampled - before[0]
            found.trained[step] = float(gain.mean())
            found.share[step] = float(shown.mean() / gain.mean())
            spread = (shown - found.share[step] * gain).std() / len(gain) ** 0.5
            found.error[step] = float(spread / gain.mean().abs())
            held = exact.of(in_engine(worker)), exact.of(in_actor(actor))
            gains_held = [now - then for now, then in zip(held, held_before, strict=True)]
            found.held[step] = float(gains_held[0].mean() / gains_held[1].mean())
    return found


def write_bfloat16(folder: Path, target: Path) -> Path:
    """A copy of a model whose weights bfloat16 can hold, as those of published models are.

    There a merge loses updates below half an ulp; weights in float32 would dither them.
    """
    shutil.copytree(folder, target)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(target)
    return target


def build(
    folder: Path, rank: int, lr: float, size: Size, device_type: str
) -> tuple[RolloutWorker, ActorWorker]:
    """Rollout engine and actor on one rank, both computing in bfloat16."""
    case = Case("", DType.bfloat16, tp=1, enforce_eager=device_type == "cpu")
    lora = lora_config(rank, alpha=2.0 * rank)
    worker = build_worker(
        case,
        folder,
        device_type,
        model=model_config(folder),
        lora=lora,
        sleep=SleepMode.none,
        max_response_tokens=size.tokens,
        responses_per_prompt=size.each,
        max_num_seqs=size.responses,
        kv_cache_mb=256,
        reshard_bucket_mb=64,
    )
    config = actor_config(
        folder,
        fsdp_config(1, param_dtype=DType.bfloat16),
        lora=lora,
        temperature=1.0,
        mini_batch_size=size.responses,
        max_tokens_per_gpu=MAX_TOKENS,
        max_response_tokens=size.tokens,
        log_prob_chunk_tokens=512,
        entropy_coef=0.0,
        optim=optim_config(lr),
    )
    actor = ActorWorker(config, worker.mesh)
    worker.connect({"actor": actor})
    return worker, actor


def requests(size: Size) -> Requests:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, 150, (size.prompts * PROMPT_TOKENS,), generator=generator)
    rows = tokens.view(size.prompts, PROMPT_TOKENS).tolist()
    return requests_of(rows, SamplingParams(1.0), max_tokens=size.tokens, each=size.each)


def learn(actor: ActorWorker, batch: RolloutBatch, step: int) -> None:
    """One step up the log-prob of all tokens, from the policy as it is."""
    batch = batch.adding(old_log_probs=trained_log_probs(actor, batch))
    actor.update(dealt(batch).shard(1)[0], step, 0.0)


def dealt(batch: RolloutBatch) -> ScheduledBatch:
    """The batch as one mini-batch of one rank."""
    return scheduled(batch, num_ranks=1, mini_batch_size=len(batch), max_tokens=MAX_TOKENS)


def sides(worker: RolloutWorker, actor: ActorWorker, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Log-probs of the responses' tokens by vLLM and by the trainer, [N] float32."""
    return scored_by_vllm(worker.engine, batch), trained_log_probs(actor, batch).values


def trained_log_probs(actor: ActorWorker, batch: RolloutBatch) -> Ragged:
    whole = dealt(batch)
    return whole.join([actor.compute_log_probs(whole.shard(1)[0])])


def scored_by_vllm(engine: Any, batch: RolloutBatch) -> Tensor:
    """Log-probs of given tokens, [N] float32: those that vLLM reports of a prompt."""
    from vllm import SamplingParams, TokensPrompt

    rows = list(zip(batch.prompts.rows(), batch.responses.rows(), strict=True))
    texts = [TokensPrompt(prompt_token_ids=[*p.tolist(), *r.tolist()]) for p, r in rows]
    params = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0, detokenize=False)
    outputs = engine._llm.generate(texts, params, use_tqdm=False)
    found = []
    for (prompt, response), output in zip(rows, outputs, strict=True):
        reported = output.prompt_logprobs[len(prompt) :]
        found += [at[int(token)].logprob for at, token in zip(reported, response, strict=True)]
    return torch.tensor(found)


class ExactLogProbs:
    """Log-probs of given tokens under weights by checkpoint name, computed in float64.

    Args:
        folder: the model.
        batch: prompts and responses.
        device_type: where it is computed.
    """

    def __init__(self, folder: Path, batch: RolloutBatch, device_type: str) -> None:
        self.device = device_type
        self.rows = list(zip(batch.prompts.rows(), batch.responses.rows(), strict=True))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.model = model.to(device_type).eval()

    @torch.no_grad()
    def of(self, weights: dict[str, Tensor]) -> Tensor:
        """[N] float64, nats."""
        self.model.load_state_dict(weights, strict=False)
        found = []
        for start in range(0, len(self.rows), EXACT_ROWS):
            rows = self.rows[start : start + EXACT_ROWS]
            tokens = [torch.cat(row) for row in rows]
            padded = pad_sequence(tokens, batch_first=True).to(self.device)
            log_p = self.model(padded).logits.log_softmax(-1)[:, :-1]
            log_p = log_p.gather(-1, padded[:, 1:, None])[..., 0].cpu()
            for row, (prompt, response) in zip(log_p, rows, strict=True):
                found.append(row[len(prompt) - 1 :][: len(response)])
        return torch.cat(found)


def in_engine(worker: RolloutWorker) -> dict[str, Tensor]:
    """The weights that vLLM holds, float64; those of adapted layers merged in float64."""
    tensors = worker.engine.tensors()
    shapes = {shard.name: shard.shape for shard in worker.actor.named_shards()}
    whole: dict[str, Tensor] = {}
    for copy in worker.engine.trace.copies:
        part = region_view(tensors[copy.parameter], copy.destination)
        source = whole.setdefault(copy.source, torch.zeros(shapes[copy.source]).double())
        region_view(source, copy.region).copy_(part)
    return merged(whole, worker.config.lora)


def in_actor(actor: ActorWorker) -> dict[str, Tensor]:
    """What the trainer's forward makes of its master weights, in the same form."""
    shards = actor.named_shards()
    whole = {shard.name: shard.local().bfloat16().double().cpu() for shard in shards}
    return merged(whole, actor.config.lora)


def merged(whole: dict[str, Tensor], lora: LoRAConfig | None) -> dict[str, Tensor]:
    found = {name: weight for name, weight in whole.items() if ".lora_" not in name}
    for name in found:
        layer = name.removesuffix("weight")
        if lora is not None and f"{layer}lora_A.weight" in whole:
            update = whole[f"{layer}lora_B.weight"] @ whole[f"{layer}lora_A.weight"]
            found[name] = found[name] + lora.alpha / lora.rank * update
    return found
