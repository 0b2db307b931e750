"""Make the embedded tiny model: tokenizer, warm start by supervised training, HF files.

    python tools/make_tiny_model.py --out hybridrl/models/tiny
    python tools/make_tiny_model.py --out hybridrl/models/tiny_moe --experts 8
    python tools/make_tiny_model.py --out hybridrl/models/tiny_hybrid --hybrid --steps 400

The first takes 12 minutes on 2 cores, and 1 to 2 on a GPU.

The corpus and the initial weights follow from --seed; on another machine rounding differs, so a
fresh model equals the shipped one in its accuracy (within 0.05), not bit for bit.
"""

import argparse
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tiny_corpus import corpus
from tiny_tokenizer import END, PAD, build_tokenizer, save_tokenizer
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

log = logging.getLogger("make_tiny_model")

BATCH_SIZE = 128
PEAK_LR = 2.0e-3
WARMUP_STEPS = 50
MICRO_BATCH_SIZE = 32
LICENSE = Path(__file__).resolve().parents[1] / "LICENSE"
MAX_TOKENS = 1024
IGNORED = -100
# Weight of the load-balancing loss.
BALANCE = 0.01
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def model_config(
    vocab_size: int, pad_id: int, end_id: int, experts: int, *, hybrid: bool
) -> PreTrainedConfig:
    """Llama of 0.7 M parameters, or Qwen3-MoE of 1.1 M with 8 experts, of which 2 are active.

    Or Qwen3.5 of 0.8 M, two of whose three layers are recurrent.

    Heads and MLP divide over 1, 2 and 4 tensor-parallel ranks. Llama, not Qwen2: transformers 5
    gives every Qwen2 model Qwen's own tokenizer.
    """
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 448,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": True,
        "pad_token_id": pad_id,
        "eos_token_id": end_id,
        "bos_token_id": None,
        "dtype": "float32",
    }
    if hybrid:
        return Qwen3_5TextConfig(**sizes, **HYBRID)
    if not experts:
        return LlamaConfig(**sizes)
    return Qwen3MoeConfig(
        **sizes,
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        norm_topk_prob=True,
        router_aux_loss_coef=BALANCE,
    )


def make_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer with the words of the problems, all digits, and frequent parts of English."""
    texts = [text for pair in corpus(seed, 0, 20_000) for text in pair]
    digits = "".join(f" {digit}" for digit in range(10))
    return build_tokenizer([*texts, LICENSE.read_text(encoding="ascii"), *[digits] * 20])


def micro_batches(
    tokenizer: Tokenizer, seed: int, step: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The samples of one optimizer step, all new: (token ids, labels), each [b, T] int64.

    Labels are the token ids of the solution and IGNORED elsewhere. Samples of like length share
    a micro-batch, so that little padding is computed.
    """
    pairs = corpus(seed, step * BATCH_SIZE, BATCH_SIZE)
    samples = sorted((_encode(tokenizer, *pair) for pair in pairs), key=lambda s: len(s[0]))
    for start in range(0, BATCH_SIZE, MICRO_BATCH_SIZE):
        yield _pad(samples[start : start + MICRO_BATCH_SIZE], tokenizer.token_to_id(PAD))


def _encode(tokenizer: Tokenizer, question: str, solution: str) -> tuple[list[int], int]:
    """Token ids of the whole chat, and how many of them are the prompt."""
    prompt = tokenizer.encode(f"<|user|>{question}<|assistant|>").ids
    response = tokenizer.encode(f"{solution}{END}").ids
    return prompt + response, len(prompt)


def _pad(samples: list[tuple[list[int], int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(ids) for ids, _ in samples)
    ids = torch.full((len(samples), longest), pad_id)
    labels = torch.full_like(ids, IGNORED)
    for row, (sample, num_prompt) in enumerate(samples):
        ids[row, : len(sample)] = torch.tensor(sample)
        labels[row, num_prompt : len(sample)] = torch.tensor(sample[num_prompt:])
    return ids, labels


def train(model: PreTrainedModel, tokenizer: Tokenizer, seed: int, num_steps: int) -> None:
    """Supervised training on the corpus: AdamW, linear warm-up, linear decay.

    With experts, their load-balancing loss is part of the loss.
    """
    routed = {"output_router_logits": True} if model.config.model_type == "qwen3_moe" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / WARMUP_STEPS, max(0.01, 1 - k / num_steps))
    )
    started = time.perf_counter()
    for step in range(num_steps):
        micros = list(micro_batches(tokenizer, seed, step))
        num_tokens = sum((labels != IGNORED).sum() for _, labels in micros)
        total = 0.0
        for ids, labels in micros:
            ids, labels = ids.to(model.device), labels.to(model.device)
            loss = model(ids, labels=labels, num_items_in_batch=num_tokens, **routed).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 49:
            log.info("step %d  loss %.4f  %.0f s", step + 1, total, time.perf_counter() - started)


def main() -> None:
    """Make the model and write it to --out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=1, help="seed of corpus and weights")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps")
    parser.add_argument("--experts", type=int, default=0, help="experts of a layer; 0: none")
    parser.add_argument("--hybrid", action="store_true", help="with recurrent layers")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer(args.seed)
    pad_id, end_id = tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = tokenizer.get_vocab_size(), pad_id, end_id, args.experts
    config = model_config(*sizes, hybrid=args.hybrid)
    model = AutoModelForCausalLM.from_config(config).to(device)
    log.info("%d parameters, %d tokens", model.num_parameters(), tokenizer.get_vocab_size())
    train(model, tokenizer, args.seed, args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(pad_token_id=pad_id, eos_token_id=end_id)
    # In bfloat16 the package stays small.
    smaller = args.experts or args.hybrid
    model.to(torch.bfloat16 if smaller else torch.float32).save_pretrained(args.out)
    save_tokenizer(tokenizer, args.out, MAX_TOKENS)


if __name__ == "__main__":
    main()
