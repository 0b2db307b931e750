"""Tracing a loader: plain copies and fills are understood, the rest is refused by name."""

import pytest
import torch
from torch import nn

from hybridrl.distributed.regions import Region, TracedCopy, TracedFill
from hybridrl.rollout.trace import rectangle, trace_loader


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((4, 3), 7.0))
        self.b = nn.Parameter(torch.full((3,), 7.0))


SOURCES = [("x", (6, 3)), ("y", (3,)), ("z", (3, 4))]


def traced(write):
    """The trace of a loader that calls write(model, name, tensor) for every tensor."""
    model = Model()

    def load(weights):
        for name, tensor in weights:
            write(model, name, tensor)

    trace = trace_loader(model, load, SOURCES, torch.float32)
    assert (model.w == 7).all() and (model.b == 7).all(), "tracing wrote a parameter"
    return trace


def test_copies_and_fills_are_noted_as_rectangles():
    def write(model, name, tensor):
        if name == "x":
            model.w.data[1:3, :2].copy_(tensor.narrow(0, 4, 2)[:, 1:])
            model.w.data[3].unsqueeze(0).fill_(0)
            model.w.data[:1].zero_()
        if name == "y":
            model.b.data.copy_(tensor)

    trace = traced(write)
    assert trace.copies == [
        TracedCopy("x", Region((4, 1), (2, 2)), "w", (1, 0)),
        TracedCopy("y", Region((0,), (3,)), "b", (0,)),
    ]
    assert trace.fills == [
        TracedFill("w", Region((3, 0), (1, 3)), 0.0),
        TracedFill("w", Region((0, 0), (1, 3)), 0.0),
    ]
    assert trace.refused == {}
    assert trace.parameters == {"w": (4, 3), "b": (3,)}


REFUSED = {
    "computed": (lambda model, x: model.w.data.copy_(x[:4] * 2), "computes"),
    "broadcast": (lambda model, x: model.w.data.copy_(x[0]), "broadcast"),
    "transposed": (lambda model, x: model.w.data[:3].copy_(x[:3].t()), "no rectangle"),
    "every other row": (lambda model, x: model.w.data[:3].copy_(x[::2]), "no rectangle"),
    "into a transpose": (lambda model, x: model.w.data[:3].t().copy_(x[:3]), "no rectangle"),
    "added": (lambda model, x: model.w.data.add_(1.0), "aten.add_"),
    "list of tensors": (lambda model, x: torch._foreach_add_([model.w.data], 1.0), "_foreach_add_"),
    "out": (lambda model, x: torch.mul(model.w.data, 2.0, out=model.w.data), "aten.mul.out"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_other_writes_are_refused_by_name(how):
    write, reason = REFUSED[how]

    def load(model, name, tensor):
        if name == "x":
            model.w.data[:2].copy_(tensor[:2])  # a plain copy beside it must not be planned
            write(model, tensor)
        if name == "y":
            model.b.data.copy_(tensor)

    trace = traced(load)
    assert set(trace.refused) == {"w"}
    assert reason in trace.refused["w"].reason
    assert trace.refused["w"].sources == ("x",)
    assert [copy.parameter for copy in trace.copies] == ["b"]


def test_a_loader_that_combines_tensors_names_them_all():
    """It holds x back and writes when it has y; z came before, but was copied as it is."""
    held = []

    def write(model, name, tensor):
        if name == "x":
            model.b.data.copy_(tensor[0])
        if name == "y":
            held.append(tensor)
        if name == "z":
            model.w.data.copy_(torch.cat([held.pop()[None], tensor[:, :3]]))

    assert traced(write).refused["w"].sources == ("x", "y", "z")


def test_a_parameter_of_another_dtype_is_refused():
    model = Model()
    model.b.data = model.b.data.double()

    def load(weights):
        for name, tensor in weights:
            if name == "y":
                model.b.data.copy_(tensor)

    trace = trace_loader(model, load, SOURCES, torch.float32)
    assert trace.refused["b"].sources == ("y",)
    assert "float64" in trace.refused["b"].reason


def test_a_buffer_is_a_parameter_where_the_loader_writes_it():
    """Not one that is left alone; one that shares a written parameter's memory is refused."""
    model = Model()
    model.register_buffer("scale", torch.full((3,), 7.0))
    model.register_buffer("rotary", torch.full((2,), 7.0, dtype=torch.float64), persistent=False)
    model.register_buffer("alias", model.b.data.view(3, 1))

    def load(weights):
        for name, tensor in weights:
            if name == "y":
                model.scale.copy_(tensor)
                model.b.data.copy_(tensor)

    trace = trace_loader(model, load, SOURCES, torch.float32)
    assert all((buffer == 7).all() for buffer in model.buffers())
    assert trace.copies == [TracedCopy("y", Region((0,), (3,)), "scale", (0,))]
    assert trace.parameters == {"w": (4, 3), "b": (3,), "scale": (3,), "alias": (3, 1)}
    assert {name: refusal.sources for name, refusal in trace.refused.items()} == {
        "b": ("y",),
        "alias": (),
    }


def test_a_buffer_that_cannot_be_copied_into_is_refused_by_name():
    model = Model()
    model.register_buffer("scale", torch.tensor(7.0))

    def load(weights):
        for name, tensor in weights:
            if name == "y":
                model.scale.fill_(1.0).mul_(2.0)
                model.scale.copy_(tensor[0] * 2)

    trace = trace_loader(model, load, SOURCES, torch.float32)
    assert model.scale == 7
    assert trace.refused["scale"].sources == ("x", "y")
    assert "aten.mul_" in trace.refused["scale"].reason


def test_a_loader_that_replaces_a_buffer_is_named():
    model = Model()
    model.register_buffer("scale", torch.tensor(7.0))

    def load(weights):
        for _, tensor in weights:
            model.scale = tensor

    with pytest.raises(AssertionError, match=r"replaced the storage of \['scale'\]"):
        trace_loader(model, load, SOURCES, torch.float32)


def test_a_view_that_wraps_around_a_row_is_no_rectangle():
    whole = torch.zeros(4, 3)
    assert rectangle(whole.as_strided((2, 2), (3, 1), 4), whole) == Region((1, 1), (2, 2))
    assert rectangle(whole.as_strided((2, 2), (3, 1), 5), whole) is None
