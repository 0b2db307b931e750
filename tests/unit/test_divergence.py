"""Divergences over the vocabulary: values, gradients, equality to the bit, memory."""

import math
from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hybridrl.config.choices import Divergence, TopOf
from hybridrl.distributed.forward.divergence import divergence
from tests.support.allocations import Allocations

TOKENS, HIDDEN, TEACHER_HIDDEN, VOCAB = 11, 8, 5, 61
KINDS = list(Divergence)
REVERSE, FORWARD, JSD = KINDS
# None, or k and of whom.
TOPS = [None, *product((1, 6, VOCAB - 1), TopOf)]


def compute(hidden, weight, teacher_hidden, teacher_weight, kind, top=None, **others):
    top_k, top_of = (None, TopOf.teacher) if top is None else top
    defaults = {"beta": 0.3, "vocab": len(weight), "temperature": 1.0, "chunk_tokens": 4}
    how = {"kind": kind, "top_k": top_k, "top_of": top_of, **defaults, **others}
    return divergence(hidden, weight, teacher_hidden, teacher_weight, **how)


def of_logits(x, y, kind, top=None, **others):
    """D of distributions whose logits are given, [R, N]."""
    return compute(x, torch.eye(x.shape[1]), y, torch.eye(x.shape[1]), kind, top, **others)


def models(dtype=torch.float32, rows=VOCAB, teacher_rows=VOCAB):
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, HIDDEN), (rows, HIDDEN), (TOKENS, TEACHER_HIDDEN), (teacher_rows, 5)
    tensors = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    return [*(tensor.requires_grad_() for tensor in tensors[:2]), *tensors[2:]]


def reference(tensors, kind, top, beta, vocab, temperature, cap=None, teacher_cap=None):
    """The definition in float64, differentiated by autograd."""

    def log_softmax(states, weight, cap):
        logits = states @ weight[:vocab].T
        logits = logits if cap is None else cap * (logits / cap).tanh()
        return (logits / temperature).log_softmax(-1)

    hidden, weight, teacher_hidden, teacher_weight = tensors
    log_p = log_softmax(hidden, weight, cap)
    p, q = log_p.exp(), log_softmax(teacher_hidden, teacher_weight, teacher_cap).exp()
    if top is not None:
        k, of = top
        chosen = torch.zeros_like(p, dtype=torch.bool)
        chosen.scatter_(-1, (p if of is TopOf.student else q).topk(k).indices, True)
        p, q = (
            torch.cat([x[chosen].view(-1, k), (x * ~chosen).sum(-1, keepdim=True)], -1)
            for x in (p, q)
        )

    def kl(a, b):
        return (a * (a / b).log()).sum(-1)

    mixture = beta * q + (1 - beta) * p
    return {
        REVERSE: lambda: kl(p, q),
        FORWARD: lambda: kl(q, p),
        JSD: lambda: beta * kl(q, mixture) + (1 - beta) * kl(p, mixture),
    }[kind]()


def with_gradients(values, tensors):
    (values * torch.linspace(-1, 2, TOKENS).to(values.dtype)).sum().backward()
    return values.detach(), tensors[0].grad, tensors[1].grad


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_of_the_definition(kind, top):
    sizes = {"vocab": VOCAB - 1, "beta": 0.3}
    top = None if top is None else (min(top[0], VOCAB - 2), top[1])
    for temperature, caps, chunk_tokens in (
        (1.0, (None, None), 4),
        (0.7, (6.0, 9.0), 1),
        (1.6, (None, 7.0), 100),
    ):
        how = {**sizes, "temperature": temperature, "cap": caps[0], "teacher_cap": caps[1]}
        own = models(teacher_rows=VOCAB + 3)
        exact = [x.detach().double().requires_grad_() for x in own]
        results = with_gradients(compute(*own, kind, top, chunk_tokens=chunk_tokens, **how), own)
        expected = with_gradients(reference(exact, kind, top, **how), exact)
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-6)
        assert not own[1].grad[VOCAB - 1 :].any()  # a row of padding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_models_have_loss_and_gradient_of_exactly_zero(kind, dtype):
    for top in TOPS:
        for temperature, cap in ((1.0, None), (0.7, 2.0), (0.01, None)):
            own = models(dtype, teacher_rows=1)[:2]
            padding = torch.ones(7, HIDDEN, dtype=dtype)
            teacher = own[0].detach().clone(), torch.cat([own[1].detach(), padding])
            how = {"temperature": temperature, "cap": cap, "teacher_cap": cap, "vocab": VOCAB}
            values = compute(*own, *teacher, kind, top, **how)
            assert values.dtype == torch.float32 and values.tolist() == [0.0] * TOKENS
            _, of_hidden, of_weight = with_gradients(values, own)
            assert not of_hidden.any() and not of_weight.any()


@pytest.mark.parametrize("top", [None, (6, TopOf.teacher)])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_one_rounding_of_logits_away(kind, top):
    own = models(torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in own]
    results = with_gradients(compute(*own, kind, top), own)
    how = {"beta": 0.3, "vocab": VOCAB, "temperature": 1.0}
    expected = with_gradients(reference(exact, kind, top, **how), exact)
    for one, other in zip(results, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 2**-6


def test_two_tokens_have_closed_forms():
    """p = (a, 1 - a), q = (b, 1 - b)."""
    a, b, beta = 0.9, 0.2, 0.25
    m = beta * b + (1 - beta) * a

    def kl(a, b):
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    x, y = (torch.tensor([[math.log(c), math.log(1 - c)]]) for c in (a, b))
    expected = {REVERSE: kl(a, b), FORWARD: kl(b, a), JSD: beta * kl(b, m) + (1 - beta) * kl(a, m)}
    for kind, value in expected.items():
        for top in (None, (1, TopOf.student), (1, TopOf.teacher)):
            value_found = of_logits(x, y, kind, top, beta=beta)
            assert float(value_found) == pytest.approx(value, rel=1e-6)


def test_jensen_shannon_is_symmetric_and_at_most_log_2():
    own, _, _, _ = models()
    x, y = own.detach(), own.detach().flip(0)
    one, other = (of_logits(*pair, JSD, beta=0.5) for pair in ((x, y), (y, x)))
    torch.testing.assert_close(one, other)
    assert (one >= 0).all() and (one < math.log(2)).all()
    # Distributions without a common token, beyond float32's exp.
    far = torch.tensor([[500.0, 0.0], [0.0, 500.0]])
    far.requires_grad_()
    values = of_logits(far, far.detach().flip(0), JSD, beta=0.5)
    assert values.tolist() == pytest.approx([math.log(2)] * 2)
    values.sum().backward()
    assert far.grad.isfinite().all()
    for beta in (0.1, 0.8):  # the entropy of the choice of a model
        bound = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        values = of_logits(far.detach(), far.detach().flip(0), JSD, beta=beta)
        assert values.tolist() == pytest.approx([bound] * 2)


def test_jensen_shannon_tends_to_both_kls():
    tensors = [x.detach() / 2 for x in models()]
    small = 1e-3
    forward, reverse = compute(*tensors, FORWARD), compute(*tensors, REVERSE)
    to_forward = compute(*tensors, JSD, beta=small) / small
    to_reverse = compute(*tensors, JSD, beta=1 - small) / small
    for one, other in ((to_forward, forward), (to_reverse, reverse)):
        assert float((one - other).norm() / other.norm()) < 0.01
        assert (one < other).all()


@pytest.mark.parametrize("kind", KINDS)
def test_merged_tokens_hide_but_never_add(kind):
    tensors = models()
    whole = compute(*tensors, kind)
    by_k = [compute(*tensors, kind, (k, TopOf.teacher)) for k in (1, 6, 30, VOCAB - 1, VOCAB, 99)]
    for fewer, more in zip(by_k, [*by_k[1:], whole], strict=True):
        assert (fewer <= more + 1e-5).all()
    assert torch.equal(by_k[-1], whole) and torch.equal(by_k[-2], whole)


def test_unlikely_others_are_not_rounded_away():
    """The others' probabilities are 1e-9 and 1e-12: 1 - (1 - 1e-9) would be 0 in float32."""
    p, q = 1e-9, 1e-12
    x, y = (torch.tensor([[-math.log(c / 2), 0.0, 0.0]]) for c in (p, q))
    value = of_logits(x, y, REVERSE, (1, TopOf.teacher))
    assert float(value) == pytest.approx(p * math.log(p / q) - p + q, rel=1e-5)
    x.requires_grad_()
    of_logits(x, y, REVERSE, (1, TopOf.teacher)).backward()
    assert x.grad[0, 1:].tolist() == pytest.approx([p / 2 * math.log(p / q)] * 2, rel=1e-3)


# Logits of the numbers below: 2 sin(1.3 i + 0.7 j) and 2 cos(0.9 i - 0.5 j), 3 tokens, 7 ids.
ROW, COLUMN = torch.arange(3.0)[:, None], torch.arange(7.0)[None]
STUDENT = 2 * torch.sin(1.3 * ROW + 0.7 * COLUMN)
TEACHER = 2 * torch.cos(0.9 * ROW - 0.5 * COLUMN)


@pytest.mark.parametrize(
    ("beta", "temperature", "expected"),
    [
        (0.0, 1.0, [0.779145, 0.527448, 1.386034]),
        (0.0, 0.7, [1.416692, 0.906141, 2.489605]),
        (0.1, 1.0, [0.065031, 0.044793, 0.114445]),
        (0.1, 0.7, [0.110893, 0.072436, 0.183737]),
        (0.5, 1.0, [0.158709, 0.111031, 0.287501]),
        (0.9, 0.7, [0.097126, 0.059585, 0.179137]),
        (1.0, 1.0, [0.644312, 0.438317, 1.416161]),
        (1.0, 0.7, [1.134482, 0.67214, 2.387104]),
    ],
)
def test_numbers_of_trl(beta, temperature, expected):
    """GOLDTrainer.generalized_jsd_loss, TRL 1.0: in float64, summed over the vocabulary."""
    kind = {0.0: FORWARD, 1.0: REVERSE}.get(beta, JSD)
    values = of_logits(STUDENT, TEACHER, kind, beta=beta, temperature=temperature)
    assert values.tolist() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("kind", "whole", "of_top_3"),
    [
        (FORWARD, [0.779145, 0.527448, 1.386034], [0.609911, 0.320811, 0.376921]),
        (REVERSE, [0.644312, 0.438317, 1.416161], [0.540065, 0.27496, 0.38907]),
    ],
)
def test_numbers_of_nemo_rl(kind, whole, of_top_3):
    """DistillationLossFn of NeMo-RL: top 7 and top 3 of the teacher, zero_outside_topk=False.

    There both distributions are renormalised over the k. By the chain rule, D with the others as
    one token is the divergence of "one of the k or not", plus P(one of the k) times theirs.
    """
    assert of_logits(STUDENT, TEACHER, kind).tolist() == pytest.approx(whole, abs=2e-6)
    top = TEACHER.topk(3).indices
    of_k = [x.softmax(-1).gather(-1, top).sum(-1) for x in (STUDENT, TEACHER)]
    first, second = of_k if kind is REVERSE else reversed(of_k)
    binary = first * (first / second).log() + (1 - first) * ((1 - first) / (1 - second)).log()
    expected = binary + first * torch.tensor(of_top_3)
    torch.testing.assert_close(of_logits(STUDENT, TEACHER, kind, (3, TopOf.teacher)), expected)


@pytest.mark.parametrize("top", [None, (6, TopOf.student)])
def test_no_tokens(top):
    own = models()
    values = compute(own[0][:0], own[1], own[2][:0], own[3], REVERSE, top)
    assert values.shape == (0,)
    values.sum().backward()
    assert torch.equal(own[0].grad, torch.zeros(TOKENS, HIDDEN))
    assert torch.equal(own[1].grad, torch.zeros(VOCAB, HIDDEN))


@pytest.mark.parametrize("top", [None, (64, TopOf.teacher)])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_all_tokens_never_exist(kind, top):
    """4,096 tokens of 32,000 ids: memory is that of a chunk, and nothing of it is kept."""
    tokens, vocab, size, chunk_tokens = 4096, 32_000, 16, 128
    states, heads = 4 * tokens * size, 4 * vocab * size
    chunk = 4 * chunk_tokens * vocab
    with FakeTensorMode():
        shapes = [(tokens, size), (vocab, size)] * 2
        tensors = [
            torch.empty(shape, requires_grad=index < 2) for index, shape in enumerate(shapes)
        ]
        with Allocations() as allocations:
            allocations.ignore(*tensors)
            values = compute(*tensors, kind, top, chunk_tokens=chunk_tokens)
            assert allocations.now <= 4 * tokens
            assert allocations.peak < 6 * chunk
            allocations.peak = 0
            values.sum().backward()
        # Of the head's gradient: the total, and what is added to it.
        assert allocations.peak < 6 * chunk + states + 3 * heads
    assert 6 * chunk + states + 3 * heads < 4 * tokens * vocab / 4
