"""Advantages of on-policy distillation."""

import pytest
import torch

from hybridrl.algorithms import distillation_advantages

ADVANTAGES = torch.tensor([[1.0, -0.5], [0.25, 0.1]])
TEACHER = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
STUDENT = torch.tensor([[-1.5, -1.0], [-0.5, -0.25]])


def test_by_hand():
    """0.5 A + 2 (log q - log p)."""
    values = distillation_advantages(ADVANTAGES, TEACHER, STUDENT, reward_coef=0.5, coef=2.0)
    expected = torch.tensor([[0.5 + 1.0, -0.25 - 2.0], [0.125, 0.05 - 5.5]])
    torch.testing.assert_close(values, expected)


def test_a_teacher_equal_to_the_student_adds_exactly_nothing():
    values = distillation_advantages(ADVANTAGES, STUDENT, STUDENT, reward_coef=0.3, coef=7.0)
    assert torch.equal(values, 0.3 * ADVANTAGES)


def test_bfloat16_log_probs_are_subtracted_in_float32():
    one, other = torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.0078125]).bfloat16()
    values = distillation_advantages(torch.zeros(1), one, other, reward_coef=0.0, coef=1.0)
    assert values.dtype == torch.float32 and values.tolist() == [0.0078125]


def test_expected_gradient_is_that_of_the_reverse_kl():
    """Over all tokens, weighted with p: sum p A grad log p = -grad KL(p||q)."""
    logits = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    log_q = torch.tensor([1.0, 0.5, -0.5], dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    advantages = distillation_advantages(
        torch.zeros(3).double(), log_q, log_p.detach(), reward_coef=1.0, coef=1.0
    )
    (sampled,) = torch.autograd.grad((log_p.exp().detach() * advantages * log_p).sum(), logits)
    log_p = logits.log_softmax(0)
    (of_kl,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits)
    torch.testing.assert_close(sampled, -of_kl)


@pytest.mark.parametrize("coefs", [(-1.0, 1.0), (1.0, float("nan"))])
def test_weights_are_finite_and_not_negative(coefs):
    with pytest.raises(ValueError, match="finite coef >= 0"):
        distillation_advantages(ADVANTAGES, TEACHER, STUDENT, reward_coef=coefs[0], coef=coefs[1])
