"""AGD and AdamW: the formula, by every implementation; states in 32 and in 8 bits."""

from __future__ import annotations

import copy
import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402
from torch.utils._python_dispatch import return_and_correct_aliasing  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

from dlrover.errors import ConfigurationError  # noqa: E402
from dlrover.optim import (  # noqa: E402
    AGD,
    AdamW8bit,
    AGD8bit,
    codes,
    dense,
)
from dlrover.optim.adamw import AdamW  # noqa: E402

pytestmark = pytest.mark.torch

BETAS, LR = (0.9, 0.99), 1e-2


def agd(value, gradients, delta, decay=0.0, clip=math.inf, amsgrad=False):
    """The formula, as it is written in the paper."""
    mean = square = largest = last = torch.zeros_like(value)
    for step, gradient in enumerate(gradients, 1):
        first, second = 1 - BETAS[0] ** step, 1 - BETAS[1] ** step
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
        change = mean / first - last
        last = mean / first
        square = BETAS[1] * square + (1 - BETAS[1]) * change**2
        largest = torch.maximum(largest, square) if amsgrad else square
        root = torch.clamp(largest.sqrt(), min=delta * math.sqrt(second))
        quotient = (mean / root).clamp(-clip, clip) * math.sqrt(second) / first
        value = value * (1 - LR * decay) - LR * quotient
    return value


def gradients(shape, steps=40, dtype=torch.float64):
    generator = torch.Generator().manual_seed(steps)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for _ in range(steps)]  # fmt: skip


def trained(optimizer, values, given):
    for gradient in given:
        for value in values:
            value.grad = gradient.reshape(value.shape).clone()
        optimizer.step()
    return values[0].detach()


@pytest.mark.parametrize("delta", [1e-14, 0.05, 1e3])
@pytest.mark.parametrize("options", [{}, {"clip": 0.5}, {"amsgrad": True}])
def test_agd_is_its_formula(delta, options) -> None:
    start = torch.randn(30, 5, dtype=torch.float64)
    value = nn.Parameter(start.clone())
    given = gradients((30, 5))
    found = trained(AGD([value], LR, BETAS, delta, 0.1, **options), [value], given)
    torch.testing.assert_close(
        found, agd(start, given, delta, 0.1, **options), rtol=1e-12, atol=1e-12
    )


def test_with_a_large_delta_agd_is_momentum() -> None:
    start = torch.randn(8, dtype=torch.float64)
    value, other = nn.Parameter(start.clone()), start.clone()
    given, mean = gradients(8), torch.zeros(8, dtype=torch.float64)
    trained(AGD([value], LR, BETAS, delta=1e6), [value], given)
    for step, gradient in enumerate(given, 1):
        mean = 0.9 * mean + 0.1 * gradient
        other -= LR / 1e6 * mean / (1 - 0.9**step)
    torch.testing.assert_close(value.detach(), other, rtol=1e-14, atol=0)


@pytest.mark.slow
def test_agd_reaches_the_minimum_of_beales_function() -> None:
    place = nn.Parameter(torch.tensor([1.0, 1.5], dtype=torch.float64))
    optimizer = AGD([place], lr=1e-2, delta=1e-2)
    for _ in range(3000):
        x, y = place
        loss = (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(place.detach(), torch.tensor([3.0, 0.5], dtype=torch.float64), rtol=0, atol=1e-3)  # fmt: skip


@pytest.mark.parametrize("kind", [AGD, AdamW])
@pytest.mark.parametrize("bits", [8, 32])
def test_the_compiled_update_is_that_of_pytorch(kind, bits, monkeypatch) -> None:
    start = torch.randn(80, 70)
    given = gradients((80, 70), dtype=torch.float32)
    compiled, plain = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    found = trained(kind([compiled], LR, state_bits=bits), [compiled], given)
    monkeypatch.setenv("DLROVER_NATIVE", "off")
    other = kind([plain], LR, state_bits=bits)
    assert other._algorithm.native is None
    expected = trained(other, [plain], given)
    if bits == 32:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    else:  # a different last digit may be rounded to another code
        assert (found - expected).abs().mean() < 1e-3


def test_adamw_is_that_of_pytorch() -> None:
    start = torch.randn(30, 5, dtype=torch.float64)
    one, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    given = gradients((30, 5))
    found = trained(AdamW([one], LR, BETAS, 1e-6, 0.1), [one], given)
    expected = trained(
        torch.optim.AdamW([other], LR, BETAS, 1e-6, 0.1, foreach=False), [other], given
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("native", ["auto", "off"])
def test_small_updates_of_bfloat16_parameters_add_up(native, monkeypatch) -> None:
    monkeypatch.setenv("DLROVER_NATIVE", native)
    value = nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    optimizer = AdamW([value], lr=1e-4, weight_decay=0)
    other = nn.Parameter(value.detach().clone())
    twin = AdamW([other], lr=1e-4, weight_decay=0)
    for _ in range(20):  # each far below the distance of two bfloat16 numbers, 0.004
        value.grad, other.grad = torch.ones_like(value), torch.ones_like(value)
        optimizer.step()
        twin.step()
    assert value.float().mean().item() == pytest.approx(1 - 20e-4, abs=1e-4)
    assert torch.equal(value, other)  # so do replicas stay equal
    value.grad.fill_(math.inf)
    optimizer.step()
    assert value.isnan().all()


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("bits", [32, 8])
def test_the_draws_of_groups_and_of_parts_differ(native, bits, monkeypatch) -> None:
    """Small updates of equal numbers: with the same draws, the same ones of them would move."""
    monkeypatch.setenv("DLROVER_NATIVE", native)
    values = [nn.Parameter(torch.ones(300, 256, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = AdamW([{"params": [each]} for each in values], 1e-3, weight_decay=0, state_bits=bits)  # fmt: skip
    for value in values:
        value.grad = torch.ones_like(value)
    optimizer.step()
    parts = [part for value in values for part in value.detach().split(dense.CACHED // 256)]
    moved = [part[:44].ne(1) for part in parts]
    for number, one in enumerate(moved):
        assert one.float().mean().item() == pytest.approx(0.26, abs=0.03)
        for other in moved[:number]:
            assert (one & other).float().mean().item() == pytest.approx(0.26**2, abs=0.03)


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))


def losses(model, optimizer, steps=60):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(256, 64, generator=generator)
    targets = inputs[:, :8].sin().sum(1, keepdim=True)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "wide"), [(AGD8bit, AGD), (AdamW8bit, AdamW)])
def test_a_training_with_8_bits_comes_as_far(kind, wide) -> None:
    model, other = network(), network()
    optimizer = kind(model.parameters(), lr=3e-3)
    found = losses(model, optimizer)
    expected = losses(other, wide(other.parameters(), lr=3e-3))
    assert found[-1] < 0.2 * found[0]
    assert found[-1] == pytest.approx(expected[-1], rel=0.25)
    bytes_of = {
        number: sum(each.nbytes for each in entries.values())
        for number, entries in optimizer.state_dict()["state"].items()
    }
    assert bytes_of[0] == 4 + 2 * (64 * 256 + 4 * 256)  # rows of 64, a scale each
    assert bytes_of[1] == 4 + 8 * 256  # vectors stay in 32 bits


@pytest.mark.slow
def test_8_bits_do_not_stand_still() -> None:
    """Of 0.1 % smaller in each step, nothing would remain if codes were rounded to the nearest."""
    value = nn.Parameter(torch.zeros(64, 256))
    optimizer = AdamW8bit([value], betas=(0.9, 0.999))
    value.grad = torch.ones_like(value)
    optimizer.step()
    before = optimizer.state[value]["exp_avg_sq"].clone(), optimizer.state[value]["exp_avg_sq_scale"].clone()  # fmt: skip
    value.grad = torch.zeros_like(value)
    value.grad[:, 0] = 1.0  # keeps the scale of each block
    for _ in range(300):
        optimizer.step()
    state = optimizer.state[value]
    then = codes.decode(*before).square()[:, 1:].mean()
    now = codes.decode(state["exp_avg_sq"], state["exp_avg_sq_scale"])
    assert now.square()[:, 1:].mean() / then == pytest.approx(0.999**300, rel=0.05)


@pytest.mark.parametrize("kind", [AGD, AGD8bit, AdamW8bit])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_continues_from_its_state(kind, dtype) -> None:
    model = network().to(dtype)
    optimizer = kind(model.parameters(), lr=1e-3)
    given = [[torch.randn_like(each) for each in model.parameters()] for _ in range(4)]

    def steps(optimizer, model, some):
        for gradients in some:
            for each, gradient in zip(model.parameters(), gradients, strict=True):
                each.grad = gradient.clone()
            optimizer.step()

    steps(optimizer, model, given[:2])
    other = copy.deepcopy(model)
    copied, copied_optimizer = copy.deepcopy((model, optimizer))
    resumed = kind(other.parameters(), lr=1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for entries, loaded in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        assert {key: each.dtype for key, each in entries.items()} == {key: each.dtype for key, each in loaded.items()}  # fmt: skip
    steps(optimizer, model, given[2:])
    steps(resumed, other, given[2:])
    steps(copied_optimizer, copied, given[2:])
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert all(map(torch.equal, model.parameters(), copied.parameters()))


def test_a_state_continues_in_the_form_that_it_has() -> None:
    model = network()
    optimizer = AGD(model.parameters())
    losses(model, optimizer, 2)
    coded = AGD8bit(model.parameters())
    coded.load_state_dict(optimizer.state_dict())
    losses(model, coded, 1)
    assert coded.state[model[0].weight]["exp_avg"].dtype == torch.float32
    optimizer.load_state_dict(AGD8bit(model.parameters()).state_dict())
    losses(model, optimizer, 1)
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.int8


def test_parameters_without_gradient_and_late_ones_have_steps_of_their_own() -> None:
    one, late = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
    optimizer = AGD([one, late], LR, BETAS)
    given = gradients(3, 6)
    trained(optimizer, [one], given[:3])
    assert not optimizer.state.get(late)
    trained(optimizer, [one, late], given[3:])
    torch.testing.assert_close(
        late.detach(), agd(torch.zeros(3, dtype=torch.float64), given[3:], 1e-5), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: AGD(p, lr=-1.0), "lr is -1.0; it must be 0 or more."),
        (lambda p: AGD(p, betas=(0.9, 1.0)), "betas is (0.9, 1.0); they must be from 0 to below 1."),
        (lambda p: AGD(p, delta=0.0), "delta is 0.0; it must be more than 0."),
        (lambda p: AGD(p, clip=0.0), "clip is 0.0; it must be more than 0, or None."),
        (lambda p: AGD(p, weight_decay=-1.0), "weight_decay is -1.0; it must be 0 or more."),
        (lambda p: AGD(p, state_bits=4), "state_bits is 4; accepted are 8 and 32."),
        (lambda p: AGD8bit(p, amsgrad=True), "amsgrad is True; with state_bits 8 it must be False."),
        (lambda p: AdamW8bit(p, eps=-1.0), "eps is -1.0; it must be 0 or more."),
    ],
)  # fmt: skip
def test_an_option_out_of_its_range_is_named(make, message) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make([nn.Parameter(torch.zeros(2))])
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_a_gradient_of_another_kind_is_refused(kind) -> None:
    value = nn.Parameter(torch.zeros(2, dtype=torch.complex64 if kind == "complex" else None))
    value.grad = torch.ones_like(value)
    if kind == "sparse":
        value.grad = value.grad.to_sparse()
    with pytest.raises(ConfigurationError, match=f"^AGD got a {kind} gradient; it accepts dense"):
        AGD([value]).step()


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("kind", [AGD, AdamW, AdamW8bit])
def test_a_state_of_another_shape_is_refused(kind, native, monkeypatch) -> None:
    """The compiled update would write beyond the end of the smaller one."""
    monkeypatch.setenv("DLROVER_NATIVE", native)
    small, large = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64, 128))
    saved = kind([small])
    trained(saved, [small], [torch.ones(64, 64)])
    loaded = kind([large])
    loaded.load_state_dict(saved.state_dict())
    large.grad = torch.ones(64, 128)
    with pytest.raises(
        ConfigurationError,
        match=r"Parameter 0 has the shape \[64, 128\] and its exp_avg \[64, 64\]",
    ):
        loaded.step()
    small.data = torch.ones(64, 128)
    with pytest.raises(ConfigurationError, match=r"its gradient \[64, 64\]"):
        saved.step()


@pytest.mark.parametrize("native", ["auto", "off"])
def test_the_sign_of_a_gradient_that_is_negated_lazily_counts(native, monkeypatch) -> None:
    """As autograd leaves that of the imaginary part of a number that is conjugated."""
    monkeypatch.setenv("DLROVER_NATIVE", native)
    value = nn.Parameter(torch.tensor([1.0]))
    number = torch.complex(torch.zeros(1), value).conj() * torch.tensor([1 + 1j])
    number.imag.sum().backward()
    assert value.grad.is_neg()
    AdamW([value], lr=0.5, weight_decay=0.0).step()
    assert value.item() == pytest.approx(1.5)


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("kind", [AdamW, AdamW8bit])
def test_the_bfloat16_state_of_pytorch_continues_in_float32(kind, native, monkeypatch) -> None:
    monkeypatch.setenv("DLROVER_NATIVE", native)
    value = nn.Parameter(torch.ones(64, 2, dtype=torch.bfloat16))
    before = torch.optim.AdamW([value], LR, weight_decay=0)
    value.grad = torch.ones_like(value)
    before.step()
    there = value.detach().clone()
    optimizer = kind([value], LR, weight_decay=0)
    optimizer.load_state_dict(before.state_dict())
    optimizer.step()
    assert optimizer.state[value]["exp_avg_sq"].dtype == torch.float32
    torch.testing.assert_close(there.float() - value.float(), torch.full((64, 2), LR), rtol=0, atol=2**-8)  # fmt: skip


def test_states_of_two_types_both_advance() -> None:
    value = nn.Parameter(torch.ones(8))
    optimizer = AdamW([value])
    value.grad = torch.ones(8)
    optimizer.step()
    state = optimizer.state[value]
    state["exp_avg"] = state["exp_avg"].half()
    optimizer.step()
    state |= {"exp_avg": state["exp_avg"].float(), "exp_avg_sq": state["exp_avg_sq"].half()}
    optimizer.step()
    torch.testing.assert_close(state["exp_avg"], torch.full((8,), 1 - 0.9**3), rtol=1e-3, atol=0)
    torch.testing.assert_close(
        state["exp_avg_sq"].float(), torch.full((8,), 1 - 0.999**3), rtol=1e-3, atol=0
    )


def test_parameters_that_share_memory_are_updated_one_after_another(monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    found = []
    for kind in (torch.optim.AdamW, AdamW):
        memory = torch.linspace(
            -1, 1, 3 << 20
        )  # in three parts, to which threads come one after another
        values = [nn.Parameter(memory), nn.Parameter(memory.view(3, -1)[2])]
        optimizer = kind(values, LR)
        for number, value in enumerate(values):
            value.grad = torch.full_like(value, 1.0 + number)
        optimizer.step()
        found.append(memory)
    torch.testing.assert_close(*found, rtol=0, atol=1e-7)


@pytest.fixture
def alone(tmp_path):
    """A mesh of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("native", ["auto", "off"])
def test_a_backward_pass_that_needs_a_spread_parameter_before_a_step_fails(
    native, monkeypatch, alone
) -> None:
    monkeypatch.setenv("DLROVER_NATIVE", native)
    value = nn.Parameter(distribute_tensor(torch.ones(4, 4), alone, [Shard(0)]))
    optimizer = AdamW([value])
    loss = (value * value).sum()
    value.grad = torch.ones_like(value).detach()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Wrapper(torch.Tensor):
    """A tensor around another one, without memory of its own, as quantized weights are."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inner = tree_map_only(cls, lambda each: each.inner, (args, kwargs))
        outer = tree_map_only(torch.Tensor, cls, func(*inner[0], **inner[1]))
        return return_and_correct_aliasing(func, args, kwargs, outer)


def test_tensors_without_memory_of_their_own_are_updated_by_pytorch() -> None:
    found = []
    for kind in (torch.optim.AdamW, AdamW):
        inner = torch.ones(4, 4)
        value = nn.Parameter(Wrapper(inner))
        value.grad = Wrapper(torch.ones(4, 4))
        kind([value], LR).step()
        found.append(inner)
    torch.testing.assert_close(*found)
    assert not found[0].eq(1).any()


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_the_state_of_an_optimizer_with_an_option_that_is_missing_is_refused(option) -> None:
    """With ``maximize``, what went uphill would go downhill."""
    value = nn.Parameter(torch.ones(3))
    saved = torch.optim.AdamW([value], **{option: True}).state_dict()
    with pytest.raises(ConfigurationError, match=f"with {option}=True, which AdamW does not have"):
        AdamW([value]).load_state_dict(saved)
    AdamW([value]).load_state_dict(torch.optim.AdamW([value]).state_dict())


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("make", [AGD, AdamW, AdamW8bit])
def test_a_backward_pass_that_needs_the_values_before_a_step_fails(
    make, native, monkeypatch
) -> None:
    """As with PyTorch's optimizers; else its gradients would be those of other parameters."""
    monkeypatch.setenv("DLROVER_NATIVE", native)
    value, inputs = nn.Parameter(torch.ones(64, 64)), torch.ones(64, requires_grad=True)
    outputs = value @ inputs
    value.grad = torch.ones(64, 64)
    make([value]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()
