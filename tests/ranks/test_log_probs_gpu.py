"""The kernels of log-probs on a GPU against the formulas on CPU, and all of it in bfloat16."""

import pytest
import torch

from hybridrl.distributed.forward.log_probs import (
    Entropy,
    Rows,
    logits_gradient_,
    softmax_rows,
    token_log_probs,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# Neither is a multiple of a kernel's block.
TOKENS, VOCAB, HIDDEN, TEMPERATURE = 37, 9_001, 64, 0.7


def rows_of(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(TOKENS, VOCAB, generator=generator)).to(dtype)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return logits, targets, torch.randn(2, TOKENS, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_agree_with_the_formulas(dtype):
    logits, targets, _ = rows_of(dtype)
    x = logits.double() / TEMPERATURE
    log_p = x.log_softmax(-1)
    wanted = (
        log_p.gather(-1, targets[:, None])[:, 0],
        x.logsumexp(-1),
        -(log_p.exp() * log_p).sum(-1),
    )
    for place in ("cpu", "cuda"):
        found = softmax_rows(logits.to(place), targets.to(place), TEMPERATURE)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.cpu().double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_agree_with_the_formulas(with_entropy):
    logits, targets, (of_log_prob, of_entropy) = rows_of(torch.float32)
    rows = softmax_rows(logits, targets, TEMPERATURE)
    on_gpu = Rows(*(column.cuda() for column in rows))
    entropy = of_entropy if with_entropy else None
    found = logits_gradient_(
        logits.cuda(),
        targets.cuda(),
        on_gpu,
        of_log_prob.cuda(),
        None if entropy is None else entropy.cuda(),
        TEMPERATURE,
    )
    wanted = logits_gradient_(logits, targets, rows, of_log_prob, entropy, TEMPERATURE)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("chunk_tokens", [8, TOKENS])
def test_bfloat16_gradients_are_a_rounding_from_exact_ones(keep_logits, chunk_tokens):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().cuda()
    weight = (torch.randn(VOCAB, HIDDEN, generator=generator) / 8).bfloat16().cuda()
    _, targets, weights = rows_of(torch.float32)
    outcomes = []
    for dtype in (torch.bfloat16, torch.float64):
        states, head = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        if dtype is torch.bfloat16:
            log_probs, entropy, *_ = token_log_probs(
                states,
                targets.cuda(),
                head,
                temperature=TEMPERATURE,
                chunk_tokens=chunk_tokens,
                entropy=Entropy.differentiate,
                keep_logits=keep_logits,
            )
        else:
            log_p = (states @ head.T / TEMPERATURE).log_softmax(-1)
            log_probs = log_p.gather(-1, targets.cuda()[:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
        ((weights[0].cuda() * log_probs).sum() + (weights[1].cuda() * entropy).sum()).backward()
        outcomes.append([log_probs, entropy, states.grad, head.grad])
    for found, wanted in zip(*outcomes, strict=True):
        assert float((found.double() - wanted).norm() / wanted.norm()) < 0.01
