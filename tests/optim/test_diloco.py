"""DiLoCo and Streaming DiLoCo on one replica; `test_replicas` has several."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from dlrover.errors import ConfigurationError  # noqa: E402
from dlrover.optim import AEDiT, DiLoCo, GroupAdagrad, GroupAdam  # noqa: E402
from dlrover.optim.adamw import AdamW  # noqa: E402

pytestmark = pytest.mark.torch

EARLY_0 = [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59]
EARLY_1 = [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53]
HALF_0 = [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25]
HALF_1 = [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38]
OWN = [1 - 2 * step for step in range(16)]
LATE_0 = [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47]
LATE_1 = [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45]
LATE_HALF_0 = [
    1,
    -1,
    -3,
    -6,
    -8,
    -10,
    -12,
    -14,
    -16,
    -21.5,
    -23.5,
    -25.5,
    -27.5,
    -29.5,
    -31.5,
    -35.75,
]
LATE_HALF_1 = [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35]
HISTORIES = {
    (0, 0.0): (EARLY_0, EARLY_1, {3: -11, 9: -35}, {6: -23, 12: -47}),
    (0, 0.5): (HALF_0, HALF_1, {3: -11, 9: -29}, {6: -23, 12: -35}),
    (0, 1.0): (OWN, OWN, {3: -11, 9: -23}, {6: -23, 12: -23}),
    (1, 0.0): (LATE_0, LATE_1, {3: -7, 9: -27}, {6: -19, 12: -39}),
    (1, 0.5): (LATE_HALF_0, LATE_HALF_1, {3: -7, 9: -25}, {6: -19, 12: -31}),
    (1, 1.0): (OWN, OWN, {3: -7, 9: -23}, {6: -19, 12: -23}),
}
"""By delay and alpha: parameters of two layers from step to step, and those of their syncs (torchft's test data:
two fragments, 6 steps between the syncs of each, gradients 2, inner rate 1, outer rate 2)."""


def outer(parameters):
    return torch.optim.SGD(parameters, lr=2.0)


@pytest.mark.parametrize(("delay", "alpha"), HISTORIES)
def test_the_history_of_torchft(delay, alpha) -> None:
    layers = [nn.Parameter(torch.ones(1, 1)) for _ in range(2)]
    optimizer = DiLoCo(
        torch.optim.SGD(layers, lr=1.0),
        interval=6,
        outer=outer,
        fragments=2,
        delay=delay,
        alpha=alpha,
    )
    found: list[list[float]] = [[1.0], [1.0]]
    shared: list[dict[int, float]] = [{}, {}]
    for step in range(1, 16):
        for layer in layers:
            layer.grad = torch.full((1, 1), 2.0)
        before = optimizer.syncs
        optimizer.step()
        for history, layer in zip(found, layers, strict=True):
            history.append(layer.item())
        if optimizer.syncs > before and step < 15:
            which = before % 2
            state = optimizer.state_dict()["state"][which]
            shared[which][step] = state["local_sgd.shared"].item()
    assert (*found, *shared) == HISTORIES[delay, alpha]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 5, "fragments": 2}, "interval is 5; it must be a multiple of fragments, 2."),
        ({"delay": 3, "interval": 6, "fragments": 2}, "delay is 3; it must be from 0 to below interval / fragments, 3."),
        ({"fragments": 3}, "fragments is 3; accepted are 1 to 2, the number of parameters."),
        ({"alpha": 1.5}, "alpha is 1.5; it must be from 0 to 1."),
        ({"bits": 4}, "bits is 4; accepted are 8 and 32."),
        ({"warmup": -1}, "warmup is -1; it must be 0 or more."),
        ({"clip": 0.0}, "clip is 0.0; it must be more than 0, or None."),
    ],
)  # fmt: skip
def test_an_option_out_of_its_range_is_named(options, message) -> None:
    layers = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    with pytest.raises(ConfigurationError, match="^" + message.replace(".", r"\.") + "$"):
        DiLoCo(torch.optim.SGD(layers, lr=1.0), **options)


def trained(optimizer, layers, steps):
    for step in steps:
        for number, layer in enumerate(layers):
            layer.grad = torch.full_like(layer, 0.1 * (step % 7) - 0.2 * number)
        optimizer.step()


def test_a_training_continues_from_its_state() -> None:
    def make(layers):
        return DiLoCo(torch.optim.AdamW(layers, lr=0.1), interval=4, fragments=2, bits=8)

    layers = [nn.Parameter(torch.ones(3, 2)) for _ in range(3)]
    optimizer = make(layers)
    trained(optimizer, layers, range(11))
    others = [nn.Parameter(layer.detach().clone()) for layer in layers]
    resumed = make(others)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    trained(optimizer, layers, range(11, 30))
    trained(resumed, others, range(11, 30))
    assert all(map(torch.equal, layers, others))
    assert optimizer.syncs == resumed.syncs == 15


def test_a_state_of_the_inner_optimizer_can_be_continued() -> None:
    layer = nn.Parameter(torch.ones(3))
    inner = torch.optim.AdamW([layer], lr=0.1)
    trained(inner, [layer], range(5))
    optimizer = DiLoCo(torch.optim.AdamW([layer], lr=0.1), interval=3)
    optimizer.load_state_dict(copy.deepcopy(inner.state_dict()))
    trained(optimizer, [layer], range(3))
    assert optimizer.syncs == 1
    assert optimizer.state[layer]["step"] == 8


def test_a_state_of_another_outer_optimizer_is_refused() -> None:
    layer = nn.Parameter(torch.ones(3))
    plain = DiLoCo(torch.optim.SGD([layer], lr=0.1), outer=outer)
    trained(plain, [layer], range(2))
    with pytest.raises(ConfigurationError) as caught:
        DiLoCo(torch.optim.SGD([layer], lr=0.1)).load_state_dict(plain.state_dict())
    assert str(caught.value) == (
        "The state dict has no local_sgd.outer.momentum_buffer for a parameter of shape (3,); it must be of the"
        " same parameters and the same kind of outer optimizer."
    )


def test_parameters_that_are_loaded_before_the_first_step_are_the_shared_ones() -> None:
    layer = nn.Parameter(torch.zeros(3))
    optimizer = DiLoCo(torch.optim.SGD([layer], lr=0.1), interval=1, outer=outer)
    with torch.no_grad():
        layer.fill_(5.0)
    trained(optimizer, [layer], [1])  # one step of 0.01, twice
    assert layer.tolist() == pytest.approx([4.98] * 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds": 0.0}, "seconds is 0.0; it must be more than 0."),
        ({"interval": 5}, "AEDiT takes no interval; give seconds instead."),
        ({"delay": 1}, "AEDiT takes no delay; give seconds instead."),
    ],
)
def test_an_option_that_does_not_go_with_time_is_refused(options, message) -> None:
    with pytest.raises(ConfigurationError) as caught:
        AEDiT(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), **options)
    assert str(caught.value) == message


def test_small_outer_steps_of_bfloat16_parameters_add_up() -> None:
    """Else the digits that bfloat16 cuts off would be a change of the replica, which undoes the outer step."""
    moved = []
    for dtype in (torch.float32, torch.bfloat16):
        value = nn.Parameter(torch.ones(4096, dtype=dtype))
        optimizer = DiLoCo(AdamW([value], lr=4e-5, weight_decay=0.0), interval=5)
        for _ in range(60):
            value.grad = torch.ones_like(value)
            optimizer.step()
        moved.append(1 - optimizer.state_dict()["state"][0]["local_sgd.shared"].mean().item())
    assert moved[1] == pytest.approx(moved[0], rel=0.1)


@pytest.mark.parametrize("late", ["thawed", "added"])
def test_a_parameter_that_would_not_be_synchronized_is_refused(late) -> None:
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    second.requires_grad_(False)
    groups = [first, second] if late == "thawed" else [first]
    optimizer = DiLoCo(torch.optim.SGD(groups, lr=0.1), interval=2)
    trained(optimizer, [first], range(3))
    second.requires_grad_(True)
    if late == "added":
        optimizer.add_param_group({"params": [second]})
    with pytest.raises(
        ConfigurationError,
        match=r"^DiLoCo got a parameter of shape \(3,\) that was frozen, or not in",
    ):
        trained(optimizer, [first, second], range(1))


def test_a_complex_parameter_is_refused() -> None:
    value = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(ConfigurationError, match="DiLoCo got a complex parameter"):
        DiLoCo(torch.optim.SGD([value], lr=0.1))


@pytest.mark.parametrize("kind", [GroupAdam, GroupAdagrad])
def test_an_optimizer_that_would_undo_a_sync_is_refused(kind) -> None:
    with pytest.raises(
        ConfigurationError, match=f"^DiLoCo got {kind.__name__}, whose next step undoes a sync"
    ):
        DiLoCo(kind([nn.Parameter(torch.ones(3))]))


def test_a_step_whose_gradients_overflow_counts_and_changes_nothing() -> None:
    """With a GradScaler, overflows differ from replica to replica, which must make equally many steps."""
    value = nn.Parameter(torch.zeros(3))
    optimizer = DiLoCo(torch.optim.SGD([value], lr=0.5), interval=4, outer=outer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale((value * (float("inf") if step in (1, 6) else 1.0)).sum()).backward()
        if step == 3:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.syncs == 2
    assert optimizer.total_steps == 8
    assert scaler.get_scale() == 2.0
    assert value.tolist() == [-6.0] * 3  # twice three steps of 0.5, doubled by the outer optimizer


def test_states_that_an_outer_optimizer_makes_with_itself_stay() -> None:
    def adagrad(values):
        return torch.optim.Adagrad(values, lr=0.5, initial_accumulator_value=0.1)

    value, other = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer, alone = (
        DiLoCo(torch.optim.SGD([value], lr=0.1), interval=1, outer=adagrad),
        adagrad([other]),
    )
    for _ in range(3):
        value.grad, other.grad = torch.ones(3), torch.full((3,), 0.1)
        optimizer.step()
        alone.step()
    torch.testing.assert_close(value, other)


@pytest.mark.parametrize("steps", [0, 2, 7])
@pytest.mark.parametrize("by_keys", [False, True])
def test_a_training_with_a_warm_up_continues_from_its_state(steps, by_keys) -> None:
    def make():
        layers = [nn.Parameter(torch.ones(3, 2))]
        return layers, DiLoCo(torch.optim.AdamW(layers, lr=0.1), interval=3, warmup=4)

    layers, optimizer = make()
    trained(optimizer, layers, range(steps))
    saved = copy.deepcopy((layers, optimizer.state_dict()))
    others, resumed = make()
    if (
        by_keys
    ):  # DCP makes the inner states of a new optimizer, and loads what its state dict names
        trained(resumed, others, range(1))
        names = resumed.state_dict()["state"][0]
        saved[1]["state"] = {0: {key: saved[1]["state"][0].get(key, names[key]) for key in names}}
    with torch.no_grad():
        others[0].copy_(saved[0][0])
    resumed.load_state_dict(saved[1])
    trained(optimizer, layers, range(steps, 15))
    trained(resumed, others, range(steps, 15))
    assert optimizer.syncs == resumed.syncs == 3
    if steps or not by_keys:
        assert torch.equal(layers[0], others[0])


def test_a_schedule_acts_after_a_state_was_loaded_into_the_inner_optimizer() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0)
    optimizer = DiLoCo(inner)
    inner.load_state_dict(copy.deepcopy(inner.state_dict()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trained(optimizer, inner.param_groups[0]["params"], [1])
    schedule.step()
    assert inner.param_groups[0]["lr"] == 0.5
    assert optimizer.state is inner.state


def test_a_deep_copy_trains_on_as_the_original() -> None:
    layers = [nn.Parameter(torch.ones(3, 2))]
    optimizer = DiLoCo(torch.optim.AdamW(layers, lr=0.1), interval=3)
    trained(optimizer, layers, range(4))
    others, copied = copy.deepcopy((layers, optimizer))
    trained(copied, others, range(4, 9))
    assert not torch.equal(others[0], layers[0])
    trained(optimizer, layers, range(4, 9))
    assert torch.equal(others[0], layers[0])
    assert copied.syncs == optimizer.syncs == 3
