"""How good is a tiny model? Held-out problems, sampled by transformers, judged by plain rules."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.data.sources.problems import Problem, held_out_problems

MARKED_AT_THE_END = re.compile(r"#### (\d+)$")
MAX_RESPONSE_TOKENS = 48


@dataclass(frozen=True)
class Accuracy:
    """Shares of the responses, 0 to 1.

    Attributes:
        strict: `#### <right number>` at the end.
        flexible: the last number is right.
        right_if_marked: strict, among the responses that hold a marker.
        strict_unseen: strict, on the problems with an unseen number range.
    """

    strict: float
    flexible: float
    right_if_marked: float
    strict_unseen: float


def sampled_accuracy(folder: Path, *, samples_per_problem: int, seed: int) -> Accuracy:
    """Accuracy on the held-out problems at temperature 1."""
    problems = held_out_problems() * samples_per_problem
    torch.manual_seed(seed)
    responses = _sample(folder, problems)
    right = [problem.answer.rsplit(" ", 1)[1] for problem in problems]
    marked_numbers = [MARKED_AT_THE_END.search(response) for response in responses]
    strict = [bool(m) and m[1] == r for m, r in zip(marked_numbers, right, strict=True)]
    last_numbers = [re.findall(r"\d+", response)[-1:] for response in responses]
    return Accuracy(
        strict=_mean(strict),
        flexible=_mean([n == [r] for n, r in zip(last_numbers, right, strict=True)]),
        right_if_marked=sum(strict) / sum("####" in response for response in responses),
        strict_unseen=_mean(
            [s for s, p in zip(strict, problems, strict=True) if p.tags["range"] == "unseen"]
        ),
    )


def _sample(folder: Path, problems: list[Problem]) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(
        **inputs, max_new_tokens=MAX_RESPONSE_TOKENS, do_sample=True, temperature=1.0, top_k=0
    )
    responses = output[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(responses, skip_special_tokens=True)


def _mean(flags: list[bool]) -> float:
    return sum(flags) / len(flags)
