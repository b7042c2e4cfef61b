"""Optimizer updates: the formula within rounding, the same bits from every implementation and number of threads."""

import itertools

import pytest

pytest.importorskip("xxhash")
import numpy as np

from dlrover._native import library
from dlrover._native.updates import (
    Tensors,
    Updates,
    adagrad_scalars,
    adamw_scalars,
    agd_scalars,
    updates,
)

RULES = {"adamw": 2, "agd": 2, "adagrad": 1}
EPS32 = float(np.finfo(np.float32).eps)


@pytest.fixture
def run(implementation: library.Loaded) -> Updates:
    return Updates(implementation)


def scalars(rule: str, step: int) -> np.ndarray:
    if rule == "adamw":
        return adamw_scalars(step, 1e-2, (0.9, 0.99), 1e-8, 0.1)
    if rule == "agd":
        return agd_scalars(step, 1e-2, (0.9, 0.99), 1e-3, 0.1, clip=5.0)
    return adagrad_scalars(1e-3, 1e-10)


def widened(words: np.ndarray) -> np.ndarray:
    """Bfloat16 as float32."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def shortened(values: np.ndarray) -> np.ndarray:
    """Float32, cut to bfloat16."""
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


class Model:
    """Parameters, gradients and states in single tensors; they begin after ``gap`` elements."""

    def __init__(self, rule: str, sizes: list[int], *, half: bool = False, gap: int = 0) -> None:
        chance = np.random.default_rng(sum(sizes) + 1)
        self.rule, self.half, self.gap = rule, half, gap
        self.parameters = [self._made(chance.normal(size=size)) for size in sizes]
        self.states = [
            [np.zeros(gap + size, np.float32)[gap:] for size in sizes] for _ in range(RULES[rule])
        ]

    def _made(self, values: np.ndarray) -> np.ndarray:
        values = np.concatenate([np.zeros(self.gap), values]).astype(np.float32)
        return (shortened(values) if self.half else values)[self.gap :]

    def gradients(self, step: int) -> list[np.ndarray]:
        chance = np.random.default_rng(step)
        return [self._made(chance.normal(size=len(each))) for each in self.parameters]

    def step(self, run: Updates, step: int, gradients: list[np.ndarray], threads: int = 1) -> None:
        def at(tensors: list[np.ndarray]) -> np.ndarray:
            return np.array([each.ctypes.data if len(each) else 0 for each in tensors], np.uint64)

        sizes = np.array([len(each) for each in gradients], np.uint64)
        states = tuple(at(state) for state in self.states)
        tensors = Tensors(at(self.parameters), at(gradients), states, sizes, half=self.half)
        update = getattr(run, self.rule)
        update(tensors, scalars(self.rule, step), seed=step, threads=threads)

    def everything(self) -> list[np.ndarray]:
        return [*self.parameters, *itertools.chain(*self.states)]


def trained(rule: str, run: Updates, sizes: list[int], threads: int = 1, **kinds: object) -> Model:
    model = Model(rule, sizes, **kinds)
    for step in (1, 2, 3):
        model.step(run, step, model.gradients(step), threads)
    return model


def alike(one: Model, other: Model) -> bool:
    pairs = zip(one.everything(), other.everything(), strict=True)
    return all(mine.tobytes() == others.tobytes() for mine, others in pairs)


def formula(rule: str, step: int, p, g, first, second) -> tuple:
    """The published formula in float64: parameters, states."""
    lr, (beta1, beta2), decay = 1e-2, (0.9, 0.99), 0.1
    if rule == "adagrad":
        first = first + g * g
        return p - lr / 10 * g / (np.sqrt(first) + 1e-10), first, second
    mean = beta1 * first + (1 - beta1) * g
    unbiased = mean / (1 - beta1**step)
    if rule == "adamw":
        second = beta2 * second + (1 - beta2) * g * g
        denominator = np.sqrt(second / (1 - beta2**step)) + 1e-8
        return p * (1 - lr * decay) - lr * unbiased / denominator, mean, second
    change = unbiased - (first / (1 - beta1 ** (step - 1)) if step > 1 else 0)
    second = beta2 * second + (1 - beta2) * change * change
    root = np.maximum(np.sqrt(second), 1e-3 * np.sqrt(1 - beta2**step))
    quotient = np.clip(mean / root, -5.0, 5.0)
    size = np.sqrt(1 - beta2**step) / (1 - beta1**step)
    return p * (1 - lr * decay) - lr * size * quotient, mean, second


@pytest.mark.parametrize("rule", RULES)
def test_an_update_is_the_formula(run, rule):
    model = Model(rule, [1000])
    exact = [model.parameters[0].astype(np.float64), np.zeros(1000), np.zeros(1000)]
    for step in range(1, 6):
        (gradient,) = gradients = model.gradients(step)
        model.step(run, step, gradients)
        exact = list(formula(rule, step, exact[0], gradient.astype(np.float64), *exact[1:]))
        error = np.abs(model.parameters[0] - exact[0]) / (np.abs(exact[0]) + 1e-2)
        assert error.max() < 16 * EPS32
        for state, wanted in zip(model.states, exact[1:], strict=False):
            assert np.abs(state[0] - wanted).max() < 16 * EPS32


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_every_implementation_gives_the_same_bits(run, rule, half):
    """Sizes and places that fill no vector."""
    sizes = [0, 1, 7, 8, 17, 255, 1000]
    wanted = trained(rule, updates("off"), sizes, half=half, gap=1)
    assert alike(trained(rule, run, sizes, half=half, gap=1), wanted)


@pytest.mark.parametrize("half", [False, True])
def test_the_number_of_threads_changes_no_bit(run, half):
    sizes = [100, 2_200_001, *[1000] * 50]  # the large one is divided
    models = [Model("adamw", sizes, half=half) for _ in range(3)]
    gradients = models[0].gradients(1)
    for model, threads in zip(models, (1, 2, 5), strict=True):
        model.step(run, 1, gradients, threads)
        assert alike(model, models[0])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_what_is_not_finite_or_very_small(run, rule, half):
    hostile = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-39, 3.4e38, -3.4e38, 1e-20]
    pairs = np.array(list(itertools.product(hostile, hostile)), np.float32)
    models = [Model(rule, [len(pairs)], half=half) for _ in range(2)]
    for model, implementation in zip(models, (run, updates("off")), strict=True):
        start, gradient = (model._made(pairs[:, column]) for column in (0, 1))
        model.parameters[0][:] = start
        model.step(implementation, 1, [gradient])
        model.step(implementation, 2, [gradient])
    for one, other in zip(*(model.everything() for model in models), strict=True):
        values = [widened(each) if each.dtype == np.uint16 else each for each in (one, other)]
        np.testing.assert_array_equal(*values)  # NaN equals NaN: only its payload may differ
    assert np.isnan(values[0]).any()


def test_stochastic_rounding_has_the_right_mean(run):
    """Steps far smaller than the distance of two neighbours: rounded to the nearest, nothing would change."""
    count, lr, squares = 200_000, 1e-3, 0.25
    model = Model("adagrad", [count], half=True)
    model.parameters[0][:] = shortened(np.ones(count, np.float32))
    model.states[0][0][:] = squares
    gradients = [shortened(np.full(count, 0.5, np.float32))]
    for step in range(1, 9):
        before = widened(model.parameters[0]).astype(np.float64)
        model.step(run, step, gradients)
        after = widened(model.parameters[0]).astype(np.float64)
        squares += 0.25
        error = after - (before - lr * 0.5 / np.sqrt(squares))
        assert np.all(np.abs(error) < 2**-8), "one of the two neighbours"
        # The standard deviation of one draw is at most half the distance of two neighbours below 1: 2**-9.
        assert abs(error.mean()) < 5 * 2**-9 / np.sqrt(count)
    assert len(np.unique(model.parameters[0])) > 1


def test_draws_differ_by_step_by_tensor_and_by_element(run):
    """A step of 0.001, where the distance of two neighbours is 0.0039: about one element in four moves."""

    def rounded(seed: int) -> np.ndarray:
        model = Model("adagrad", [64, 64], half=True)
        for each in model.parameters:
            each[:] = shortened(np.full(64, 1.0, np.float32))
        model.step(run, seed, [shortened(np.full(64, 0.5, np.float32))] * 2)
        return np.array(model.parameters)

    first, again, other = rounded(1), rounded(1), rounded(2)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[0], first[1])
    assert len(np.unique(first[0])) == 2


def test_adamw_is_that_of_torch(run):
    torch = pytest.importorskip("torch")
    model = Model("adamw", [5000])
    parameter = torch.nn.Parameter(torch.from_numpy(model.parameters[0].copy()))
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
    optimizer = torch.optim.AdamW([parameter], **options)
    for step in range(1, 11):
        gradients = model.gradients(step)
        parameter.grad = torch.from_numpy(gradients[0])
        optimizer.step()
        model.step(run, step, gradients)
    difference = np.abs(model.parameters[0] - parameter.detach().numpy())
    assert difference.max() < 2e-6


@pytest.mark.parametrize(("delta", "like"), [(1e6, "momentum"), (1e-30, "adaptive")])
def test_agd_switches_between_momentum_and_adaptive_steps(run, delta, like):
    """A floor above all roots leaves SGD with momentum and lr / delta; one below them divides by the roots."""
    model = Model("agd", [100])
    start = model.parameters[0].copy()
    (gradient,) = model.gradients(1)
    places = (np.array([each.ctypes.data], np.uint64) for each in (model.parameters[0], gradient))
    states = tuple(np.array([state[0].ctypes.data], np.uint64) for state in model.states)
    tensors = Tensors(*places, states, np.array([100], np.uint64))
    run.agd(tensors, agd_scalars(1, 1e6 if like == "momentum" else 1e-2, (0.9, 0.99), delta, 0.0))
    moved = start - model.parameters[0]
    wanted = gradient if like == "momentum" else 1e-2 * np.sign(gradient)
    np.testing.assert_allclose(moved, wanted, rtol=1e-4, atol=2e-7)


def test_rows_without_a_gradient_stay(run):
    table = np.ones((1000, 16), np.float32)
    squares, width = np.zeros_like(table), 16 * 4
    rows = np.array([999, 0, 17], np.uint64)
    gradients = np.full((3, 16), 2.0, np.float32)
    tensors = Tensors(
        rows * np.uint64(width) + np.uint64(table.ctypes.data),
        np.arange(3, dtype=np.uint64) * np.uint64(width) + np.uint64(gradients.ctypes.data),
        (rows * np.uint64(width) + np.uint64(squares.ctypes.data),),
        np.full(3, 16, np.uint64),
    )
    run.adagrad(tensors, adagrad_scalars(0.5, 0.0), threads=2)
    changed = np.flatnonzero((table != 1).any(axis=1))
    assert changed.tolist() == [0, 17, 999]
    assert np.all(table[changed] == 0.5)
    assert np.all(squares[changed] == 4.0)
    assert not np.delete(squares, changed, axis=0).any()


def test_wrong_arguments_are_named():
    some = np.array([64], np.uint64)
    two = Tensors(some, some, (some, some), some)
    with pytest.raises(ValueError, match="adagrad takes 1 states; there are 2"):
        updates("off").adagrad(two, adagrad_scalars(1.0, 0.0))
    with pytest.raises(ValueError, match="scalars must be a numpy array of 7 float32"):
        updates("off").adamw(two, adagrad_scalars(1.0, 0.0))
    with pytest.raises(ValueError, match="seed is -1"):
        updates("off").adamw(two, scalars("adamw", 1), seed=-1)
    with pytest.raises(ValueError, match="threads is 0"):
        updates("off").adamw(two, scalars("adamw", 1), threads=0)
    with pytest.raises(ValueError, match=r"states\[1\] has 2 entries and sizes has 1"):
        Tensors(some, some, (some, np.array([1, 2], np.uint64)), some)
