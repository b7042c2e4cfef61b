"""How noisy gradients are, and a global batch that was chosen by it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from dlrover import launched  # noqa: E402
from dlrover.errors import ConfigurationError  # noqa: E402
from dlrover.training.sampler import ElasticDistributedSampler  # noqa: E402
from dlrover.training.trainer import ElasticTrainer  # noqa: E402
from dlrover.training.worker import tracker  # noqa: E402

pytestmark = pytest.mark.torch

NUMBERS = 400


class Quadratic(nn.Module):
    """Half the squared distance to a sample: its gradient is known, and so is its variance."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.full((NUMBERS,), 0.1))

    def forward(self, samples):
        return 0.5 * (self.place - samples).square().sum(1).mean()


def trained(samples: int = 4096, spread: float = 1.0, rate: float = 0.0, **options):
    numbers = torch.Generator().manual_seed(3)
    dataset = TensorDataset(spread * torch.randn(samples, NUMBERS, generator=numbers))
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    sampler = ElasticDistributedSampler(dataset, 1, 0)
    options = {
        "global_batch_size": 16,
        "micro_batch_size": 8,
        "learning_rate_rule": "linear",
        "reference_batch_size": 16,
        **options,
    }
    trainer = ElasticTrainer(model, optimizer, sampler, **options)
    return model, optimizer, trainer, DataLoader(dataset, batch_sampler=trainer.batches)


@pytest.fixture
def told(monkeypatch):
    """The noise that the trainer tells."""
    found: list[tuple[float, float]] = []
    monkeypatch.setattr(tracker, "measured_noise", lambda *noise: found.append(noise))
    return found


@pytest.mark.parametrize("spread", [0.1, 1.0])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_noise_of_a_quadratic_is_what_it_is(told, spread, scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    model, _, trainer, loader = trained(spread=spread, max_global_batch_size=64, scaler=scaler)
    for (samples,) in loader:
        trainer.backward(model(samples))
        if trainer.complete and not scaled:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # it is measured before
        trainer.step()
    square, variance = told[-1]
    assert len(told) == 5
    assert variance == pytest.approx(NUMBERS * spread**2, rel=0.1)
    noise_scale = NUMBERS * spread**2 / (NUMBERS * 0.1**2)
    assert variance / square == pytest.approx(noise_scale, rel=0.25)


def test_a_job_that_did_not_ask_is_not_measured_and_keeps_its_batch(told, monkeypatch):
    monkeypatch.setattr(launched, "given", launched.Given(global_batch=64))
    model, _, trainer, loader = trained()
    for (samples,) in loader:
        trainer.backward(model(samples))
        trainer.step()
    assert trainer.global_batch_size == 16
    assert not told


@pytest.mark.parametrize(("chosen", "taken"), [(0, 16), (48, 48), (1000, 64), (3, 16)])
def test_a_chosen_batch_holds_within_the_limits(monkeypatch, chosen, taken):
    monkeypatch.setattr(launched, "given", launched.Given(global_batch=chosen))
    _, _, trainer, _ = trained(max_global_batch_size=64)
    assert trainer.global_batch_size == taken


@pytest.mark.parametrize(("rule", "factor"), [("linear", 3.0), ("sqrt", 3**0.5)])
def test_the_learning_rate_of_a_step_follows_and_that_of_checkpoints_does_not(
    monkeypatch, rule, factor
):
    monkeypatch.setattr(launched, "given", launched.Given(global_batch=48))
    options = {"max_global_batch_size": 64, "learning_rate_rule": rule, "rate": 0.1}
    model, optimizer, trainer, loader = trained(**options)
    before = model.place.detach().clone()
    for (samples,) in loader:
        trainer.backward(model(samples))
        gradient = model.place.grad.clone()
        if trainer.step():
            break
    torch.testing.assert_close(model.place, before - 0.1 * factor * gradient)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == pytest.approx(0.1)


def test_after_a_change_of_the_batch_each_sample_is_taken_once(monkeypatch):
    def some(batches: int, state=None):
        _, _, trainer, loader = trained(samples=100, max_global_batch_size=64)
        sampler = trainer.batches.sampler
        if state is not None:
            sampler.load_state_dict(state)
        model, taken, steps = Quadratic(), [], 0
        for (samples,) in loader:
            trainer.backward(trainer._model(samples))
            taken += samples[:, 0].tolist()
            steps += trainer.step()
            if steps == batches:
                break
        del model
        return taken, sampler.state_dict()

    first, state = some(2)
    monkeypatch.setattr(launched, "given", launched.Given(global_batch=40))
    rest, _ = some(2, state)
    assert (len(first), len(rest)) == (32, 68)
    assert len(set(first + rest)) == 100


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_global_batch_size": 8}, "max_global_batch_size is 8; it must be at least"),
        ({"max_global_batch_size": 1.5}, "max_global_batch_size is 1.5; it must be an integer"),
        ({"micro_batch_size": None}, "max_global_batch_size needs micro_batch_size"),
        (
            {"learning_rate_rule": "none", "reference_batch_size": None},
            "max_global_batch_size needs learning_rate_rule",
        ),
    ],
)
def test_a_choice_that_cannot_be_meant_is_refused(options, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        trained(**{"max_global_batch_size": 64, **options})


class Complex(nn.Module):
    """A layer with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return (numbers[:, None] * self.weights).abs()


@pytest.mark.parametrize(
    "model",
    [nn.Embedding(10, 3, sparse=True), nn.Embedding(10, 3).double(), nn.Embedding(10, 3).bfloat16(), Complex()],
    ids=["sparse", "float64", "bfloat16", "complex"],
)  # fmt: skip
def test_gradients_of_any_kind_are_measured(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ElasticTrainer(
        model, optimizer, global_batch_size=4, micro_batch_size=2, max_global_batch_size=8,
        learning_rate_rule="linear", reference_batch_size=4,
    )  # fmt: skip
    for part in trainer.split(torch.arange(4)):
        trainer.backward(model(part).sum())
    trainer.step()
    assert trainer._noise._sums[0] > 0


def test_a_model_that_does_not_train_has_no_noise():
    model = nn.Linear(1, 1).requires_grad_(False)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ConfigurationError, match="parameters that require gradients"):
        ElasticTrainer(
            model, optimizer, global_batch_size=4, micro_batch_size=2, max_global_batch_size=8,
            learning_rate_rule="linear", reference_batch_size=4,
        )  # fmt: skip
