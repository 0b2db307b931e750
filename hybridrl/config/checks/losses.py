"""Checks of the settings around the policy loss."""

from collections.abc import Iterator

from hybridrl.config.choices import CorrectionMethod
from hybridrl.config.schema import RunConfig


def correction_problems(config: RunConfig) -> Iterator[str]:
    """Check that the bounds of importance ratios contain 1."""
    correction = config.algorithm.rollout_correction
    key = "algorithm.rollout_correction"
    if correction.method is CorrectionMethod.none:
        return
    if correction.high < 1:
        yield (
            f"{key}.high = {correction.high}, expected at least 1, the ratio of a token on which "
            f"vLLM and the trainer agree.\nSet {key}.high=2."
        )
    if correction.method is CorrectionMethod.mask and correction.low > 1:
        yield (
            f"{key}.low = {correction.low}, expected at most 1, the ratio of a token on which vLLM "
            f"and the trainer agree.\nSet {key}.low=0.5."
        )


def overlong_problems(config: RunConfig) -> Iterator[str]:
    """Check that the overlong buffer fits into a response."""
    buffer, longest = config.algorithm.overlong.buffer_tokens, config.rollout.max_response_tokens
    if buffer > longest:
        yield (
            f"algorithm.overlong.buffer_tokens = {buffer}, expected at most "
            f"rollout.max_response_tokens = {longest}: the penalty acts on a response's last "
            f"tokens.\n"
            f"Set algorithm.overlong.buffer_tokens={max(1, longest // 5)} or less."
        )


def sampling_problems(config: RunConfig) -> Iterator[str]:
    """Check that dynamic sampling has several responses per prompt to compare."""
    rounds, each = config.algorithm.max_sampling_rounds, config.rollout.responses_per_prompt
    if rounds > 1 and each < 2:
        yield (
            f"algorithm.max_sampling_rounds = {rounds}, but rollout.responses_per_prompt = {each}: "
            f"dynamic sampling keeps prompts whose responses differ in reward.\n"
            f"Set rollout.responses_per_prompt=2 or more, or algorithm.max_sampling_rounds=1."
        )
