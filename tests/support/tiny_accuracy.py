"""How good is a tiny model? Held-out problems, decoded by transformers, judged by plain rules."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.data.sources.problems import held_out_problems

MARKED_AT_THE_END = re.compile(r"#### (\d+)$")
MAX_RESPONSE_TOKENS = 48


@dataclass(frozen=True)
class Accuracy:
    """Shares of the responses, 0 to 1.

    Attributes:
        strict: `#### <right number>` at the end.
        flexible: the last number is right.
        strict_unseen: strict, on the problems with an unseen number range.
        solved: share of the problems of which a response is strictly right.
    """

    strict: float
    flexible: float
    strict_unseen: float
    solved: float


def accuracy(
    folder: Path, *, samples_per_problem: int = 1, temperature: float = 1.0, seed: int = 1
) -> Accuracy:
    """Accuracy on the held-out problems; temperature 0 decodes greedily."""
    problems = held_out_problems() * samples_per_problem
    torch.manual_seed(seed)
    responses = _decode(folder, problems, temperature)
    right = [problem["answer"].rsplit(" ", 1)[1] for problem in problems]
    marked_numbers = [MARKED_AT_THE_END.search(response) for response in responses]
    strict = [bool(m) and m[1] == r for m, r in zip(marked_numbers, right, strict=True)]
    last_numbers = [re.findall(r"\d+", response)[-1:] for response in responses]
    return Accuracy(
        strict=_mean(strict),
        flexible=_mean([n == [r] for n, r in zip(last_numbers, right, strict=True)]),
        strict_unseen=_mean(
            [s for s, p in zip(strict, problems, strict=True) if p["tags"]["range"] == "unseen"]
        ),
        solved=len({p["question"] for s, p in zip(strict, problems, strict=True) if s})
        * samples_per_problem
        / len(problems),
    )


def _decode(folder: Path, problems: list[dict[str, Any]], temperature: float) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chats = [[{"role": "user", "content": problem["question"]}] for problem in problems]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    output = model.generate(**inputs, max_new_tokens=MAX_RESPONSE_TOKENS, **sampling)
    responses = output[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(responses, skip_special_tokens=True)


def _mean(flags: list[bool]) -> float:
    return sum(flags) / len(flags)
