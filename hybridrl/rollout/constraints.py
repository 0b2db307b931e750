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
        ValueError: xgrammar does not support the schema, or it is none, or refers to another file.
    """
    if (reference := _foreign_reference(fields.get("json"))) is not None:
        raise ValueError(
            f"$ref = {reference!r}, expected a part of the same schema (#/...): nothing is "
            "downloaded, and without it the text would not be constrained."
        )
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


def _foreign_reference(schema: Any) -> str | None:
    """Return a reference to something outside of a schema, if it has one."""
    if isinstance(schema, dict):
        own = schema.get("$ref")
        if isinstance(own, str) and not own.startswith("#"):
            return own
        schema = list(schema.values())
    parts = schema if isinstance(schema, list) else ()
    return next((one for one in map(_foreign_reference, parts) if one is not None), None)
