"""Whether the settings around the policy loss fit each other."""

from collections.abc import Iterator

from hybridrl.config.choices import CorrectionMethod
from hybridrl.config.schema import RunConfig


def correction_problems(config: RunConfig) -> Iterator[str]:
    """A band of importance ratios that leaves out what is right, or everything."""
    correction = config.algorithm.rollout_correction
    key = "algorithm.rollout_correction"
    if correction.method is CorrectionMethod.none:
        return
    if correction.high < 1:
        yield (
            f"{key}.high = {correction.high}, expected at least 1: where vLLM and the trainer "
            f"agree, ratios are 1.\nSet {key}.high=2."
        )
    if correction.method is CorrectionMethod.mask and correction.low > 1:
        yield (
            f"{key}.low = {correction.low}, expected at most 1: where vLLM and the trainer agree, "
            f"ratios are 1.\nSet {key}.low=0.5."
        )


def overlong_problems(config: RunConfig) -> Iterator[str]:
    """A penalty that begins before the response does."""
    buffer, longest = config.algorithm.overlong.buffer_tokens, config.rollout.max_response_tokens
    if buffer > longest:
        yield (
            f"algorithm.overlong.buffer_tokens = {buffer}, but responses have at most "
            f"rollout.max_response_tokens = {longest} tokens.\n"
            f"Set algorithm.overlong.buffer_tokens={max(1, longest // 5)} or less."
        )


def sampling_problems(config: RunConfig) -> Iterator[str]:
    """Resampling by the differences between responses of which there is only one."""
    rounds, each = config.algorithm.max_sampling_rounds, config.rollout.responses_per_prompt
    if rounds > 1 and each < 2:
        yield (
            f"algorithm.max_sampling_rounds = {rounds}, but rollout.responses_per_prompt = {each}: "
            f"a prompt with one response never has responses that differ.\n"
            f"Set rollout.responses_per_prompt=2 or more, or algorithm.max_sampling_rounds=1."
        )
