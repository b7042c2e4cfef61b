"""A step over a global batch, in one process; `test_equality` has real ranks."""

from __future__ import annotations

import contextlib
import copy

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings, strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from dlrover.errors import ConfigurationError  # noqa: E402
from dlrover.training import balancing  # noqa: E402
from dlrover.training.sampler import ElasticDistributedSampler  # noqa: E402
from dlrover.training.trainer import ElasticTrainer  # noqa: E402

pytestmark = pytest.mark.torch


class Replica(nn.Module):
    """What one rank has; it notes which backward passes would average gradients over the ranks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.averages = True
        self.passes: list[bool] = []

    @contextlib.contextmanager
    def no_sync(self):
        self.averages = False
        try:
            yield
        finally:
            self.averages = True

    def forward(self, inputs):
        self.passes.append(self.averages)
        return self.module(inputs)


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 3, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, (inputs**2).sum(1))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def error_of(model, inputs, targets, reduction="mean"):
    return functional.mse_loss(model(inputs).squeeze(1), targets, reduction=reduction)


def gradient(model: nn.Module):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def elastic(dataset, replicas=1, rank=0, model=None, drop_last=False, **sizes):
    """A trainer whose optimizer is plain gradient descent, and its loader."""
    model = Replica(network()) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = ElasticDistributedSampler(dataset, replicas, rank, drop_last=drop_last)
    trainer = ElasticTrainer(model, optimizer, sampler, **sizes)
    return model, trainer, DataLoader(dataset, batch_sampler=trainer.batches)


def first_gradient(dataset, replicas, rank, by_sum, **sizes):
    """One rank's gradient of the first global batch, the size of which is the data set's."""
    model, trainer, loader = elastic(dataset, replicas, rank, **sizes)
    for inputs, targets in loader:
        loss = error_of(model, inputs, targets, "sum" if by_sum else "mean")
        trainer.backward(loss, divisor=len(dataset) if by_sum else None)
        if trainer.complete:
            break
    assert model.passes == [False] * (len(model.passes) - 1) + [True]
    return gradient(model)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(1, 24), st.integers(1, 6), st.none() | st.integers(1, 5), st.booleans())
def test_the_ranks_gradients_average_to_that_of_the_mean_loss(
    samples, replicas, micro_batch_size, by_sum
) -> None:
    dataset = data(samples)
    sizes = {"global_batch_size": 24, "micro_batch_size": micro_batch_size}
    mean = sum(first_gradient(dataset, replicas, r, by_sum, **sizes) for r in range(replicas))
    model = network()
    error_of(model, *dataset.tensors).backward()
    torch.testing.assert_close(mean / replicas, gradient(model), rtol=1e-12, atol=1e-14)


def train(trainer, model, loader, epochs=1) -> list[float]:
    """To the end; the losses."""
    losses, sampler = [], trainer.batches.sampler
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            trainer.backward(error_of(model, inputs, targets))
            if trainer.step():
                losses.append(trainer.loss())
    return losses


def test_accumulation_changes_no_step() -> None:
    dataset = data(50)
    model, trainer, loader = elastic(dataset, global_batch_size=16)
    losses = train(trainer, model, loader, epochs=2)
    assert len(losses) == 2 * trainer.steps_per_epoch == 8
    other, trainer, loader = elastic(dataset, global_batch_size=16, micro_batch_size=3)
    assert train(trainer, other, loader, epochs=2) == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-10, atol=1e-12)


def test_one_rank_may_have_any_module() -> None:
    dataset = data(20)
    model, trainer, loader = elastic(dataset, model=network(), global_batch_size=8)
    losses = train(trainer, model, loader, epochs=5)
    assert losses[-1] < losses[0]


def test_only_the_global_batch_counts() -> None:
    dataset = data(16)
    model, trainer, loader = elastic(dataset, global_batch_size=8, micro_batch_size=4)
    error_of(model, *dataset.tensors).backward()  # a pass for nothing
    batches = iter(loader)
    for _ in range(2):
        trainer.backward(error_of(model, *next(batches)))
    expected = network()
    order = trainer.batches.sampler.order()[:8]
    loss = error_of(expected, *(tensor[order] for tensor in dataset.tensors))
    loss.backward()
    torch.testing.assert_close(gradient(model), gradient(expected))
    assert trainer.step()
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4
    trainer.backward(error_of(model, *next(batches)))
    assert not trainer.complete
    assert trainer.loss() == pytest.approx(loss.item())


def test_gradients_of_the_whole_batch_can_be_clipped() -> None:
    model, trainer, loader = elastic(data(16), global_batch_size=16, micro_batch_size=4)
    before = copy.deepcopy(model.module)
    for inputs, targets in loader:
        trainer.backward(error_of(model, inputs, targets))
        if trainer.complete:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        trainer.step()
    moved = nn.utils.parameters_to_vector(model.parameters()) - nn.utils.parameters_to_vector(
        before.parameters()
    )
    assert moved.norm().item() == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_a_grad_scaler_changes_nothing_and_a_skipped_step_is_taken_too() -> None:
    dataset = data(32)
    model, trainer, loader = elastic(dataset, global_batch_size=16, micro_batch_size=4)
    train(trainer, model, loader)
    scaled = Replica(network())
    sampler = ElasticDistributedSampler(dataset)
    trainer = ElasticTrainer(
        scaled,
        torch.optim.SGD(scaled.parameters(), lr=0.1),
        sampler,
        global_batch_size=16,
        micro_batch_size=4,
        scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
    )
    loader = DataLoader(dataset, batch_sampler=trainer.batches)
    train(trainer, scaled, loader)
    torch.testing.assert_close(model.state_dict(), scaled.state_dict())
    sampler.set_epoch(1)
    before = copy.deepcopy(scaled.state_dict())
    for inputs, targets in loader:
        trainer.backward(error_of(scaled, inputs, targets) * float("inf"))
        if trainer.step():
            break
    torch.testing.assert_close(scaled.state_dict(), before, rtol=0, atol=0)
    assert sampler.consumed == 16


def test_a_program_may_find_its_samples_by_itself() -> None:
    samples = torch.arange(10.0)
    model = Replica(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = ElasticTrainer(model, optimizer, global_batch_size=10, micro_batch_size=4)
    parts = trainer.split(samples)
    assert torch.cat(parts).tolist() == samples.tolist()
    for part in parts:
        trainer.backward(model(part[:, None]).mean())
    assert model.module.weight.grad.item() == pytest.approx(4.5)
    assert trainer.step()
    with pytest.raises(ConfigurationError, match=r"^The global batch has 11 samples; it must have"):
        trainer.split(range(11))
    with pytest.raises(ConfigurationError, match=r"call split\(\) before backward\(\)"):
        trainer.backward(model(torch.ones(1, 1)).mean())
    with pytest.raises(ConfigurationError, match=r"^The trainer has no sampler"):
        _ = trainer.batches


def test_shares_hold_for_what_a_program_splits_by_itself() -> None:
    model = Replica(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = ElasticTrainer(model, optimizer, global_batch_size=10, micro_batch_size=2)
    trainer._replicas, trainer._rank, trainer._shares = 2, 1, (7, 3)
    assert [list(part) for part in trainer.split(range(10))] == [[7], [8, 9]]
    assert [weight for _, weight in trainer._micro_batches] == [0.2, 0.4]


# ---- what was taken, not what was fetched


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("stateful", [False, True])
def test_what_workers_fetched_ahead_is_not_lost(stateful) -> None:
    kind = DataLoader
    if stateful:
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    dataset, seen, state = TensorDataset(torch.arange(100)), [], None
    for steps, replicas in ((2, 2), (1, 3), (100, 1)):
        taken = []
        for rank in range(replicas):
            model = Replica(nn.Linear(1, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            sampler = ElasticDistributedSampler(dataset, replicas, rank)
            trainer = ElasticTrainer(
                model, optimizer, sampler, global_batch_size=16, micro_batch_size=2
            )
            loader = kind(dataset, batch_sampler=trainer.batches, num_workers=1, prefetch_factor=8)
            saved = loader if stateful else sampler
            if state is not None:
                saved.load_state_dict(state)
            taken.append(take(trainer, model, loader, steps))
            states = saved.state_dict()
        state = states
        seen += [sample for part in taken for sample in part]
    assert sampler.consumed == 100
    assert sorted(seen) == list(range(100))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("stateful", "persistent"), [(False, False), (False, True), (True, False)])
def test_a_resume_at_the_last_step_of_an_epoch_goes_on_with_the_next(
    num_workers, stateful, persistent
) -> None:
    """PyTorch's iterators of several processes call ``iter`` on their batch sampler twice."""
    kind = DataLoader
    if stateful:
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    options = {"num_workers": num_workers, "persistent_workers": persistent and num_workers > 0}
    dataset, state = TensorDataset(torch.arange(40)), None
    for steps, begins_with, samples in ((3, [0], 40), (100, [0, 1, 2], 80)):
        model, trainer, _ = elastic(
            dataset, model=Replica(nn.Linear(1, 1)), global_batch_size=16, micro_batch_size=8
        )
        sampler = trainer.batches.sampler
        loader = kind(dataset, batch_sampler=trainer.batches, **options)
        if state is not None:
            (loader if stateful else sampler).load_state_dict(state)
        epochs, taken = [], []
        for epoch in range(sampler.epoch, 3):
            sampler.set_epoch(epoch)
            epochs.append(epoch)
            taken += take(trainer, model, loader, steps)
            if len(taken) >= samples:
                break
        assert epochs == begins_with
        assert sorted(taken) == sorted([*range(40)] * (samples // 40))
        state = (loader if stateful else sampler).state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_forgotten_set_epoch_is_an_error_of_the_second_loop(num_workers) -> None:
    model, trainer, _ = elastic(
        TensorDataset(torch.arange(16)), model=Replica(nn.Linear(1, 1)), global_batch_size=16
    )
    loader = DataLoader(
        TensorDataset(torch.arange(16)), batch_sampler=trainer.batches, num_workers=num_workers
    )
    assert len(take(trainer, model, loader, 100)) == 16
    with pytest.raises(ConfigurationError, match=r"^Epoch 0 is over; call set_epoch\(1\)"):
        take(trainer, model, loader, 100)


def take(trainer, model, loader, steps) -> list[int]:
    """Train for so many steps, or to the end of the epoch; the samples."""
    taken = []
    for (numbers,) in loader:
        taken += numbers.tolist()
        trainer.backward(model(numbers[:, None].float()).mean())
        steps -= trainer.step()
        if not steps:
            break
    return taken


def test_a_loader_may_move_to_a_position_after_it_has_begun() -> None:
    model, trainer, _ = elastic(data(20), global_batch_size=16, micro_batch_size=2)
    batches = iter(trainer.batches)
    batches.load_state_dict({**batches.state_dict(), "consumed": 16})
    for indices in batches:
        trainer.backward(error_of(model, *data(20)[indices]))
    assert trainer.step()
    assert trainer.batches.sampler.consumed == 20


# ---- what is refused


def test_other_batches_than_those_of_the_trainer_are_refused() -> None:
    dataset = data(32)
    model, trainer, _ = elastic(dataset, global_batch_size=16, micro_batch_size=8)
    own = DataLoader(dataset, batch_size=8)
    with pytest.raises(ConfigurationError, match=r"^No global batch was begun: train on a loop"):
        trainer.backward(error_of(model, *next(iter(own))))
    iter(trainer.batches)
    with pytest.raises(ConfigurationError, match=r"^The samples are not those of the trainer"):
        trainer.backward(error_of(model, *next(iter(own))))


def test_a_batch_in_parts_is_not_left() -> None:
    model, trainer, loader = elastic(data(32), global_batch_size=16, micro_batch_size=8)
    trainer.backward(error_of(model, *next(iter(loader))))
    assert not trainer.step()
    with pytest.raises(ConfigurationError, match=r"^1 of the 2 micro-batches of a global batch"):
        iter(loader)


def test_a_step_that_was_forgotten_is_noticed() -> None:
    model, trainer, loader = elastic(data(32), global_batch_size=16, micro_batch_size=8)
    batches = iter(loader)
    for _ in range(2):
        trainer.backward(error_of(model, *next(batches)))
    third = error_of(model, *next(batches))
    with pytest.raises(ConfigurationError, match=r"^The global batch is complete: call step\(\)"):
        trainer.backward(third)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^global_batch_size is 2; it must be at least 3"):
        elastic(data(8), 3, 0, global_batch_size=2)
    with pytest.raises(ConfigurationError, match=r"^model is a Sequential, which does not average"):
        elastic(data(8), 3, 0, model=network(), global_batch_size=4)
    with pytest.raises(ConfigurationError, match=r"^The data set has 8 samples, too few for one"):
        elastic(data(8), drop_last=True, global_batch_size=9)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"^sampler is a range; it must be an Elastic"):
        ElasticTrainer(model, optimizer, range(3), global_batch_size=2)
    with pytest.raises(ConfigurationError, match=r"^There is no loss yet"):
        ElasticTrainer(model, optimizer, global_batch_size=2).loss()


def test_models_whose_ranks_wait_within_a_pass_cannot_be_balanced() -> None:
    balancing._check(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(
        ConfigurationError, match=r"^balance does not go with SyncBatchNorm: its ranks"
    ):
        balancing._check(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    sharded = nn.Linear(2, 2)
    sharded.set_requires_gradient_sync = None
    with pytest.raises(ConfigurationError, match=r"^balance does not go with Linear"):
        balancing._check(nn.Sequential(sharded))
