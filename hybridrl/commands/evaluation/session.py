"""Session of an evaluation: samples, scores and writes responses, pass by pass.

reward processes        on the driver, at once
worker processes        policy and rollout engine on all ranks
a pass                  some samples of every problem -> completions.jsonl
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from hybridrl.commands.evaluation.subject import Subject
from hybridrl.commands.running import report_removal
from hybridrl.config.planner.world import num_engines
from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import WorkerGroup, build_workers, open_pool
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.requests import SamplingParams
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.tokenizer import decoder, load_tokenizer
from hybridrl.trainer.episodes.base import Wanted
from hybridrl.trainer.evaluate import Scored, score_by_rules
from hybridrl.trainer.factory import generator_for, open_environment, open_rewards, open_rules
from hybridrl.workers.reference import PolicyConfig

COMPLETIONS = "completions.jsonl"
# Responses per call, in units of those that the engines decode together. A larger value leaves
# engines less often idle behind the longest responses, but delays the first results.
ROUNDS_PER_CALL = 4


class Split(StrEnum):
    """Problems to evaluate."""

    held_out = "held_out"
    train = "train"


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that is ready to run.

    Attributes:
        asked: prompts to evaluate, of `split`.
        output: folder that exists.
        samples: responses to each prompt, at temperature 0 if `greedy`.
        ks: of pass@k, rising.
        correct_at: smallest score of a correct response.
    """

    subject: Subject
    config: RunConfig
    asked: list[Prompt]
    output: Path
    samples: int
    ks: Sequence[int] = (1,)
    greedy: bool = False
    split: Split = Split.held_out
    correct_at: float = 1.0

    @property
    def sampling(self) -> dict[str, Any]:
        """temperature, top_p and top_k (None: all tokens)."""
        if self.greedy:
            return {"temperature": 0.0, "top_p": 1.0, "top_k": None}
        how = {"temperature": self.config.rollout.temperature, "top_p": self.config.eval_top_p}
        return {**how, "top_k": self.config.eval.top_k}


@dataclass
class Totals:
    """Totals over all samples so far.

    Attributes:
        scores: rule -> scores of each problem's samples; the training reward is "".
        truncated: responses ended by a limit.
        failed: scores that raised or timed out, over all rules.
        seconds: of generation.
    """

    scores: dict[str, list[list[float]]]
    tokens: int = 0
    truncated: int = 0
    failed: int = 0
    seconds: float = 0.0

    def add(self, results: dict[str, Scored], batch: RolloutBatch, seconds: float) -> None:
        """Add a pass over all problems; samples of a problem are contiguous."""
        for rule, result in results.items():
            of_problem = self.scores[rule]
            each = len(result.scores) // len(of_problem)
            for index, scores in enumerate(of_problem):
                scores += result.scores[index * each : (index + 1) * each]
            self.failed += len(result.failures)
        self.tokens += len(batch.responses.values)
        self.truncated += int(batch.truncated.sum())
        self.seconds += seconds


def evaluate(evaluation: Evaluation, progress: Callable[[int, Totals], None]) -> Totals:
    """Sample and score, inside `ray_runtime`; report the samples per problem after each pass."""
    config, subject, asked = evaluation.config, evaluation.subject, evaluation.asked
    with ExitStack() as stack:
        decode = decoder(load_tokenizer(config.model))
        environment = open_environment(config, stack)
        rewards = open_rewards(config, environment, decode, stack)
        rules = open_rules(config, stack)
        log = stack.enter_context((evaluation.output / COMPLETIONS).open("w", encoding="utf-8"))
        rollout = rollout_engines(config, subject, evaluation.output, stack)
        generate = generator_for(config, environment, rollout, decode, stack)
        lengths, params = ResponseLengths(), SamplingParams(**evaluation.sampling)
        totals = Totals({rule: [[] for _ in asked] for rule in ("", *rules)})
        assert config.rollout.max_num_seqs is not None, "derived before"
        per_call = ROUNDS_PER_CALL * num_engines(config) * config.rollout.max_num_seqs
        for first, count in passes(evaluation.samples, len(asked), per_call):
            start = time.perf_counter()
            wanted = Wanted(asked, subject.step, params, count, first)
            batch = generate(wanted.balanced(lengths))
            seconds, last = time.perf_counter() - start, batch.select(batch.last_of_episodes)
            batch = batch.by_episode()
            lengths.learn(batch.group_id.tolist(), batch.responses.lengths.tolist())
            each = [prompt for prompt in asked for _ in range(count)]
            rewarded, results = score_by_rules(rewards, rules, each, last)
            for row, (prompt, text) in enumerate(zip(each, rewarded.texts, strict=True)):
                line = _completion(prompt, text, batch, row, results, evaluation.correct_at)
                line = {"problem": prompt.prompt_id, "sample": first + row % count} | line
                log.write(json.dumps(line, ensure_ascii=False) + "\n")
            log.flush()
            totals.add(results, batch, seconds)
            progress(first + count, totals)
        return totals


def passes(samples: int, problems: int, per_call: int) -> Iterator[tuple[int, int]]:
    """Yield (first sample, number of samples) of each call, all with all problems.

    `per_call` is the target number of responses.
    """
    each = max(1, per_call // problems)
    for first in range(0, samples, each):
        yield first, min(each, samples - first)


def rollout_engines(
    config: RunConfig, subject: Subject, output: Path, stack: ExitStack
) -> WorkerGroup:
    """Start rollout engines with the weights of a subject; `stack` ends them.

    Workers log to `output`/logs.
    """
    folder = subject.folder
    policy = PolicyConfig(
        model=config.model,
        fsdp=config.fsdp,
        lora=config.lora,
        checkpoint=None if folder is None else str(folder.resolve()),
    )
    rollout_config = replace(config.rollout, top_p=1.0)  # nothing is recorded
    roles = {"rollout": rollout_config, "actor": policy}
    with nullcontext() if folder is None else report_removal(folder):
        pool = open_pool(config, roles, output)
        rollout = build_workers(config, roles, pool)["rollout"]
    stack.enter_context(rollout.pool)
    rollout.call("reshard", subject.step)
    return rollout


def _completion(
    prompt: Prompt,
    text: str,
    batch: RolloutBatch,
    row: int,
    results: dict[str, Scored],
    correct_at: float,
) -> dict[str, Any]:
    """Return the record of a response: `length` in tokens, its end token included."""
    scores = {rule_name(rule): result.scores[row] for rule, result in results.items()}
    return {
        "question": prompt.question,
        "prompt": prompt.text,
        "response": text,
        "answer": prompt.answer,
        "scores": scores,
        "length": int(batch.responses.lengths[row]),
        "truncated": bool(batch.truncated[row]),
        "correct": {rule: score >= correct_at for rule, score in scores.items()},
    }


def rule_name(rule: str) -> str:
    """Return the name of a rule in files and tables; that of the training reward is ""."""
    return rule or "reward"
