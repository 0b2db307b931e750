"""The learning rate by hand, for each schedule and warm-up."""

import pytest

from hybridrl.config.choices import LRSchedule
from hybridrl.config.schema import OptimConfig
from hybridrl.workers.training import learning_rate


def optim(schedule, warmup_steps=0, min_lr_ratio=0.0):
    return OptimConfig(
        lr=2.0,
        betas=[0.9, 0.999],
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        schedule=schedule,
        warmup_steps=warmup_steps,
        min_lr_ratio=min_lr_ratio,
    )


def course(config, total_steps):
    return [learning_rate(config, step, total_steps) for step in range(1, total_steps + 1)]


def test_constant():
    assert course(optim(LRSchedule.constant), 3) == [2.0, 2.0, 2.0]


def test_warm_up_rises_from_zero_and_its_last_step_has_the_peak():
    expected = pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert course(optim(LRSchedule.constant, warmup_steps=4), 5) == expected


def test_linear():
    assert course(optim(LRSchedule.linear), 4) == pytest.approx([2.0, 1.5, 1.0, 0.5])


def test_linear_to_a_floor_after_warm_up():
    # warm-up 1, 2; then down from 2 by (2 - 0.5) / 3 a step
    expected = pytest.approx([1.0, 2.0, 2.0, 1.5, 1.0])
    config = optim(LRSchedule.linear, warmup_steps=2, min_lr_ratio=0.25)
    assert course(config, 5) == expected
    assert learning_rate(config, 6, 5) == pytest.approx(0.5)


def test_cosine():
    # 2 * (1 + cos(pi * k / 4)) / 2, k = 0..3
    expected = pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5])
    assert course(optim(LRSchedule.cosine), 4) == expected


@pytest.mark.parametrize("schedule", list(LRSchedule))
def test_never_below_the_floor_after_the_end(schedule):
    config = optim(schedule, min_lr_ratio=0.1)
    expected = 2.0 if schedule is LRSchedule.constant else 0.2
    assert learning_rate(config, 50, 4) == pytest.approx(expected)


def test_warm_up_longer_than_the_run():
    assert course(optim(LRSchedule.cosine, warmup_steps=10), 2) == pytest.approx([0.2, 0.4])
