"""Session of an evaluation: samples, scores and writes responses, pass by pass.

reward processes        on the driver, at once
worker processes        policy and rollout engine on all ranks
a pass                  some samples of every problem -> completions.jsonl
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from hybridrl.commands.evaluation.completions import Completion, CompletionLog
from hybridrl.commands.evaluation.options import EvalOptions
from hybridrl.commands.evaluation.subject import Subject
from hybridrl.commands.running import report_removal
from hybridrl.config.planner.world import world_size
from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import WorkerGroup, start_roles
from hybridrl.data.batch import PromptBatch, RolloutBatch
from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.sources.prompts import Prompt, PromptSets
from hybridrl.data.sources.tokenizer import decoder, load_tokenizer
from hybridrl.trainer.evaluate import Scored, request_of, score_by_rules
from hybridrl.trainer.factory import generator_for, open_environment, open_rewards, open_rules
from hybridrl.trainer.rewarding import Rewarded
from hybridrl.workers.reference import PolicyConfig

# Responses per call, in units of those that the engines decode together. A larger value leaves
# engines less often idle behind the longest responses, but delays the first results.
ROUNDS_PER_CALL = 4


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that is ready to run.

    Attributes:
        options: of the command.
        subject: checkpoint or model.
        config: checked and resolved.
        prompts: of the data sets.
        asked: prompts to evaluate.
        output: existing folder.
    """

    options: EvalOptions
    subject: Subject
    config: RunConfig
    prompts: PromptSets
    asked: list[Prompt]
    output: Path

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 decodes greedily."""
        return 0.0 if self.options.greedy else self.config.rollout.temperature

    @property
    def top_p(self) -> float:
        """Nucleus of sampling."""
        return 1.0 if self.options.greedy else self.config.rollout.top_p


@dataclass
class Totals:
    """Totals over all samples so far.

    Attributes:
        scores: rule -> scores of each problem's samples; the training reward is "".
        tokens: of all responses.
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
    """Sample and score, inside `ray_runtime`.

    Args:
        evaluation: ready to run.
        progress: called after each pass with the samples per problem so far.

    Raises:
        ConfigError: the cluster lacks the slots, or the checkpoint is of another model.
        WorkerError: a process failed.
    """
    config, options = evaluation.config, evaluation.options
    with ExitStack() as stack:
        decode = decoder(load_tokenizer(config.model.path))
        environment = open_environment(config, stack)
        rewards = open_rewards(config, environment, decode, stack)
        rules = open_rules(config, stack)
        log = stack.enter_context(CompletionLog(evaluation.output, options.correct_at))
        rollout = _rollout_engines(evaluation, stack)
        generator = generator_for(config, environment, rollout, evaluation.prompts, decode)
        lengths = ResponseLengths()
        totals = Totals({rule: [[] for _ in evaluation.asked] for rule in ("", *rules)})
        for first, count in passes(
            options.samples, len(evaluation.asked), _responses_per_call(config)
        ):
            start = time.perf_counter()
            batch = generator.generate(lengths.expect(_request(evaluation, first, count))).batch
            seconds = time.perf_counter() - start
            lengths.learn(batch)
            each = [prompt for prompt in evaluation.asked for _ in range(count)]
            rewarded, results = score_by_rules(rewards, rules, each, batch)
            log.write(_completions(each, first, count, batch, rewarded, results))
            totals.add(results, batch, seconds)
            progress(first + count, totals)
        return totals


def passes(samples: int, problems: int, per_call: int) -> Iterator[tuple[int, int]]:
    """Yield (first sample, number of samples) of each call.

    Args:
        samples: of each problem, in total.
        problems: number of problems, all of which are in each call.
        per_call: target number of responses per call.
    """
    each = max(1, per_call // problems)
    for first in range(0, samples, each):
        yield first, min(each, samples - first)


def _responses_per_call(config: RunConfig) -> int:
    engines = world_size(config) // config.rollout.tensor_parallel_size
    return ROUNDS_PER_CALL * engines * config.rollout.max_num_seqs


def _rollout_engines(evaluation: Evaluation, stack: ExitStack) -> WorkerGroup:
    """Start rollout engines with the subject's weights; `stack` ends them."""
    config, folder = evaluation.config, evaluation.subject.folder
    policy = PolicyConfig(
        model=config.model,
        fsdp=config.fsdp,
        lora=config.lora,
        checkpoint=None if folder is None else str(folder.resolve()),
    )
    roles = {"rollout": config.rollout, "actor": policy}
    with nullcontext() if folder is None else report_removal(folder):
        pool, groups = start_roles(config, roles, evaluation.output)
    stack.enter_context(pool)
    rollout: WorkerGroup = groups["rollout"]
    rollout.call("reshard", evaluation.subject.step)
    return rollout


def _request(evaluation: Evaluation, first: int, count: int) -> PromptBatch:
    return request_of(
        evaluation.asked,
        evaluation.subject.step,
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        samples=count,
        first_sample=first,
    )


def _completions(
    prompts: Sequence[Prompt],
    first: int,
    count: int,
    batch: RolloutBatch,
    rewarded: Rewarded,
    results: dict[str, Scored],
) -> Iterator[Completion]:
    lengths, truncated = batch.responses.lengths.tolist(), batch.truncated.tolist()
    for row, (prompt, text) in enumerate(zip(prompts, rewarded.texts, strict=True)):
        yield Completion(
            problem=prompt.prompt_id,
            sample=first + row % count,
            prompt=prompt.text,
            response=text,
            answer=str(prompt.example["answer"]),
            scores={rule: result.scores[row] for rule, result in results.items()},
            length=lengths[row],
            truncated=truncated[row],
        )
