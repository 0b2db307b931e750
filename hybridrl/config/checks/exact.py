"""Checks of rollout.exact: equality holds for kernels, families and settings that were compared."""

from collections.abc import Iterator

from hybridrl.config.choices import ON_OWN_RANKS, Accelerator, DType, OtherSampling
from hybridrl.config.errors import Problem, must_be
from hybridrl.config.estimators import is_supervised
from hybridrl.config.planner.families import EXACT
from hybridrl.config.planner.shape import ModelShape
from hybridrl.config.schema import RunConfig

KEY = "rollout.exact"
# Head sizes for which FlashAttention 3 computes a token of a prompt and of a response alike.
HEAD_SIZES = (64, 128, 256)


def exact_problems(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    """Find what keeps vLLM's log-probs from being the trainer's, or needs them to differ."""
    rollout, fsdp = config.rollout, config.fsdp
    _, _, size, window = shape.largest_attention
    if not rollout.exact or is_supervised(config):
        return
    kind, tp = shape.kind, rollout.tensor_parallel_size
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    for is_so, why in (
        (config.hardware.accelerator is not Accelerator.gpu, "its kernels need a GPU"),
        (kind not in EXACT, f"it was compared for {', '.join(EXACT)}, and this model is {kind}"),
        (
            size not in HEAD_SIZES,
            f"model.path has heads of {size}; FlashAttention 3 was seen to compute prompts and "
            f"responses alike for heads of {HEAD_SIZES}",
        ),
        (
            window is not None and window < longest,
            f"layers of model.path see {window} tokens, and sequences have up to {longest}: "
            f"with windows that cut FlashAttention 3 tiles prompts and responses differently",
        ),
        (
            rollout.schedule in ON_OWN_RANKS,
            f"with rollout.schedule = {rollout.schedule} no token is of the present weights, so "
            f"that equality could not be checked",
        ),
        (
            config.agent is not None and config.agent.other_sampling is OtherSampling.mask,
            "requests with other sampling settings (agent.other_sampling = mask) change the "
            "precision in which vLLM computes the log-probs of all that are decoded with them",
        ),
        (
            config.lora is not None and tp > 1,
            f"adapters are not added up as on rollout.tensor_parallel_size = {tp} ranks",
        ),
        (
            (rollout.temperature != 1 or rollout.top_p < 1) and shape.vocab % 16 > 0,
            f"model.path has {shape.vocab} tokens, no multiple of 16: at rollout.temperature = "
            f"{rollout.temperature:g} and top_p = {rollout.top_p:g} vLLM adds up the logits of a "
            f"lone response otherwise",
        ),
    ):
        if is_so:
            yield must_be("exact", KEY, True, "false", why)
    same = f"with {KEY} = true both sides run the same bfloat16 kernels"
    for key, value, needed in (
        ("rollout.dtype", rollout.dtype, DType.bfloat16),
        ("fsdp.param_dtype", fsdp.param_dtype, DType.bfloat16),
        ("fsdp.compile", fsdp.compile, True),
    ):
        if value != needed:
            yield must_be("exact_kernels", key, value, str(needed).lower(), same)
