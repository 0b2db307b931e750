"""Judges: from a step's metrics to a sentence of evidence, or None while all is well."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median

from hybridrl.config.estimators import estimator_of
from hybridrl.config.schema import RunConfig
from hybridrl.trainer.record import Row

# Steps in a row in which an engine is slow, and in which the critic explains nothing.
SLOW_STEPS = 2
BLIND_STEPS = 20
# FP8 weights multiply the usual difference of log-probs.
FP8_MISMATCH = 5
# Reward's standard deviation below which returns have hardly anything to explain.
SOME_VARIANCE = 0.05
ROLES = ("actor", "critic")
SPEED = "rollout/engine_tokens_per_second_"


@dataclass(frozen=True)
class Seen:
    """Input of a judge.

    Attributes:
        row: metrics of the step.
        before: rows of the steps before it, from the run's beginning.
        limit: threshold of the check.
        config: of the run.
        place: describes the ranks of a rollout engine.
        values: metrics that the judge has read; it grows.
    """

    row: Row
    before: Sequence[Row]
    limit: float
    config: RunConfig
    place: Callable[[int], str]
    values: dict[str, float] = field(default_factory=dict)

    def get(self, metric: str) -> float | None:
        """Return a metric of the step; None if it has none, or NaN."""
        value = self.row.get(metric)
        if value is None or math.isnan(value):
            return None
        self.values[metric] = value
        return value

    def first(self, metric: str) -> float | None:
        """Return the run's first value of a metric, the step's if there was none before."""
        rows = chain(self.before, [self.row])
        return next((row[metric] for row in rows if row.get(metric) is not None), None)

    def last(self, metric: str) -> float | None:
        """Return the value in the row before."""
        return self.before[-1].get(metric) if self.before else None


Judge = Callable[[Seen], str | None]


def constant_reward(seen: Seen) -> str | None:
    """Judge that rewards that teach differ by more than float32's rounding."""
    if not _teach(seen) or not _is_constant(seen, seen.limit):
        return None
    mean = seen.get("reward/mean") or 0.0
    return f"every response got the reward {mean:g}: there is nothing to learn from it"


def _teach(seen: Seen) -> bool:
    """Return whether rewards teach, and not teachers alone."""
    return seen.config.teacher is None or seen.config.teacher.reward_coef > 0


def _is_constant(seen: Seen, limit: float) -> bool:
    std, mean = seen.get("reward/std"), seen.get("reward/mean") or 0.0
    return std is not None and std <= limit * max(1.0, abs(mean))


def unmixed_groups(seen: Seen) -> str | None:
    """Judge that some groups have different rewards, where the estimator compares them.

    Constant rewards have their own check.
    """
    share = seen.get("reward/mixed_fraction")
    groups = estimator_of(seen.config.algorithm.advantage).compares_groups
    if not groups or not _teach(seen) or share is None or share > seen.limit:
        return None
    if _is_constant(seen, seen.config.health.constant_reward or 0.0):
        return None
    return (
        f"in {1 - share:.0%} of the groups all responses have the same reward: their advantages "
        "are 0"
    )


def wrong_form(seen: Seen) -> str | None:
    """Judge that no rule of eval.rules finds far more right answers than the reward.

    A reward that failed says nothing about the answer's form.
    """
    strict = seen.get("eval/accuracy")
    if strict is None or seen.get("eval/failed"):
        return None
    for name in seen.config.eval.rules:
        other = seen.get(f"eval/accuracy_{name}")
        if other is not None and other - strict > seen.limit:
            return (
                f"the rule {name} finds {other:.0%} of the held-out answers right, the reward "
                f"{strict:.0%}: answers are right in a form that the reward does not accept"
            )
    return None


def fallen_accuracy(seen: Seen) -> str | None:
    """Judge that no accuracy is several intervals below its best.

    Accuracies are those by the reward itself and by the rules of eval.rules.
    """
    for suffix in ("", *(f"_{name}" for name in seen.config.eval.rules)):
        name, interval = f"eval/accuracy{suffix}", f"eval/ci95{suffix}"
        now, width = seen.get(name), seen.get(interval)
        if now is None or width is None:
            continue
        known = [row for row in seen.before if row.get(name) is not None]
        if not known:
            continue
        best = max(known, key=lambda row: row[name] or 0.0)
        step, accuracy = int(best["step"] or 0), best[name] or 0.0
        if accuracy - now <= seen.limit * (width + (best[interval] or 0.0)):
            continue
        text = f"{name} fell from {accuracy:.3f} (step {step}) to {now:.3f}"
        then = seen.before[seen.before.index(best) :]
        rewards = [value for row in then if (value := row.get("reward/mean")) is not None]
        if rewards and (reward := seen.get("reward/mean")) is not None:
            went = "rose" if reward > rewards[0] else "fell"
            text += f", while the training reward {went} from {rewards[0]:.3g} to {reward:.3g}"
        return text
    return None


def collapsed_entropy(seen: Seen) -> str | None:
    """Judge that entropy is not lost before the reward has risen by half its deviation."""
    now, first = seen.get("actor/entropy"), seen.first("actor/entropy")
    if now is None or not first or now >= seen.limit * first:
        return None
    reward, spread = seen.get("reward/mean"), seen.first("reward/std") or 0.0
    if reward is None or reward > (seen.first("reward/mean") or 0.0) + 0.5 * spread:
        return None
    return (
        f"the policy's entropy fell from {first:.3g} to {now:.3g} nats per token, and the reward "
        "has not risen: it hardly explores any more"
    )


def clipped_ratio(seen: Seen) -> str | None:
    """Judge that not too many tokens are clipped, but for GSPO, whose range is 100 times tighter.

    Source: Zheng et al. 2025 (GSPO), section 5.1, https://arxiv.org/abs/2507.18071
    """
    share = seen.get("actor/clip_fraction")
    if share is None or share <= seen.limit or seen.config.algorithm.loss.function == "gspo":
        return None
    return f"the ratio of {share:.0%} of the tokens was clipped"


def still_policy(seen: Seen) -> str | None:
    """Judge that several updates of a step move the policy."""
    actor, rollout = seen.config.actor, seen.config.rollout
    responses = seen.config.data.prompts_per_step * rollout.responses_per_prompt
    moved = seen.get("actor/log_ratio_max")
    if actor.epochs * responses <= actor.mini_batch_size or moved is None or moved > seen.limit:
        return None
    return (
        f"the step's updates changed no token's log-prob by more than {moved:.1g}: the policy "
        f"hardly moves (learning rate {seen.get('actor/lr') or 0.0:g})"
    )


def clipped_gradient(seen: Seen) -> str | None:
    """Judge that gradients are at most some times the norm that they are cut to."""
    for role in ROLES:
        norm, section = seen.get(f"{role}/grad_norm"), getattr(seen.config, role)
        if norm is not None and norm > seen.limit * section.optim.max_grad_norm:
            return (
                f"the {role}'s gradient has norm {norm:.3g} and is cut to "
                f"{role}.optim.max_grad_norm = {section.optim.max_grad_norm:g}"
            )
    return None


def blind_critic(seen: Seen) -> str | None:
    """Judge that the critic is no worse than a constant, where returns differ at all."""
    name = "critic/explained_variance"
    now, spread = seen.get(name), seen.get("reward/std") or 0.0
    if now is None or spread < SOME_VARIANCE:
        return None
    if now < seen.limit:
        return f"the critic is far worse than a constant: explained variance {now:.3g}"
    last = seen.before[1 - BLIND_STEPS :]
    known = [value for row in last if (value := row.get(name)) is not None]
    if len(known) + 1 < BLIND_STEPS or max(now, *known) > 0:
        return None
    return f"in {BLIND_STEPS} steps the critic explained nothing of the returns' variance"


def frozen_actor(seen: Seen) -> str | None:
    """Judge that the policy differs from the reference after a step with a gradient."""
    divergence, gradient = seen.get("actor/kl"), seen.last("actor/grad_norm") or 0.0
    # The norm is NaN if all updates were skipped.
    if divergence is None or abs(divergence) > seen.limit or not gradient > 0:
        return None
    return "the actor was trained in the step before, and still equals the reference"


def mismatch(seen: Seen) -> str | None:
    """Judge that no engine's log-probs are far from the actor's."""
    value = seen.get("rollout/log_prob_diff_engine_max")
    limit = seen.limit * (FP8_MISMATCH if seen.config.rollout.weights == "fp8" else 1)
    if value is None or value <= limit:
        return None
    engine = int(seen.get("rollout/log_prob_diff_worst_engine") or 0)
    return (
        f"on rollout engine {engine} ({seen.place(engine)}) vLLM's log-probs differ from the "
        f"actor's by {value:.2g} nats per token in the mean"
    )


def slow_engine(seen: Seen) -> str | None:
    """Judge that no engine samples slower than a share of the others' median for some steps."""
    rows = [*seen.before[1 - SLOW_STEPS :], seen.row]
    if len(rows) < SLOW_STEPS:
        return None
    by_step = [dict(_slow_engines(row, seen.limit)) for row in rows]
    for engine, (speed, others) in by_step[-1].items():
        if all(engine in slow for slow in by_step):
            return (
                f"rollout engine {engine} ({seen.place(engine)}) sampled {speed:,.0f} tokens/s, "
                f"the other engines {others:,.0f} in the median, and so for {SLOW_STEPS} steps"
            )
    return None


def _slow_engines(row: Row, share: float) -> Iterator[tuple[int, tuple[float, float]]]:
    speeds = {
        int(name.removeprefix(SPEED)): value
        for name, value in row.items()
        if name.startswith(SPEED) and name.removeprefix(SPEED).isdigit() and value
    }
    for engine, speed in speeds.items():
        others = [other for k, other in speeds.items() if k != engine]
        if others and speed < share * median(others):
            yield engine, (speed, median(others))


def slow_reward(seen: Seen) -> str | None:
    """Judge that the step does not wait for rewards for more than a share of its time."""
    waited, step = seen.get("time/score_s"), seen.get("time/step_s")
    if waited is None or not step or waited <= seen.limit * step:
        return None
    return f"{waited / step:.0%} of the step ({waited:.1f} s) was spent waiting for rewards"


_FUNCTIONS = (
    constant_reward,
    unmixed_groups,
    wrong_form,
    fallen_accuracy,
    collapsed_entropy,
    clipped_ratio,
    still_policy,
    clipped_gradient,
    blind_critic,
    frozen_actor,
    mismatch,
    slow_engine,
    slow_reward,
)
JUDGES: dict[str, Judge] = {function.__name__: function for function in _FUNCTIONS}
