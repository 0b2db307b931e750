"""Held-out accuracy: responses to each held-out problem, scored by every rule."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from hybridrl.controller.signals import Preemption
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.requests import SamplingParams
from hybridrl.data.sources.prompts import Prompt
from hybridrl.rewards.scorer import RewardScorer, ScoreResult
from hybridrl.trainer.episodes.base import GenerateWhole, Wanted
from hybridrl.trainer.record import Evaluation, Observer, Responses, Row, is_due
from hybridrl.trainer.rewarding import Rewarded, RewardSource, reward_items
from hybridrl.trainer.sampling.rollouts import Rollouts
from hybridrl.trainer.timing.phases import Phases

# A tag with more values than this (a name, an id) gets no accuracy of its own.
MAX_TAG_VALUES = 8
# The normal distribution has 95 % of its mass within so many standard deviations.
Z95 = 1.96

GREEDY = SamplingParams(temperature=0.0)
# Scores of responses, with their failures.
Scored = Rewarded | ScoreResult


class Evaluator:
    """Evaluation of the weights that generation uses, on the held-out problems.

    One response to each is sampled as in training, but for `top_k`; one is `greedy` if asked for.
    They are scored by the rewards of the training and by further rules. Before and after training
    `samples` are sampled, of which the best counts.

    """

    def __init__(
        self,
        prompts: list[Prompt],
        rewards: RewardSource,
        rules: Mapping[str, RewardScorer],
        *,
        temperature: float,
        top_p: float,
        greedy: bool,
        top_k: int | None = None,
        samples: int = 1,
    ) -> None:
        self.prompts = prompts
        self._rewards = rewards
        self._rules = {f"_{name}": rule for name, rule in rules.items()}
        self._params = SamplingParams(temperature, top_p, top_k)
        self._greedy = greedy
        self._samples = samples
        self._groups = tag_groups(prompts, taken={"greedy", *rules})

    def evaluate(self, step: int, generate: GenerateWhole, *, is_end: bool = False) -> Evaluation:
        """Sample and score responses to the held-out problems; accuracies are mean scores.

        Args:
            step: training steps so far.
            generate: samples responses.
            is_end: the evaluation is that before or after training.

        Returns:
            One response to each problem and metrics:
            eval/accuracy and eval/accuracy_<rule> of responses sampled as in training,
            eval/accuracy_<group> and eval/accuracy_<group>_<rule> on the problems of each tag,
            eval/accuracy_greedy and eval/accuracy_greedy_<rule> if asked for,
            eval/accuracy_best_of_<samples> of each problem's best response, at an end,
            eval/ci95, eval/ci95_<rule> and eval/ci95_greedy...: half-width of the 95 % confidence
            interval of the accuracy on all problems,
            eval/length_mean (tokens) and eval/truncated_fraction of the sampled responses,
            eval/failed: scores that raised or hung, over all rules.
        """
        sampled, whole, results = self._scored(self._params, step, generate)
        responses, metrics = {"sampled": sampled}, Row()
        for group, members in self._groups.items():
            for rule, result in results.items():
                name = f"eval/accuracy_{group}{rule}"
                metrics[name] = fmean([result.scores[index] for index in members])
        if self._greedy:
            responses["greedy"], _, greedy = self._scored(GREEDY, step, generate)
            results |= {f"_greedy{rule}": result for rule, result in greedy.items()}
        if is_end and self._samples > 1:
            best = self._best(results[""].scores, step, generate)
            results |= {f"_best_of_{self._samples}": best}
        for suffix, result in results.items():
            metrics[f"eval/accuracy{suffix}"] = fmean(result.scores)
            metrics[f"eval/ci95{suffix}"] = half_width(result.scores)
        metrics |= {
            "eval/length_mean": float(whole.responses.lengths.float().mean()),
            "eval/truncated_fraction": float(whole.truncated.float().mean()),
            "eval/failed": float(sum(len(result.failures) for result in results.values())),
        }
        return Evaluation(fmean(results[""].scores), metrics, responses)

    def _best(self, scores: Sequence[float], step: int, generate: GenerateWhole) -> ScoreResult:
        """Sample further responses; return the best score of each problem, `scores` included."""
        more = self._samples - 1
        wanted = Wanted(self.prompts, step, self._params, more, first=1)
        prompts = [prompt for prompt in self.prompts for _ in range(more)]
        batch = generate(wanted)
        rest = self._rewards.score(prompts, batch.select(batch.last_of_episodes))
        of_problem = [rest.scores[start : start + more] for start in range(0, len(prompts), more)]
        best = [max(first, *others) for first, others in zip(scores, of_problem, strict=True)]
        return ScoreResult(best, rest.failures)

    def _scored(
        self, params: SamplingParams, step: int, generate: GenerateWhole
    ) -> tuple[Responses, RolloutBatch, dict[str, Scored]]:
        """Sample and score one episode to each problem.

        Returns:
            The last response of each episode, whole episodes, and scores by suffix of their
            metrics, "" for the training reward.
        """
        batch = generate(Wanted(self.prompts, step, params))
        last = batch.select(batch.last_of_episodes)
        rewarded, results = score_by_rules(self._rewards, self._rules, self.prompts, last)
        return Responses(self.prompts, last, rewarded), batch.by_episode(), results


@dataclass
class Evaluations:
    """Phase evaluate: evaluations of the actor's weights during a run.

    Attributes:
        further: metrics of held-out problems that need no samples, of supervised fine-tuning.
        samples: false if the policy is not trained.
        accuracy: of the last evaluation; NaN before it.
    """

    evaluator: Evaluator
    rollouts: Rollouts
    phases: Phases
    preemption: Preemption
    observer: Observer
    further: Callable[[Sequence[Prompt]], Row] | None = None
    samples: bool = True
    accuracy: float = math.nan

    def if_due(self, step: int, every_steps: int, *, is_end: bool) -> Row:
        """Evaluate if due after a step; after a signal, only at the end of the run."""
        if is_end or (is_due(every_steps, step) and not self.preemption.is_asked):
            return self.evaluate(step, is_end=is_end)
        return {}

    def evaluate(self, step: int, *, is_end: bool) -> Row:
        """Evaluate the actor's weights; return metrics."""
        if not self.samples and self.further is not None:
            with self.phases.section("evaluate"):
                return self.further(self.evaluator.prompts)
        metrics = self.rollouts.reshard()
        with self.phases.section("evaluate"):
            evaluation = self.evaluator.evaluate(step, self.rollouts.generate, is_end=is_end)
            self.rollouts.engine.end_evaluation()
            if self.further is not None:
                self.rollouts.engine.sleep()
                more = self.further(self.evaluator.prompts)
                evaluation = replace(evaluation, metrics=evaluation.metrics | more)
        self.accuracy = evaluation.accuracy
        self.observer.evaluated(step, evaluation)
        return metrics | evaluation.metrics


def score_by_rules(
    rewards: RewardSource,
    rules: Mapping[str, RewardScorer],
    prompts: list[Prompt],
    batch: RolloutBatch,
) -> tuple[Rewarded, dict[str, Scored]]:
    """Decode responses and score them by each rule; the training reward has the name "".

    prompts[b] belongs to response b.
    """
    rewarded = rewards.score(prompts, batch)
    ids = [row.tolist() for row in batch.responses.rows()]
    items = reward_items(prompts, rewarded.texts, ids)
    results: dict[str, Scored] = {"": rewarded}
    return rewarded, results | {name: rule.score(items) for name, rule in rules.items()}


def tag_groups(prompts: Sequence[Prompt], taken: set[str]) -> dict[str, list[int]]:
    """Group prompt indices by tag value; keys are the groups' names in metrics.

    The name is the value ("unseen"), or tag and value ("steps_2") if the value is no identifier
    or is taken. Tags with one value or more than MAX_TAG_VALUES make no groups.
    """
    groups: dict[str, list[int]] = {}
    for tag in sorted({tag for prompt in prompts for tag in prompt.tags}):
        members: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            if tag in prompt.tags:
                members.setdefault(prompt.tags[tag], []).append(index)
        if not 2 <= len(members) <= MAX_TAG_VALUES:
            continue
        for value in sorted(members):
            clear = value.isidentifier() and value not in groups and value not in taken
            groups[value if clear else f"{tag}_{value}"] = members[value]
    return groups


def half_width(scores: Sequence[float]) -> float:
    """Compute the half-width of a mean's 95 % confidence interval, on its farther side.

    For scores of 0 or 1 the interval is Wilson's (1927). It has a width even if all problems fail:
    0 of 500 are 0 +- 0.0076. For others it is 1.96 standard errors, too narrow with few
    problems.
    """
    count, mean = len(scores), fmean(scores)
    if any(score not in (0.0, 1.0) for score in scores):
        return Z95 * pstdev(scores) / math.sqrt(count)
    spread = math.sqrt(mean * (1 - mean) * count + Z95**2 / 4)
    middle, half = mean * count + Z95**2 / 2, Z95 * spread
    low, high = (middle - half) / (count + Z95**2), (middle + half) / (count + Z95**2)
    return max(mean - low, high - mean)
