"""Group lasso: without it the optimizer itself, with it rows that are exactly zero."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dlrover.errors import ConfigurationError  # noqa: E402
from dlrover.optim import GroupAdagrad, GroupAdam  # noqa: E402

pytestmark = pytest.mark.torch


def gradients(shape, steps=30):
    generator = torch.Generator().manual_seed(steps)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(steps)]


def trained(optimizer, value, given, schedule=None):
    for gradient in given:
        value.grad = gradient.clone()
        optimizer.step()
        if schedule:
            schedule.step()
    return value.detach()


@pytest.mark.parametrize("shape", [(6, 4), (5,), (3, 2, 2, 2)])
@pytest.mark.parametrize("kind", ["adam", "adagrad"])
def test_without_regularization_it_is_the_optimizer(kind, shape) -> None:
    start = torch.randn(shape, dtype=torch.float64)
    one, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    if kind == "adam":
        ours, theirs = GroupAdam([one], lr=0.05), torch.optim.Adam([other], lr=0.05, foreach=False)
    else:
        ours = GroupAdagrad([one], lr=0.05)
        theirs = torch.optim.Adagrad([other], lr=0.05, initial_accumulator_value=0.1, foreach=False)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 10, 0.3) for each in (ours, theirs)]
    found = trained(ours, one, gradients(shape), schedules[0])
    expected = trained(theirs, other, gradients(shape), schedules[1])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_first_step_solves_its_problem() -> None:
    """By hand: the minimum of z x + Q x² / 2 + lr (l1 |x| + sqrt(d) l21 |x|₂ + l2 x²), found by its subgradient.

    That holds for a row with one Q.
    """
    value = nn.Parameter(torch.tensor([[0.4, -0.3], [1e-4, 0.0]], dtype=torch.float64))
    start = value.detach().clone()
    lr, options = 0.1, {"l1": 0.2, "l2": 0.3, "l21": 0.1}
    optimizer = GroupAdagrad([value], lr=lr, eps=0.0, **options)
    gradient = torch.tensor([[0.7, -0.7], [0.0, 0.0]], dtype=torch.float64)
    found = trained(optimizer, value, [gradient])
    divisor = (0.1 + gradient**2).sqrt()
    linear = lr * gradient - divisor * start
    assert torch.equal(found[1], torch.zeros(2, dtype=torch.float64))
    row = found[0]
    assert (row != 0).all()
    slope = linear[0] + divisor[0] * row + lr * (0.2 * row.sign() + 2**0.5 * 0.1 * row / row.norm() + 2 * 0.3 * row)  # fmt: skip
    torch.testing.assert_close(slope, torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [GroupAdam, GroupAdagrad])
def test_rows_that_contribute_nothing_become_zero_and_others_stay(kind) -> None:
    torch.manual_seed(0)
    inputs = 8 * torch.linalg.qr(torch.randn(64, 12)).Q
    targets = inputs[:, :3] @ torch.randn(3, 5)
    rows = nn.Parameter(0.1 * torch.randn(12, 5))  # a row per input
    optimizer = kind([rows], lr=0.05, l21=0.02 if kind is GroupAdam else 1.5)
    for _ in range(300):
        optimizer.zero_grad()
        (inputs @ rows - targets).square().mean().backward()
        optimizer.step()
    assert [bool(row.any()) for row in rows] == [True] * 3 + [False] * 9


@pytest.mark.parametrize("kind", [GroupAdam, GroupAdagrad])
def test_a_training_continues_from_its_state(kind) -> None:
    value = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    optimizer = kind([value], l1=0.1, l21=0.1)
    trained(optimizer, value, gradients((6, 4))[:5])
    other = copy.deepcopy(value)
    resumed = kind([other])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(
        trained(optimizer, value, gradients((6, 4))[5:]),
        trained(resumed, other, gradients((6, 4))[5:]),
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: GroupAdam(p, l21=-1.0), "l21 is -1.0; it must be 0 or more."),
        (lambda p: GroupAdam(p, eps=-1.0), "eps is -1.0; it must be 0 or more."),
        (lambda p: GroupAdagrad(p, lr=-1.0), "lr is -1.0; it must be 0 or more."),
        (
            lambda p: GroupAdagrad(p, initial_accumulator_value=0.0),
            "initial_accumulator_value is 0.0; it must be more than 0.",
        ),
    ],
)
def test_an_option_out_of_its_range_is_named(make, message) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make([nn.Parameter(torch.zeros(2))])
    assert str(caught.value) == message
