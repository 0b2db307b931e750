"""Trace of a model's `load_weights`, recorded while it loads tensors without data.

The loader gets meta tensors under the checkpoint's names. Every copy into a parameter is recorded
and skipped, so no parameter changes and no memory is needed. Slices, chunks and views of a meta
tensor keep its storage and offset, so no knowledge of layouts is needed.

A buffer that the loader writes counts as a parameter. So does a persistent one, which vLLM starts
with random numbers: if the loader does not write it, the plan's check of coverage names it. Other
buffers (rotary caches) are computed at the engine's start, and vLLM keeps them through every sleep.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hybridrl.distributed.experts import CheckpointTensor
from hybridrl.distributed.regions import Region, Trace, TracedCopy, TracedFill
from hybridrl.distributed.torch_compat import TorchDispatchMode, operator_schema, storage_id

_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


def trace_loader(
    model: nn.Module,
    load: Callable[[Iterable[tuple[str, Tensor]]], Any],
    sources: Sequence[CheckpointTensor],
    dtype: torch.dtype,
) -> Trace:
    """Run `load` on tensors without data and return its writes, by the trainer's parameters.

    Args:
        model: model of the loader. Values of its parameters and buffers are not read or written.
        load: loader of (name, tensor) pairs; vLLM's `model.load_weights`.
        sources: the checkpoint's tensors, each a part of a parameter of the trainer.
        dtype: dtype of the moved data and thus of all parameters that are written.

    Raises:
        RuntimeError: the loader writes a parameter other than by plain copies and fills of
            rectangles; names it.
    """
    tracer = _Tracer(model, dtype)
    before = places(model)
    with torch.no_grad(), tracer:
        load(tracer.feed(sources))
    moved = dict(places(model).items() ^ before.items())
    assert not moved, f"the loader replaced the storage of {sorted(moved)}"
    return tracer.result()


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters, then its buffers, by name."""
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    return parameters | dict(model.named_buffers())


def places(model: nn.Module) -> dict[str, tuple[int, torch.Size]]:
    """Return address and shape of a model's parameters and buffers, by name."""
    return {name: (t.data_ptr(), t.shape) for name, t in live_tensors(model).items()}


class _Tracer(TorchDispatchMode):
    """Dispatch mode that records writes to parameters and buffers instead of executing them."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._parameters = {name for name, _ in model.named_parameters()} | _random_buffers(model)
        self._live = live_tensors(model)
        self._names_by_storage: dict[int, list[str]] = {}
        self._sources: dict[int, tuple[CheckpointTensor, Tensor]] = {}
        self._copies: list[TracedCopy] = []
        self._fills: list[TracedFill] = []
        for name, tensor in self._live.items():
            self._names_by_storage.setdefault(_storage(tensor), []).append(name)

    def feed(self, sources: Sequence[CheckpointTensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield meta tensors for the loader."""
        for source in sources:
            tensor = torch.empty(source.shape, dtype=self._dtype, device="meta")
            self._sources[_storage(tensor)] = (source, tensor)
            yield source.name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record a write to a parameter; execute all other operators."""
        target = self._target(func, args, kwargs or {})
        if target is None:
            return func(*args, **(kwargs or {}))
        name, *others = self._names_by_storage[_storage(target)]
        region = rectangle(target, self._live[name])
        if others:
            _refuse(name, f"shares its storage with {others}")
        if target.dtype != self._dtype:
            _refuse(name, f"has dtype {target.dtype}, not {self._dtype}")
        if region is None:
            _refuse(name, "is written in parts that are no rectangle")
        elif func is torch.ops.aten.copy_.default:
            self._copies.append(self._copy(name, region, args[1]))
        elif func not in _FILLS:
            _refuse(name, f"is written by {func}")
        elif region.numel:
            value = args[1] if len(args) > 1 else 0.0
            self._fills.append(TracedFill(name, region, float(value)))
        return args[0]

    def _target(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the view of a parameter or buffer that `func` would write."""
        schema = operator_schema(func)
        if not schema.is_mutable:
            return None
        named = {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
        named |= kwargs
        for argument in schema.arguments:
            value = named.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor) and _storage(tensor) in self._names_by_storage:
                    return tensor
        return None

    def _copy(self, name: str, written: Region, value: Tensor) -> TracedCopy:
        if _storage(value) not in self._sources:
            _refuse(name, "gets values that the loader computes")
        source, whole = self._sources[_storage(value)]
        region = rectangle(value, whole)
        if region is not None:
            at = source.at
            region = Region(at + region.offset, (1,) * len(at) + region.shape)
        if region is None or region.shape != written.shape:
            _refuse(name, f"gets a part of {source.name} that is broadcast or no rectangle")
        return TracedCopy(source.parameter, region, name, written.offset)

    def result(self) -> Trace:
        """Return the trace, after the loader has finished."""
        written = self._parameters | {copy.parameter for copy in self._copies}
        written |= {fill.parameter for fill in self._fills}
        shapes = {n: tuple(tensor.shape) for n, tensor in self._live.items() if n in written}
        return Trace(self._copies, self._fills, shapes)


def _random_buffers(model: nn.Module) -> set[str]:
    """Return the buffers that load_format=dummy randomises.

    Those with a leading underscore are scales of a quantised KV cache, which vLLM sets afterwards.
    """
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
        and buffer.is_floating_point()
        and not name.startswith("_")
    }


def _refuse(name: str, reason: str) -> NoReturn:
    raise RuntimeError(
        f"weight sync copies rectangles, but vLLM's parameter {name} {reason}. "
        "Install the version of vLLM pinned in requirements/"
    )


def rectangle(view: Tensor, whole: Tensor) -> Region | None:
    """Return the region of contiguous `whole` that `view` covers; None if it is no rectangle.

    A view with fewer dims lies at one index of the first ones.
    """
    for _ in range(whole.dim() - view.dim()):
        view = view.unsqueeze(0)
    steps = torch.empty(whole.shape, device="meta").stride()
    same = view.dim() == whole.dim() and whole.stride() == steps
    if not same or any(
        size > 1 and stride != step
        for size, stride, step in zip(view.shape, view.stride(), steps, strict=True)
    ):
        return None
    rest = view.storage_offset() - whole.storage_offset()
    offset = []
    for step in steps:
        offset.append(rest // step)
        rest %= step
    ends = (o + size for o, size in zip(offset, view.shape, strict=True))
    if rest or any(end > size for end, size in zip(ends, whole.shape, strict=True)):
        return None
    return Region(tuple(offset), tuple(view.shape))


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, meta tensors included."""
    return storage_id(tensor.untyped_storage())
