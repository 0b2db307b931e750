"""Tracing a loader: plain copies and fills are understood, the rest is gathered for it."""

import re

import pytest
import torch
from torch import nn

from hybridrl.distributed.experts import CheckpointTensor
from hybridrl.distributed.regions import Region, TracedCopy, TracedFill, rectangle
from hybridrl.reshard.plan import check_coverage
from hybridrl.rollout.loaded import LoadedWeights
from hybridrl.rollout.trace import trace_loader


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((4, 3), 7.0))
        self.b = nn.Parameter(torch.full((3,), 7.0))


SHAPES = {"x": (6, 3), "y": (3,), "z": (3, 4)}
SOURCES = [CheckpointTensor(name, shape, name) for name, shape in SHAPES.items()]


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
    assert trace.parameters == {"w": (4, 3), "b": (3,)}


COMPUTED = {
    "computed": (lambda model, x: model.w.data.copy_(x[:4] * 2), "computes"),
    "broadcast": (lambda model, x: model.w.data.copy_(x[0]), "broadcast"),
    "transposed": (lambda model, x: model.w.data[:3].copy_(x[:3].t()), "no rectangle"),
    "every other row": (lambda model, x: model.w.data[:3].copy_(x[::2]), "no rectangle"),
    "into a transpose": (lambda model, x: model.w.data[:3].t().copy_(x[:3]), "no rectangle"),
    "added": (lambda model, x: model.w.data.add_(1.0), "aten.add_"),
    "list of tensors": (lambda model, x: torch._foreach_add_([model.w.data], 1.0), "_foreach_add_"),
    "out": (lambda model, x: torch.mul(model.w.data, 2.0, out=model.w.data), "aten.mul.out"),
    "of itself": (lambda model, x: model.w.data.copy_(-model.w.exp()), "computes"),
    "changed first": (lambda model, x: model.w.data[2:].copy_(x.zero_()[2:4]), "has changed"),
    "a part of a copy": (lambda model, x: model.w.data[2:].copy_(x.clone()[:2]), "computes"),
    "a changed copy": (lambda model, x: model.w.data.copy_(x[:4].clone().neg_()), "computes"),
}


@pytest.mark.parametrize("how", COMPUTED)
def test_a_weight_with_which_the_loader_computes_is_gathered_for_it(how, caplog):
    """All of x, also the part that is copied; y stays a plain copy."""
    write, reason = COMPUTED[how]

    def load(model, name, tensor):
        if name == "x":
            model.w.data[:2].copy_(tensor[:2])
            write(model, tensor)
        if name == "y":
            model.b.data.copy_(tensor)

    with caplog.at_level("INFO"):
        trace = traced(load)
    assert re.search(f"parameter w .*{reason}", caplog.text)
    assert trace.copies == [
        TracedCopy("y", Region((0,), (3,)), "b", (0,)),
        TracedCopy("x", Region((0, 0), (6, 3)), "x (gathered)", (0, 0)),
    ]
    assert trace.parameters == {"b": (3,), "x (gathered)": (6, 3)}
    assert (trace.loaded, trace.computed) == ((SOURCES[0],), {"w"})
    assert not trace.dtypes, "the engine is float32, too"
    check_coverage(trace)


def test_all_that_hangs_together_is_loaded_together():
    """The loader computes with z; w has a part of x, and b another part of that."""

    def load(model, name, tensor):
        if name == "x":
            model.w.data[:2].copy_(tensor[:2])
            model.b.data.copy_(tensor[5])
        if name == "z":
            model.w.data[2:].copy_(tensor[:2, :3] + 1)

    trace = traced(load)
    assert trace.loaded == (SOURCES[0], SOURCES[2])
    assert trace.computed == {"w", "b"}
    assert trace.parameters == {"x (gathered)": (6, 3), "z (gathered)": (3, 4)}


def test_what_another_rank_loads_is_loaded_here():
    """Plain copies here, but the ranks of an engine plan for the same parameters."""
    model = Model()
    trace = trace_loader(model, load_into_b(model), SOURCES, torch.float32, lambda own: own | {"y"})
    assert (trace.computed, trace.loaded) == ({"b"}, (SOURCES[1],))


def test_a_loader_that_combines_tensors_gets_both():
    """It holds y back and writes when it has z."""
    held = []

    def write(model, name, tensor):
        if name == "y":
            held.append(tensor)
        if name == "z":
            model.w.data.copy_(torch.cat([held.pop()[None], tensor[:, :3]]))

    assert traced(write).loaded == tuple(SOURCES[1:])


def test_a_write_from_no_source_is_refused_by_name():
    def write(model, name, tensor):
        if name == "x":
            model.w.data.mul_(2)

    with pytest.raises(RuntimeError, match=r"parameter w is written by aten\.mul_"):
        traced(write)


def test_a_transposed_source_is_a_rectangle():
    """The trainer holds [out, in], the checkpoint [in, out], which the loader turns back."""
    model = Model()
    source = CheckpointTensor("t", (3, 6), "t", transposed=True)
    assert source.held_shape == (6, 3)

    def load(weights):
        for _, tensor in weights:
            assert tensor.shape == (3, 6)
            model.w.data.copy_(tensor.t().contiguous()[2:])

    trace = trace_loader(model, load, [source], torch.float32)
    assert trace.copies == [TracedCopy("t", Region((2, 0), (4, 3)), "w", (0, 0))]


def test_a_part_that_is_made_contiguous_is_a_rectangle():
    """As gpt-oss's loader does with the columns of a tensor-parallel rank."""
    model = Model()
    source = CheckpointTensor("t", (3, 6), "t", transposed=True)

    def load(weights):
        for _, tensor in weights:
            model.w.data[:, :2].copy_(tensor[1:, 2:].t().contiguous())

    trace = trace_loader(model, load, [source], torch.float32)
    assert trace.copies == [TracedCopy("t", Region((2, 1), (4, 2)), "w", (0, 0))]


def test_vllm_loads_gathered_weights_again(caplog):
    """Here b = -exp(y): the reshard writes y, and the loader b."""
    model = Model()
    model.load_weights = lambda weights: [
        model.b.data.copy_(tensor).copy_(-model.b.exp()) for name, tensor in weights if name == "y"
    ]
    trace = trace_loader(model, model.load_weights, SOURCES, torch.float32)
    with caplog.at_level("INFO"):
        loaded = LoadedWeights(model, trace)
    assert "1 weights (0.0 MiB) are gathered for vLLM's loader" in caplog.text
    loaded.tensors["y (gathered)"].copy_(torch.arange(3.0))
    loaded.load()
    assert torch.equal(model.b.data, -torch.arange(3.0).exp())


def test_a_loader_that_leaves_a_part_as_it_was_is_refused():
    model = Model()
    model.load_weights = lambda weights: [
        model.b.data[:2].copy_(tensor[:2] * 2) for name, tensor in weights if name == "y"
    ]
    trace = trace_loader(model, model.load_weights, SOURCES, torch.float32)
    with pytest.raises(RuntimeError, match=r"loads y by .* leaves a part of b as it was"):
        LoadedWeights(model, trace)


def test_a_persistent_buffer_must_be_written_as_vllm_starts_it_with_random_numbers():
    model = Model()
    model.register_buffer("factor", torch.ones(2))
    model.register_buffer("_scale", torch.ones(2))  # of a quantised KV cache
    model.register_buffer("cache", torch.ones(2), persistent=False)

    def load(weights):
        for name, tensor in weights:
            if name == "x":
                model.w.data.copy_(tensor[:4])
            elif name == "y":
                model.b.data.copy_(tensor)

    trace = trace_loader(model, load, SOURCES, torch.float32)
    with pytest.raises(ValueError, match=r":\n  factor: 0 of 2 elements$"):
        check_coverage(trace)


def load_into_b(model):
    """A loader that copies y into b alone."""
    return lambda weights: [model.b.data.copy_(t) for name, t in weights if name == "y"]


def test_a_parameter_of_float32_gets_it_unrounded():
    model = Model()
    model.w.data = model.w.data.bfloat16()
    trace = trace_loader(model, load_into_b(model), SOURCES, torch.bfloat16)
    assert trace.copies == [TracedCopy("y", Region((0,), (3,)), "b", (0,))]
    assert trace.dtypes == {"b": torch.float32}


def test_a_parameter_of_a_third_dtype_is_loaded():
    model = Model()
    model.b.data = model.b.data.double()
    trace = trace_loader(model, load_into_b(model), SOURCES, torch.bfloat16)
    assert (trace.computed, trace.loaded) == ({"b"}, (SOURCES[1],))
    assert trace.dtypes == dict.fromkeys(("w", "y (gathered)"), torch.float32)


def test_views_of_a_written_parameter_need_no_write_of_their_own():
    """As MLA's absorbed weights are of the projection: any strides, within its storage."""
    model = Model()
    model.view = nn.Parameter(model.b.data.as_strided((2, 2), (1, 1)), requires_grad=False)
    model.register_buffer("alias", model.b.data.view(3, 1))
    trace = trace_loader(model, load_into_b(model), SOURCES, torch.float32)
    assert trace.parameters == {"w": (4, 3), "b": (3,)}


def test_views_of_what_the_loader_leaves_alone_are_not_covered():
    model = Model()
    model.view = nn.Parameter(model.w.data[1:], requires_grad=False)
    trace = trace_loader(model, load_into_b(model), SOURCES, torch.float32)
    with pytest.raises(ValueError, match=r"w: 0 of 12 elements\n  view: 0 of 9 elements$"):
        check_coverage(trace)


def test_a_parameter_whose_memory_another_exceeds_is_refused():
    """Of two halves that overlap, neither has all of the other."""
    model, whole = Model(), torch.zeros(5)
    model.b.data = whole[:3]
    model.register_buffer("other", whole[2:])
    with pytest.raises(RuntimeError, match=r"parameter b shares its storage with \['other'\]"):
        trace_loader(model, load_into_b(model), SOURCES, torch.float32)


def test_a_buffer_is_a_parameter_where_the_loader_writes_it():
    """Not one that is left alone."""
    model = Model()
    model.register_buffer("scale", torch.full((3,), 7.0))
    model.register_buffer("rotary", torch.full((2,), 7.0, dtype=torch.float64), persistent=False)

    def load(weights):
        for name, tensor in weights:
            if name == "y":
                model.scale.copy_(tensor)

    trace = trace_loader(model, load, SOURCES, torch.float32)
    assert all((buffer == 7).all() for buffer in model.buffers())
    assert trace.copies == [TracedCopy("y", Region((0,), (3,)), "scale", (0,))]
    assert trace.parameters == {"w": (4, 3), "b": (3,), "scale": (3,)}


def test_a_buffer_that_cannot_be_copied_into_is_refused_by_name():
    model = Model()
    model.register_buffer("scale", torch.tensor(7.0))

    def load(weights):
        for name, _ in weights:
            if name == "y":
                model.scale.fill_(1.0).mul_(2.0)

    with pytest.raises(RuntimeError, match=r"parameter scale is written by aten\.mul_"):
        trace_loader(model, load, SOURCES, torch.float32)
    assert model.scale == 7


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


def test_an_expert_of_a_checkpoint_is_a_region_of_both_parameters():
    """Rows 2 and 3 of the up projection of expert 1: index 3 of gate and up, in turn."""
    model = nn.Module()
    model.w13 = nn.Parameter(torch.zeros(2, 4, 3))
    source = CheckpointTensor("experts.1.up.weight", (4, 3), "gate_up", at=(3,))

    def load(weights):
        (tensor,) = (tensor for _, tensor in weights)
        model.w13.data[1].narrow(0, 2, 2).copy_(tensor.narrow(0, 2, 2))

    trace = trace_loader(model, load, [source], torch.float32)
    region = Region((3, 2, 0), (1, 2, 3))
    assert trace.copies == [TracedCopy("gate_up", region, "w13", (1, 2, 0))]
