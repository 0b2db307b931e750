"""Checks of sampling parameters and constrained output (xgrammar), before an engine gets them."""

import json
from functools import lru_cache
from typing import Any

from hybridrl.rollout import vllm_compat

# Schemas whose check is remembered.
SCHEMAS = 256


def check_sampling(name: str, value: Any) -> None:
    """Check a field of vLLM's SamplingParams.

    Raises:
        ValueError: vLLM refuses the value.
    """
    vllm_compat.set_environment("cpu", enforce_eager=False)
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        SamplingParams(**{name: value})
    except VLLMValidationError as error:
        raise ValueError(str(error)) from error


def check_constraint(fields: dict[str, Any]) -> None:
    """Check fields of vLLM's StructuredOutputsParams.

    Raises:
        ValueError: xgrammar does not support the schema, or it is none.
    """
    _check(json.dumps(fields))


@lru_cache(SCHEMAS)
def _check(fields: str) -> None:
    vllm_compat.set_environment("cpu", enforce_eager=False)
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    params = vllm_compat.structured_outputs(json.loads(fields))
    try:
        validate_xgrammar_grammar(SamplingParams(structured_outputs=params))
    except VLLMValidationError as error:
        raise ValueError(str(error)) from error
