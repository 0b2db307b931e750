"""Held-out accuracy: responses to each held-out problem, scored by every rule."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from hybridrl.data.batch import Generate, RolloutBatch
from hybridrl.data.sources.prompts import Prompt
from hybridrl.rewards.scorer import RewardScorer, ScoreResult
from hybridrl.trainer.rewarding import Rewarded, RewardSource, reward_items
from hybridrl.trainer.sampling.generation import request_of

# A tag with more values than this (a name, an id) gets no accuracy of its own.
MAX_TAG_VALUES = 8
# The normal distribution has 95 % of its mass within so many standard deviations.
Z95 = 1.96

GREEDY = {"temperature": 0.0, "top_p": 1.0}
# Scores of responses, with their failures.
Scored = Rewarded | ScoreResult


class Evaluator:
    """Evaluation of the weights that generation uses, on the held-out problems.

    One response to each is sampled as in training, but for `top_k`; one is `greedy` if asked for.
    They are scored by the rewards of the training and by further rules. Before and after training
    `samples` are sampled, of which the best counts.

    Attributes:
        last_accuracy: of the last evaluation; NaN before it.
        responses: of the last evaluation, by kind: "sampled", and "greedy" if asked for.
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
        self._temperature = temperature
        self._top_p = top_p
        self._top_k = top_k
        self._greedy = greedy
        self._samples = samples
        self._groups = tag_groups(prompts, taken={"greedy", *rules})
        self.last_accuracy = math.nan
        self.responses: dict[str, tuple[RolloutBatch, Rewarded]] = {}

    @property
    def _sampling(self) -> dict[str, Any]:
        return {"temperature": self._temperature, "top_p": self._top_p, "top_k": self._top_k}

    def evaluate(
        self, step: int, generate: Generate, *, is_end: bool = False
    ) -> dict[str, float | None]:
        """Compute metrics of the held-out responses at `step`; accuracies are mean scores.

        Args:
            step: training steps so far.
            generate: samples responses.
            is_end: the evaluation is that before or after training.

        Returns:
            eval/accuracy and eval/accuracy_<rule> of responses sampled as in training,
            eval/accuracy_<group> and eval/accuracy_<group>_<rule> on the problems of each tag,
            eval/accuracy_greedy and eval/accuracy_greedy_<rule> if asked for,
            eval/accuracy_best_of_<samples> of each problem's best response, at an end,
            eval/ci95, eval/ci95_<rule> and eval/ci95_greedy...: half-width of the 95 % confidence
            interval of the accuracy on all problems,
            eval/length_mean (tokens) and eval/truncated_fraction of the sampled responses,
            eval/failed: scores that raised or hung, over all rules.
        """
        batch, results = self._scored("sampled", step, generate)
        metrics: dict[str, float | None] = {}
        for group, members in self._groups.items():
            for rule, result in results.items():
                name = f"eval/accuracy_{group}{rule}"
                metrics[name] = fmean([result.scores[index] for index in members])
        if self._greedy:
            _, greedy = self._scored("greedy", step, generate)
            results |= {f"_greedy{rule}": result for rule, result in greedy.items()}
        if is_end and self._samples > 1:
            best = self._best(results[""].scores, step, generate)
            results |= {f"_best_of_{self._samples}": best}
        self.last_accuracy = fmean(results[""].scores)
        for suffix, result in results.items():
            metrics[f"eval/accuracy{suffix}"] = fmean(result.scores)
            metrics[f"eval/ci95{suffix}"] = half_width(result.scores)
        return metrics | {
            "eval/length_mean": float(batch.responses.lengths.float().mean()),
            "eval/truncated_fraction": float(batch.truncated.float().mean()),
            "eval/failed": float(sum(len(result.failures) for result in results.values())),
        }

    def _best(self, scores: Sequence[float], step: int, generate: Generate) -> ScoreResult:
        """Sample further responses; return the best score of each problem, `scores` included."""
        more = self._samples - 1
        request = request_of(
            self.prompts,
            step,
            **self._sampling,
            samples=more,
            first_sample=1,
        )
        prompts = [prompt for prompt in self.prompts for _ in range(more)]
        batch = generate(request)
        rest = self._rewards.score(prompts, batch.select(batch.last_of_episodes))
        of_problem = [rest.scores[start : start + more] for start in range(0, len(prompts), more)]
        best = [max(first, *others) for first, others in zip(scores, of_problem, strict=True)]
        return ScoreResult(best, rest.failures)

    def _scored(
        self, kind: str, step: int, generate: Generate
    ) -> tuple[RolloutBatch, dict[str, Scored]]:
        """Sample and score; keys are suffixes of metrics, "" for the training reward."""
        how = GREEDY if kind == "greedy" else self._sampling
        request = request_of(self.prompts, step, **how)
        batch = generate(request)
        last = batch.select(batch.last_of_episodes)
        rewarded, results = score_by_rules(self._rewards, self._rules, self.prompts, last)
        self.responses[kind] = last, rewarded
        return batch.by_episode(), results


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

    For scores of 0 or 1 the interval is Wilson's (1927), which has a width even if all problems
    fail: 0 of 500 are 0 +- 0.0076. For others it is 1.96 standard errors, too narrow with few
    problems.
    """
    count, mean = len(scores), fmean(scores)
    if any(score not in (0.0, 1.0) for score in scores):
        return Z95 * pstdev(scores) / math.sqrt(count)
    spread = math.sqrt(mean * (1 - mean) * count + Z95**2 / 4)
    middle, half = mean * count + Z95**2 / 2, Z95 * spread
    low, high = (middle - half) / (count + Z95**2), (middle + half) / (count + Z95**2)
    return max(mean - low, high - mean)
