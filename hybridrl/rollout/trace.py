"""Trace of a model's `load_weights`, recorded while it loads tensors without data.

The loader gets meta tensors under the checkpoint's names. Every copy into a parameter is recorded
and skipped, so no parameter changes and no memory is needed. Slices, chunks and views of a meta
tensor keep its storage and offset, so no knowledge of layouts is needed.

A buffer that the loader writes counts as a parameter. Other buffers (rotary caches) are computed at
the engine's start, and vLLM keeps them through every sleep.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybridrl.distributed.regions import Refusal, Region, Trace, TracedCopy, TracedFill
from hybridrl.distributed.torch_compat import TorchDispatchMode, operator_schema, storage_id

Loader = Callable[[Iterable[tuple[str, Tensor]]], Any]

_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


def trace_loader(
    model: nn.Module,
    load: Loader,
    sources: Sequence[tuple[str, tuple[int, ...]]],
    dtype: torch.dtype,
) -> Trace:
    """Run `load` on tensors without data and return its writes.

    Args:
        model: model of the loader. Values of its parameters and buffers are not read or written.
        load: loader of (name, tensor) pairs; vLLM's `model.load_weights`.
        sources: names and shapes of the checkpoint's tensors.
        dtype: dtype of the moved data. A parameter of another dtype is refused, because a cast
            would lose precision that the loader keeps.

    Returns:
        Copies and fills as rectangles. A parameter that is written in any other way is refused:
        `Trace.refused` has the reason, and none of its copies and fills are listed.
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
    """Dispatch mode that records writes to parameters instead of executing them.

    `_handed_out` holds the source of the last copy and the sources that the loader got since. A
    refused write may combine any of them.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._live = live_tensors(model)
        # Parameters, and buffers that were written.
        self._written_names = {name for name, _ in model.named_parameters()}
        self._names_by_storage: dict[int, list[str]] = {}
        self._sources: dict[int, tuple[str, Tensor]] = {}
        self._copies: list[TracedCopy] = []
        self._fills: list[TracedFill] = []
        # By parameter: the first reason, and the sources of all its writes.
        self._refused: dict[str, tuple[str, list[str]]] = {}
        self._handed_out: list[str] = []
        for name, tensor in self._live.items():
            self._names_by_storage.setdefault(_storage(tensor), []).append(name)

    def feed(self, sources: Sequence[tuple[str, tuple[int, ...]]]) -> Iterator[tuple[str, Tensor]]:
        """Yield meta tensors for the loader and record the order."""
        for name, shape in sources:
            tensor = torch.empty(shape, dtype=self._dtype, device="meta")
            self._sources[_storage(tensor)] = (name, tensor)
            self._handed_out.append(name)
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record a write to a parameter; execute all other operators."""
        written = self._written(func, args, kwargs or {})
        if written is None:
            return func(*args, **(kwargs or {}))
        name, target = written
        self._written_names.update(self._names_by_storage[_storage(target)])
        if func is torch.ops.aten.copy_.default:
            self._record_copy(name, target, args[1])
        elif func in _FILLS:
            self._record_fill(name, target, args[1] if len(args) > 1 else 0.0)
        else:
            self._refuse(name, f"the loader calls {func} on it")
        return args[0] if operator_schema(func).returns else None

    def _written(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, Tensor] | None:
        """Return the parameter or buffer that `func` would write, and the written view."""
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
                    return self._names_by_storage[_storage(tensor)][0], tensor
        return None

    def _record_copy(self, name: str, target: Tensor, value: Tensor) -> None:
        if _storage(value) not in self._sources:
            return self._refuse(name, "the loader computes the values that it copies into it")
        source, whole = self._sources[_storage(value)]
        if value.shape != target.shape:
            return self._refuse(name, f"{source} is broadcast into it")
        region = rectangle(value, whole)
        destination = rectangle(target, self._live[name])
        if region is None or destination is None:
            return self._refuse(name, f"the part of {source} that is copied is no rectangle")
        self._copies.append(TracedCopy(source, region, name, destination.offset))
        del self._handed_out[:-1]

    def _record_fill(self, name: str, target: Tensor, value: float) -> None:
        region = rectangle(target, self._live[name])
        if region is None:
            return self._refuse(name, "the region that is filled is no rectangle")
        if target.numel():
            self._fills.append(TracedFill(name, region, float(value)))

    def _refuse(self, name: str, reason: str) -> None:
        self._refused.setdefault(name, (reason, []))[1].extend(self._handed_out)

    def result(self) -> Trace:
        """Return the trace, after the loader has finished."""
        written = [name for name in self._live if name in self._written_names]
        self._handed_out = []
        for name in written:
            tensor = self._live[name]
            for other in self._names_by_storage[_storage(tensor)]:
                if other != name:
                    self._refuse(name, f"it shares its storage with {other}")
            if tensor.dtype != self._dtype:
                self._refuse(name, f"its dtype is {tensor.dtype}, not {self._dtype}")
        for copy in self._copies:
            if copy.parameter in self._refused:
                self._refused[copy.parameter][1].append(copy.source)
        refused = {
            name: Refusal(reason, tuple(sorted(set(names))))
            for name, (reason, names) in self._refused.items()
        }
        return Trace(
            copies=[copy for copy in self._copies if copy.parameter not in refused],
            fills=[fill for fill in self._fills if fill.parameter not in refused],
            refused=refused,
            parameters={name: tuple(self._live[name].shape) for name in written},
        )


def rectangle(view: Tensor, whole: Tensor) -> Region | None:
    """Return the region of contiguous `whole` that `view` covers; None if it is no rectangle."""
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
