"""WSAM: its special cases, known curvature, statistics that stay."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dlrover.errors import ConfigurationError  # noqa: E402
from dlrover.optim import AGD, WSAM, GroupAdam  # noqa: E402

pytestmark = pytest.mark.torch

RHO = 0.1


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def closure_of(model, optimizer, inputs):
    def closure():
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.prod(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    return closure


def batches(count=5):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 6, generator=generator) for _ in range(count)]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sam(model, base, inputs):
    """A step of SAM (Foret et al. 2021): ascend by rho along the gradient, take the gradient there."""
    closure_of(model, base, inputs)()
    values = list(model.parameters())
    before = [value.detach().clone() for value in values]
    norm = torch.stack([value.grad.norm() for value in values]).norm()
    with torch.no_grad():
        for value in values:
            value.add_(value.grad * (RHO / (norm + 1e-12)))
    closure_of(model, base, inputs)()
    with torch.no_grad():
        for value, old in zip(values, before, strict=True):
            value.copy_(old)
    base.step()


@pytest.mark.parametrize("base", [sgd, adam])
def test_with_gamma_one_half_it_is_sam_to_the_bit(base) -> None:
    model, other = network(), network()
    optimizer = WSAM(model, base(model), RHO, 0.5, decouple=False)
    other_base = base(other)
    for inputs in batches():
        optimizer.step(closure_of(model, optimizer, inputs))
        sam(other, other_base, inputs)
        assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("decouple", [True, False])
def test_with_gamma_zero_it_is_the_base_optimizer(decouple) -> None:
    model, other = network(), network()
    optimizer = WSAM(model, sgd(model), RHO, 0.0, decouple=decouple)
    base = sgd(other)
    for inputs in batches():
        optimizer.step(closure_of(model, optimizer, inputs))
        base.step(closure_of(other, base, inputs))
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("decouple", [False, True])
def test_on_a_quadratic_the_step_is_known(decouple, adaptive) -> None:
    hessian = torch.diag(torch.tensor([1.0, 5.0, 20.0], dtype=torch.float64))
    place = nn.ParameterList([nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))])
    before = place[0].detach().clone()
    optimizer = WSAM(
        place, torch.optim.SGD(place, lr=0.01), RHO, 0.8, decouple=decouple, adaptive=adaptive
    )

    def closure():
        optimizer.zero_grad()
        loss = place[0] @ hessian @ place[0] / 2
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    gradient = hessian @ before
    away = RHO * gradient / gradient.norm()
    if adaptive:
        away = RHO * before**2 * gradient / (before * gradient).norm()
    assert loss.item() == pytest.approx((before @ gradient / 2).item())
    expected = before - 0.01 * (
        gradient + 4 * hessian @ away
    )  # 0.8 / 0.2 times the change, either way
    torch.testing.assert_close(place[0].detach(), expected, rtol=1e-12, atol=1e-12)


def test_running_statistics_are_those_of_the_first_pass() -> None:
    model, other = network(), network()
    (inputs,) = batches(1)
    optimizer = WSAM(model, sgd(model), RHO)
    optimizer.step(closure_of(model, optimizer, inputs))
    other(inputs)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(model[1], name), getattr(other[1], name))
    assert model[1].track_running_stats


def test_it_leaves_the_gradient_of_the_base_step_and_takes_a_schedule() -> None:
    model = network()
    optimizer = WSAM(model, sgd(model), RHO, max_norm=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = [each.detach().clone() for each in model.parameters()]
    for inputs in batches(2):
        optimizer.step(closure_of(model, optimizer, inputs))
        schedule.step()
    assert optimizer.base.param_groups[0]["lr"] == 0.0125
    moved = sum((a - b).norm() ** 2 for a, b in zip(model.parameters(), before, strict=True))
    assert 0 < moved.sqrt() < 0.05 * 1e-3 * 50  # clipped gradients, twice, with weights of 9


@pytest.mark.parametrize("base", [sgd, adam, lambda model: AGD(model.parameters())])
def test_a_training_continues_from_its_state(base) -> None:
    model = network()
    optimizer = WSAM(model, base(model), RHO)
    some = batches(4)
    for inputs in some[:2]:
        optimizer.step(closure_of(model, optimizer, inputs))
    other = copy.deepcopy(model)
    resumed = WSAM(other, base(other), RHO)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for inputs in some[2:]:
        optimizer.step(closure_of(model, optimizer, inputs))
        resumed.step(closure_of(other, resumed, inputs))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rho": -0.1}, "rho is -0.1; it must be 0 or more."),
        ({"gamma": 1.0}, "gamma is 1.0; it must be from 0 to below 1."),
        ({"max_norm": 0.0}, "max_norm is 0.0; it must be more than 0, or None."),
    ],
)
def test_an_option_out_of_its_range_is_named(options, message) -> None:
    model = network()
    with pytest.raises(ConfigurationError) as caught:
        WSAM(model, sgd(model), **options)
    assert str(caught.value) == message


def test_a_step_without_closure_is_refused() -> None:
    model = network()
    with pytest.raises(ConfigurationError, match=r"^WSAM.step got no closure; it needs one"):
        WSAM(model, sgd(model)).step()


def test_a_second_pass_that_fails_leaves_the_parameters_where_they_were() -> None:
    """The program may catch the error and go on with the next batch, or save."""
    model = network()
    optimizer = WSAM(model, sgd(model))
    before = copy.deepcopy(model.state_dict())
    closure, calls = closure_of(model, optimizer, batches(1)[0]), []

    def failing():
        calls.append(closure())
        if len(calls) == 2:
            raise MemoryError
        return calls[0]

    with pytest.raises(MemoryError):
        optimizer.step(failing)
    after = dict(model.named_parameters())
    assert len(calls) == 2
    assert all(torch.equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize("decouple", [True, False])
def test_a_parameter_that_the_second_pass_does_not_use_has_the_gradient_zero_there(
    decouple,
) -> None:
    used, skipped = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    holder = nn.ParameterList([used, skipped])
    base = torch.optim.SGD(holder.parameters(), lr=0.5)
    optimizer, passes = WSAM(holder, base, RHO, 0.5, decouple=decouple), []

    def closure():
        optimizer.zero_grad()
        loss = used.sum() if passes else used.sum() + skipped.sum()
        passes.append(loss)
        loss.backward()
        return loss

    optimizer.step(closure)
    # a = 1: decoupled w - lr g - lr (0 - g), coupled w - lr 0
    torch.testing.assert_close(skipped.detach(), torch.ones(3))
    torch.testing.assert_close(used.detach(), torch.full((3,), 0.5))


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e-6, 0.0])
def test_small_gradients_of_float16_are_no_division_by_zero(size, adaptive) -> None:
    """In float16, the norm of a gradient below 6e-8 is 0, and rho divided by one of 1e-6 is infinite."""
    start = torch.tensor([1.0, -2.0, 0.5])
    hessian = size * torch.tensor([1.0, 3.0, 2.0])
    place = nn.ParameterList([nn.Parameter(start.half())])
    optimizer = WSAM(place, torch.optim.SGD(place, lr=0.05), RHO, 0.8, adaptive=adaptive)

    def closure():
        place[0].grad = (hessian * place[0].detach().float()).half()

    optimizer.step(closure)
    gradient = (hessian * start).half().float()
    away = gradient * start**2 if adaptive else gradient
    norm = (gradient * start).norm() if adaptive else gradient.norm()
    there = hessian * (start + RHO * away / (norm + 1e-12))
    expected = start - 0.05 * gradient - 0.05 * 4 * (there - gradient)
    torch.testing.assert_close(place[0].detach().float(), expected, rtol=2e-3, atol=0)


def test_group_lasso_is_refused_where_its_next_step_would_undo_this_one() -> None:
    model = network()
    with pytest.raises(
        ConfigurationError, match=r"^decouple is True with GroupAdam, whose next step undoes"
    ):
        WSAM(model, GroupAdam(model.parameters()))
    WSAM(model, GroupAdam(model.parameters()), decouple=False)


def test_a_deep_copy_trains_on_as_the_original() -> None:
    """As a copy of one of PyTorch's optimizers does, also with a schedule."""
    model = network()
    optimizer = WSAM(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=RHO)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for inputs in batches(3):
        optimizer.step(closure_of(model, optimizer, inputs))
        schedule.step()
    other, copied = copy.deepcopy((model, optimizer))
    before = copy.deepcopy(model.state_dict())
    for inputs in batches(2):
        copied.step(closure_of(other, copied, inputs))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    for inputs in batches(2):
        optimizer.step(closure_of(model, optimizer, inputs))
    values = other.state_dict()
    assert all(torch.equal(values[key], value) for key, value in model.state_dict().items())
