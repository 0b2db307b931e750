"""Panels of the curves. A name that ends in * stands for all metrics with that beginning."""

from typing import NamedTuple


class Panel(NamedTuple):
    """Panel: title, unit and metrics. Intervals (eval/ci95...) belong to accuracies by name."""

    title: str
    unit: str
    metrics: tuple[str, ...]


GROUPS: dict[str, list[Panel]] = {
    "Learning": [
        Panel("Reward", "mean of a step", ("reward/mean", "reward/model_mean")),
        Panel("Parts of the reward", "mean score", ("reward/part_*", "reward/mean_*")),
        Panel(
            "Held-out accuracy, 95 % interval",
            "mean score",
            ("eval/accuracy", "eval/accuracy_greedy", "eval/accuracy_best_of_*"),
        ),
        Panel("Held-out accuracy by rule and group", "mean score", ("eval/accuracy_*",)),
        Panel("Loss", "", ("actor/loss", "eval/nll")),
        Panel("Prompts whose responses differ in reward", "share", ("reward/mixed_fraction",)),
    ],
    "Policy": [
        Panel("KL", "nats per token", ("actor/kl", "actor/ppo_kl", "actor/kl_loss")),
        Panel("Entropy", "nats per token", ("actor/entropy",)),
        Panel("Ratio of new to old probability", "", ("actor/ratio_mean", "actor/ratio_max")),
        Panel("Clipped", "share of tokens", ("actor/clip_fraction",)),
        Panel("Gradient norm", "before clipping", ("actor/grad_norm", "critic/grad_norm")),
        Panel("Learning rate", "", ("actor/lr", "critic/lr")),
        Panel("Critic", "", ("critic/loss", "critic/explained_variance")),
        Panel("Load of experts", "share of choices", ("router/load_max", "router/load_min")),
        Panel("Values and returns", "reward", ("critic/value_mean", "critic/return_mean")),
    ],
    "Responses": [
        Panel("Length", "tokens", ("response/length_mean", "response/length_max")),
        Panel("Cut off at the limit", "share", ("response/truncated_fraction",)),
        Panel("Failed rewards", "responses", ("reward/failed", "eval/failed")),
        Panel("Turns", "", ("rollout/turns_*",)),
        Panel("Age of trained tokens", "updates", ("partial/version_lag_*",)),
        Panel("In flight", "responses", ("partial/in_flight", "partial/waiting")),
    ],
    "vLLM against the trainer": [
        Panel("Difference of log-probs, mean", "nats", ("rollout/log_prob_diff_mean",)),
        Panel("Difference of log-probs, largest", "nats", ("rollout/log_prob_diff_max",)),
        Panel("Mismatch", "nats per token", ("rollout/mismatch_kl", "rollout/mismatch_kl_k3")),
        Panel("Effective sample size", "share", ("rollout/mismatch_ess",)),
        Panel("Choices of other experts", "share", ("router/differing_*",)),
    ],
    "Speed": [
        Panel("Sampling", "tokens/s", ("rollout/tokens_per_second",)),
        Panel("Phases", "tokens/s", ("tokens_per_s/*",)),
        Panel("Seconds of a step", "s", ("time/*",)),
        Panel("Idle", "share", ("idle/fraction",)),
        Panel("Share of the peak", "MFU", ("mfu/*",)),
    ],
}
