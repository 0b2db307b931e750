"""One evaluation from a checked config to scores: sample, judge, write down, pass by pass.

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
from hybridrl.commands.running import while_it_stays
from hybridrl.config.checks.sizes import world_size
from hybridrl.config.schema import RunConfig
from hybridrl.controller.worker_group import WorkerGroup, start_roles
from hybridrl.data.batch import PromptBatch, RolloutBatch
from hybridrl.data.lengths import ResponseLengths
from hybridrl.data.sources.prompt_sets import PromptSets
from hybridrl.data.sources.prompts import Prompt
from hybridrl.data.sources.tokenizer import decoder, load_tokenizer
from hybridrl.trainer.evaluate import Scored, request_of, score_by_rules
from hybridrl.trainer.factory import generator_for, open_environment, open_rewards, open_rules
from hybridrl.trainer.rewarding import Rewarded
from hybridrl.workers.policy import PolicyConfig

# A call to the engines asks for so many times the responses that they decode together: more would
# leave them less often idle behind the longest ones, and keep people waiting for first numbers.
ROUNDS_PER_CALL = 4


@dataclass(frozen=True)
class Case:
    """An evaluation that is ready to run.

    Attributes:
        options: as asked for.
        subject: what is evaluated.
        config: checked and resolved.
        prompts: of the data sets.
        asked: those that are answered.
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
        """Divides the logits; 0 decodes greedily."""
        return 0.0 if self.options.greedy else self.config.rollout.temperature

    @property
    def top_p(self) -> float:
        """Nucleus that is sampled from."""
        return 1.0 if self.options.greedy else self.config.rollout.top_p


@dataclass
class Answers:
    """What the samples came to.

    Attributes:
        scores: rule -> of each problem its samples' scores; training's rule has the name "".
        tokens: of all responses.
        truncated: responses that a limit ended.
        failed: judgements that raised or hung, over all rules.
        seconds: of generating.
    """

    scores: dict[str, list[list[float]]]
    tokens: int = 0
    truncated: int = 0
    failed: int = 0
    seconds: float = 0.0

    def take(self, results: dict[str, Scored], batch: RolloutBatch, seconds: float) -> None:
        """Add a pass over all problems; their samples stand together."""
        for rule, result in results.items():
            of_problem = self.scores[rule]
            each = len(result.scores) // len(of_problem)
            for index, scores in enumerate(of_problem):
                scores += result.scores[index * each : (index + 1) * each]
            self.failed += len(result.failures)
        self.tokens += len(batch.responses.values)
        self.truncated += int(batch.truncated.sum())
        self.seconds += seconds


def evaluate(case: Case, progress: Callable[[int, Answers], None]) -> Answers:
    """Sample and judge; to be called inside `ray_runtime`.

    Args:
        case: what to do.
        progress: is told how many samples of each problem there are, after each pass.

    Raises:
        ConfigError: the cluster lacks the slots, or the checkpoint is of another model.
        WorkerError: a process failed.
    """
    config, options = case.config, case.options
    with ExitStack() as stack:
        decode = decoder(load_tokenizer(config.model.path))
        environment = open_environment(config, stack)
        rewards = open_rewards(config, environment, decode, stack)
        rules = open_rules(config, stack)
        log = stack.enter_context(CompletionLog(case.output, options.correct_at))
        rollout = _rollout_engines(case, stack)
        generator = generator_for(config, environment, rollout, case.prompts, decode)
        lengths = ResponseLengths()
        answers = Answers({rule: [[] for _ in case.asked] for rule in ("", *rules)})
        for first, count in passes(options.samples, len(case.asked), _responses_per_call(config)):
            start = time.perf_counter()
            batch = generator.generate(lengths.expect(_request(case, first, count))).batch
            seconds = time.perf_counter() - start
            lengths.learn(batch)
            each = [prompt for prompt in case.asked for _ in range(count)]
            rewarded, results = score_by_rules(rewards, rules, each, batch)
            log.write(_completions(each, first, count, batch, rewarded, results))
            answers.take(results, batch, seconds)
            progress(first + count, answers)
        return answers


def passes(samples: int, problems: int, per_call: int) -> Iterator[tuple[int, int]]:
    """(first sample, how many) of each call: as many as `per_call` responses allow, at least one.

    Args:
        samples: of each problem, in all.
        problems: how many there are; a call asks all of them.
        per_call: responses of one call.
    """
    each = max(1, per_call // problems)
    for first in range(0, samples, each):
        yield first, min(each, samples - first)


def _responses_per_call(config: RunConfig) -> int:
    engines = world_size(config) // config.rollout.tensor_parallel_size
    return ROUNDS_PER_CALL * engines * config.rollout.max_num_seqs


def _rollout_engines(case: Case, stack: ExitStack) -> WorkerGroup:
    """Start rollout engines with the subject's weights; `stack` ends them."""
    config, folder = case.config, case.subject.folder
    policy = PolicyConfig(
        model=config.model,
        fsdp=config.fsdp,
        lora=config.lora,
        checkpoint=None if folder is None else str(folder.resolve()),
    )
    roles = {"rollout": config.rollout, "actor": policy}
    with nullcontext() if folder is None else while_it_stays(folder):
        pool, groups = start_roles(config, roles, case.output)
    stack.enter_context(pool)
    rollout: WorkerGroup = groups["rollout"]
    rollout.call("reshard", case.subject.step)
    return rollout


def _request(case: Case, first: int, count: int) -> PromptBatch:
    return request_of(
        case.asked,
        case.subject.step,
        temperature=case.temperature,
        top_p=case.top_p,
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
