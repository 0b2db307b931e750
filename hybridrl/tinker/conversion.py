"""Messages of tinker's SDK as data of the service, and its results as messages.

Tokens, tensors and results travel as bytes of numpy arrays in protobuf messages; other requests are
JSON, which the SDK's own types read.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import DTypeLike
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from hybridrl.service.data import Datum, Output, Sample, Sampling, ServiceError

TARGETS = "target_tokens"
_DTYPES = {messages.DTYPE_FLOAT32: np.float32, messages.DTYPE_INT64: np.int64}
_STOP_REASONS = {
    "stop": messages.STOP_REASON_STOP,
    "length": messages.STOP_REASON_LENGTH,
}
# Requests of samples that ask for more than tokens and their log-probs.
_MORE = (
    *("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs"),
    *("prompt_alt_tokens_k", "record_stability_info"),
)


def data_of(request: messages.ForwardBackwardRequest) -> list[Datum]:
    """Return the data of a request; ServiceError names what is not token ids and plain rows."""
    return [_datum(f"datum {index}", datum) for index, datum in enumerate(request.data)]


def _datum(where: str, datum: messages.Datum) -> Datum:
    tokens: list[int] = []
    for chunk in datum.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise ServiceError(_not_text(f"{where}: model_input", str(kind)))
        tokens += _numbers(where, chunk.encoded_text.tokens, np.int32)
    rows = {name: _row(f"{where}: {name}", one) for name, one in datum.loss_fn_inputs.items()}
    if TARGETS not in rows:
        raise ServiceError(f"{where}: loss_fn_inputs have no {TARGETS}; each loss needs them")
    return Datum(tokens, rows.pop(TARGETS), rows)


def _row(where: str, tensor: messages.Tensor) -> list[int]:
    shape = list(tensor.shape)
    if tensor.HasField("sparse_csr") or len(shape) > 1:
        raise ServiceError(
            f"{where} has shape {shape}, expected one dimension: "
            f"several targets of a token are not supported"
        )
    if tensor.dtype not in _DTYPES:
        raise ServiceError(f"{where}: expected float32 or int64")
    return _numbers(where, tensor.dense, _DTYPES[tensor.dtype])


def _numbers(where: str, content: bytes, dtype: DTypeLike) -> list[int]:
    try:
        numbers: list[int] = np.frombuffer(content, dtype).tolist()
    except ValueError as error:
        raise ServiceError(f"{where}: {error}") from error
    return numbers


def _not_text(where: str, kind: str) -> str:
    return f"{where} has a chunk of {kind}, expected token ids (EncodedTextChunk) alone"


def loss_settings(request: messages.ForwardBackwardRequest) -> dict[str, float]:
    """Return loss_fn_config; ServiceError if it has a text."""
    if texts := [name for name, one in request.loss_fn_config_v2.items() if one.HasField("text")]:
        raise ServiceError(f"loss_fn_config: {texts[0]} is a text, expected a number")
    return {name: one.number for name, one in request.loss_fn_config_v2.items()}


def output_message(output: Output) -> bytes:
    """Return a forward's result: the log-probs of each datum's targets."""
    message = messages.ForwardBackwardOutput(
        loss_fn_output_type="TensorOutput", metrics=output.metrics
    )
    record = message.loss_fn_outputs.add(num_datums=len(output.log_probs))
    field = record.fields["logprobs"]
    field.dtype = messages.DTYPE_FLOAT32
    field.data = b"".join(np.asarray(row, np.float32).tobytes() for row in output.log_probs)
    sizes = [0, *(4 * len(row) for row in output.log_probs)]
    field.offsets = np.cumsum(sizes, dtype=np.int64).tobytes()
    return bytes(message.SerializeToString())


def refuse_unsupported(request: types.SampleRequest) -> None:
    """Refuse what a request of samples asks beyond tokens and log-probs by a ServiceError."""
    fields: Mapping[str, object] = request.model_dump(include=set(_MORE))
    for name in _MORE:
        if fields[name]:
            raise ServiceError(f"{name} = {fields[name]} is not supported: leave it out")


def prompt_of(model_input: types.ModelInput) -> list[int]:
    """Return the tokens of a prompt; ServiceError if it has images or audio."""
    tokens: list[int] = []
    for chunk in model_input.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise ServiceError(_not_text("prompt", chunk.type))
        tokens += chunk.tokens
    return tokens


def sampling_of(params: types.SamplingParams) -> Sampling:
    """Return a distribution and its ends; ServiceError if end tokens are switched off."""
    stop = (params.stop,) if isinstance(params.stop, str) else params.stop
    if stop is not None and not stop:
        raise ServiceError(
            "stop = [] would switch the model's end tokens off: here they always end an answer.\n"
            "Leave stop out"
        )
    return Sampling(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k if params.top_k > 0 else None,
        stop=tuple(stop or ()),
        seed=params.seed,
    )


def samples_message(samples: Sequence[Sample], prompt: Sequence[float] | None) -> bytes:
    """Return samples, and the log-probs of the prompt if it has asked for them."""
    message = messages.SampleResponse()
    for sample in samples:
        message.sequences.add(
            stop_reason=_STOP_REASONS[sample.stop_reason],
            tokens=np.asarray(sample.tokens, np.int32).tobytes(),
            logprobs=np.asarray(sample.log_probs, np.float32).tobytes(),
        )
    if prompt is not None:
        message.prompt_logprobs = np.asarray(prompt, np.float32).tobytes()
    return bytes(message.SerializeToString())
