"""Policy losses do not depend on the order of responses and tokens, nor on responses' numbers."""

import pytest
import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses import gspo
from hybridrl.algorithms.token_loss import aggregate
from hybridrl.config.choices import Aggregation
from hybridrl.data.batch import Totals
from tests.support.policy_loss_references import LENGTHS, LOSSES, arguments

SIZE = sum(LENGTHS)
SEQUENCE = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
EVERY_LOSS = pytest.mark.parametrize("name", LOSSES)


def loss_and_gradient(
    name: str, order: Tensor, numbers: Tensor, kind: Aggregation
) -> tuple[Tensor, Tensor]:
    """Of the tokens in this order, their responses numbered anew; the gradient in the old one."""
    log_probs, *rest = arguments(name)
    log_probs.requires_grad_()
    sequence = numbers[SEQUENCE][order]
    taken = [tensor[order] for tensor in (log_probs, *rest)]
    if name == "gspo":
        taken[4] = sequence
    mask = taken[3]
    totals = Totals(int(mask.sum()), len(sequence[mask].unique()))
    loss = aggregate(kind, LOSSES[name][0](*taken).values, mask, sequence, totals, 16)
    return loss.detach(), torch.autograd.grad(loss, log_probs)[0]


@EVERY_LOSS
@pytest.mark.parametrize("kind", list(Aggregation))
@pytest.mark.parametrize("tokens_mixed", [False, True])
def test_neither_order_nor_numbers_of_responses_matter(name, kind, tokens_mixed):
    """With tokens mixed, the tokens of a response do not stand together."""
    generator = torch.Generator().manual_seed(0)
    responses = torch.randperm(len(LENGTHS), generator=generator)
    places = torch.arange(SIZE).split(LENGTHS)
    order = torch.cat([places[i] for i in responses])
    if tokens_mixed:
        order = torch.randperm(SIZE, generator=generator)
        assert (SEQUENCE[order].diff() < 0).any()
    # Numbers with gaps between them, as after responses without tokens.
    numbers = torch.tensor([9, 0, 4, 2, 24])
    plain = loss_and_gradient(name, torch.arange(SIZE), torch.arange(len(LENGTHS)), kind)
    found = loss_and_gradient(name, order, numbers, kind)
    assert plain[0] != 0 and plain[1].any()
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("number", [SIZE, -1])
def test_a_response_number_that_is_none_is_refused(number):
    *taken, sequence = arguments("gspo")
    sequence[3] = number
    with pytest.raises(IndexError):
        gspo(*taken, sequence, clip_low=0.2, clip_high=0.3)


@pytest.mark.parametrize("kind", list(Aggregation))
def test_gspo_gradcheck_strictly_inside_its_clip(kind):
    """With one advantage per response the stopped gradients are those of the value itself."""
    log_probs, old, advantages, mask, sequence = arguments("gspo")
    advantages = advantages[: len(LENGTHS)][sequence]
    log_probs = old + 0.1 * (log_probs - old).tanh()
    totals = Totals(int(mask.sum()), len(sequence[mask].unique()))

    def loss(x: Tensor) -> Tensor:
        values, sums = gspo(x, old, advantages, mask, sequence, clip_low=0.2, clip_high=0.3)
        assert sums["clip_fraction"] == 0
        return aggregate(kind, values, mask, sequence, totals, 16)

    assert torch.autograd.gradcheck(loss, (log_probs.requires_grad_(),), eps=1e-7)
