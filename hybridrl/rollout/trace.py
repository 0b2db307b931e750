"""Trace of a model's `load_weights`, recorded while it loads tensors without data.

The loader gets meta tensors under the checkpoint's names. Every copy into a parameter is recorded
and skipped, so no parameter changes and no memory is needed. Slices, chunks and views of a meta
tensor keep its storage and offset, so no knowledge of layouts is needed. Where the loader computes,
its sources are followed instead: they are gathered for it (rollout/loaded.py).

A buffer that the loader writes counts as a parameter. So does a persistent one, which vLLM starts
with random numbers: if the loader does not write it, the plan's check of coverage names it. Other
buffers (rotary caches) are computed at the engine's start, and vLLM keeps them through every sleep.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hybridrl.distributed.experts import CheckpointTensor, parameter_shapes
from hybridrl.distributed.regions import (
    Region,
    Trace,
    TracedCopy,
    TracedFill,
    contains,
    gathered,
    rectangle,
)
from hybridrl.distributed.torch_compat import (
    TorchDispatchMode,
    operator_schema,
    storage_id,
    tree_leaves,
)

logger = logging.getLogger(__name__)

_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


def trace_loader(
    model: nn.Module,
    load: Callable[[Iterable[tuple[str, Tensor]]], Any],
    sources: Sequence[CheckpointTensor],
    dtype: torch.dtype,
    of_all_ranks: Callable[[set[str]], set[str]] = set,
) -> Trace:
    """Run `load` on tensors without data and return its writes, by the trainer's parameters.

    Args:
        model: model of the loader. Values of its parameters and buffers are not read or written.
        load: loader of (name, tensor) pairs; vLLM's `model.load_weights`.
        sources: the checkpoint's tensors, each a part of a parameter of the trainer.
        dtype: dtype of the moved data and thus of the parameters that are written, but for those
            of float32.
        of_all_ranks: returns the union of sets over the engine's ranks, whose loaders may differ.

    Raises:
        RuntimeError: the loader writes a parameter from no source, or memory that others share.
    """
    tracer = _Tracer(model, dtype)
    before = places(model)
    with torch.no_grad(), tracer:
        load(tracer.feed(sources))
    moved = dict(places(model).items() ^ before.items())
    assert not moved, f"the loader replaced the storage of {sorted(moved)}"
    return tracer.result(sources, of_all_ranks)


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
        # The largest first: the others may be its views.
        self._names_by_storage: dict[int, list[str]] = {}
        order = {n: (not t.is_contiguous(), -t.numel()) for n, t in self._live.items()}
        for name in sorted(self._live, key=order.__getitem__):
            self._names_by_storage.setdefault(_storage(self._live[name]), []).append(name)
        self._sources: dict[int, tuple[CheckpointTensor, Tensor]] = {}
        self._copies: list[TracedCopy] = []
        self._fills: list[TracedFill] = []
        # The trainer's parameters of computed values by storage, with a tensor that keeps it.
        self._origins: dict[int, tuple[Tensor, set[str]]] = {}
        # Whole copies of a source's views, which `contiguous` makes, by storage.
        self._clones: dict[int, Tensor] = {}
        self._changed: set[CheckpointTensor] = set()
        # Why a parameter is not only copied into; pairs of a trainer's parameter and an engine's.
        self._reasons: dict[str, str] = {}
        self._pairs: set[tuple[str, str]] = set()

    def feed(self, sources: Sequence[CheckpointTensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield meta tensors for the loader."""
        for source in sources:
            held = torch.empty(source.held_shape, dtype=self._dtype, device="meta")
            self._sources[_storage(held)] = (source, held)
            yield source.name, source.of(held)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record a write to a parameter; execute all other operators."""
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        targets = [t for t in written if _storage(t) in self._names_by_storage]
        if not targets:
            result = func(*args, **kwargs)
            self._note_origins((args, kwargs), written, result)
            if func is torch.ops.aten.clone.default and _storage(args[0]) in self._sources:
                self._clones[_storage(result)] = args[0]
            return result
        for target in targets:
            name = self._owner(target)
            reason = self._record(name, target, func, args)
            if reason is not None:
                self._reasons.setdefault(name, reason)
                self._pairs |= {(source, name) for source in self._read((args, kwargs))}
        return targets[0] if operator_schema(func).returns else None

    def _owner(self, target: Tensor) -> str:
        """Return the name of the parameter to which a written view belongs."""
        name, *others = self._names_by_storage[_storage(target)]
        beyond = [other for other in others if not contains(self._live[name], self._live[other])]
        if beyond:
            _refuse(name, f"shares its storage with {beyond}")
        return name

    def _record(self, name: str, target: Tensor, func: Any, args: tuple[Any, ...]) -> str | None:
        """Record a copy or fill of a rectangle; return why it is none."""
        region = rectangle(target, self._live[name])
        if region is None:
            return "is written in parts that are no rectangle"
        if target.dtype not in (self._dtype, torch.float32):
            return f"has dtype {target.dtype}, not {self._dtype}"
        if func is torch.ops.aten.copy_.default:
            return self._record_copy(name, region, args[1])
        if func not in _FILLS:
            return f"is written by {func}"
        if region.numel:
            value = args[1] if len(args) > 1 else 0.0
            self._fills.append(TracedFill(name, region, float(value)))
        return None

    def _record_copy(self, name: str, written: Region, value: Tensor) -> str | None:
        cloned = self._clones.get(_storage(value), value)
        if value.is_contiguous() and value.shape == cloned.shape:
            value = cloned
        if _storage(value) not in self._sources:
            return "gets values that the loader computes"
        source, held = self._sources[_storage(value)]
        region = rectangle(value, held)
        if region is not None:
            at = source.at
            region = Region(at + region.offset, (1,) * len(at) + region.shape)
        if region is None or region.shape != written.shape:
            return f"gets a part of {source.name} that is broadcast or no rectangle"
        if source in self._changed:
            return f"gets {source.name}, which the loader has changed"
        self._copies.append(TracedCopy(source.parameter, region, name, written.offset))
        return None

    def _read(self, values: Any) -> set[str]:
        """Return the trainer's parameters from which values come."""
        read: set[str] = set()
        for storage in map(_storage, _tensors(values)):
            if storage in self._sources:
                read.add(self._sources[storage][0].parameter)
            elif storage in self._origins:
                read |= self._origins[storage][1]
        return read

    def _note_origins(self, read: Any, written: Sequence[Tensor], result: Any) -> None:
        """Note sources that the loader changed, and what it computed from sources."""
        for storage in map(_storage, written):
            self._clones.pop(storage, None)
            if storage in self._sources:
                self._changed.add(self._sources[storage][0])
        if origins := self._read(read):
            for tensor in _tensors(result):
                self._origins[_storage(tensor)] = (tensor, origins)

    def result(
        self, sources: Sequence[CheckpointTensor], of_all_ranks: Callable[[set[str]], set[str]]
    ) -> Trace:
        """Return the trace, after the loader has finished."""
        self._pairs |= {(copy.source, copy.parameter) for copy in self._copies}
        known = {name for _, name in self._pairs}
        for name, reason in self._reasons.items():
            if name not in known:
                _refuse(name, reason)
            logger.info("vLLM's parameter %s %s: gathered for vLLM's loader", name, reason)
        loaded, computed = self._closure(of_all_ranks(self._closure(set())[0]))
        written = computed | {copy.parameter for copy in self._copies}
        written |= {fill.parameter for fill in self._fills}
        shared = self._names_by_storage.values()
        views = {view for first, *more in shared if first in written for view in more}
        names = (self._parameters | written) - computed - views
        copies = [copy for copy in self._copies if copy.parameter in names]
        fills = [fill for fill in self._fills if fill.parameter in names]
        shapes = {name: tuple(t.shape) for name, t in self._live.items() if name in names}
        dtypes = {name: self._live[name].dtype for name in shapes}
        for name, shape in parameter_shapes(sources).items():
            if name in loaded:
                whole, shapes[gathered(name)] = Region((0,) * len(shape), shape), shape
                copies.append(TracedCopy(name, whole, gathered(name), whole.offset))
                dtypes[gathered(name)] = torch.float32
        others = {name: dtype for name, dtype in dtypes.items() if dtype != self._dtype}
        again = tuple(source for source in sources if source.parameter in loaded)
        return Trace(copies, fills, shapes, others, {}, again, frozenset(computed))

    def _closure(self, loaded: set[str]) -> tuple[set[str], set[str]]:
        """Return all of the trainer's parameters that are loaded if these are, and the engine's.

        All sources of a parameter are loaded if one is, and to all parameters that have them.
        """
        loaded, computed = set(loaded), {*self._reasons}
        while more := {(a, b) for a, b in self._pairs if (a in loaded) != (b in computed)}:
            loaded |= {source for source, _ in more}
            computed |= {name for _, name in more}
        return loaded, computed


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator would write."""
    schema = operator_schema(func)
    if not schema.is_mutable:
        return []
    named = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
    writes = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    return _tensors([named.get(name) for name in writes])


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among arguments or results of an operator."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


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


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, meta tensors included."""
    return storage_id(tensor.untyped_storage())
