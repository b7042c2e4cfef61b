"""Saves that return before the copy is made."""

import logging
import threading

import pytest
import torch

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.engine.copying import Copier
from dlrover.checkpoint.engine.overlap import sum_of
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.storage import faults
from dlrover.errors import ConfigurationError, InfrastructureError

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(60)]


class Training:
    """A model with buffers that change in the forward pass, and its optimizer."""

    def __init__(self, width: int = 300) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, width),
            torch.nn.BatchNorm1d(width),
            torch.nn.Linear(width, width),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = {"model": self.model, "optimizer": self.optimizer, "mine": torch.zeros(4)}
        self.width = width

    def step(self) -> None:
        loss = self.model(torch.randn(8, self.width)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.state["mine"] += 1

    def content(self) -> list[torch.Tensor]:
        tensors = [*self.model.state_dict().values(), self.state["mine"]]
        tensors += [t for state in self.optimizer.state.values() for t in state.values()]
        return [tensor.clone() for tensor in tensors]


@pytest.fixture
def begun(monkeypatch) -> threading.Event:
    """The copy waits until this is set."""
    event = threading.Event()
    event.set()

    def wait(label: str) -> None:
        if label == "save.begun":
            event.wait(10)

    monkeypatch.setattr(faults, "hook", wait)
    return event


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_what_is_kept_is_the_state_at_the_time_of_the_call(directory, begun):
    training = Training()
    training.step()
    checkpointer = Checkpointer(directory, overlap=True, linger=0.0)
    for step in range(1, 6):
        expected = training.content()
        begun.clear()
        checkpointer.save(step, training.state)
        threading.Timer(0.1, begun.set).start()  # the optimizer waits for the copy until then
        training.step()
        checkpointer.wait()
        fresh = Training()
        record = checkpointer.load(fresh.state)
        assert (record.step, record.source) == (step, "memory")
        assert equal(fresh.content(), expected)
    checkpointer.close()


def test_a_change_that_is_no_optimizers_step_is_noticed(directory, begun):
    training = Training()
    training.step()
    checkpointer = Checkpointer(directory, overlap=True, linger=0.0)
    checkpointer.save(1, training.state)
    checkpointer.wait()
    begun.clear()
    checkpointer.save(2, training.state)
    with torch.no_grad():
        training.model[2].weight.zero_()
    begun.set()
    with pytest.raises(
        InfrastructureError, match=r"Step 2 was not kept: model\.2\.weight was changed"
    ):
        checkpointer.wait()
    expected = training.content()
    begun.clear()
    checkpointer.save(3, training.state)
    with torch.no_grad():
        training.model[2].weight.add_(1)
    begun.set()
    checkpointer.wait()
    fresh = Training()
    assert checkpointer.load(fresh.state).step == 3
    assert equal(fresh.content(), expected), "it is copied in time from then on"
    checkpointer.close()


@pytest.fixture
def copied(monkeypatch) -> dict[str, object]:
    """``then``: what to do between the copy and the look at what has changed."""
    after = {"then": lambda: None}
    copy = Copier.copy

    def copy_and(self, buffer):
        copy(self, buffer)
        after["then"]()

    monkeypatch.setattr(Copier, "copy", copy_and)
    return after


def clip(training: Training) -> None:
    training.model[2].weight.data.clamp_(-0.01, 0.01)


def average(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.data.mul_(0.9)


def one_element(training: Training) -> None:
    training.model[2].weight.detach().numpy()[1, 2] = 7.0


@pytest.mark.parametrize("write", [clip, average, one_element])
def test_a_write_during_the_copy_that_torch_does_not_count_is_noticed(directory, copied, write):
    training = Training()
    training.step()
    checkpointer = Checkpointer(directory, overlap=True, linger=0.0)
    versions = [parameter._version for parameter in training.model.parameters()]
    copied["then"] = lambda: write(training)
    checkpointer.save(1, training.state)
    with pytest.raises(InfrastructureError, match="Step 1 was not kept"):
        checkpointer.wait()
    assert versions == [parameter._version for parameter in training.model.parameters()]
    checkpointer.save(2, training.state)
    checkpointer.wait()
    checkpointer.close()


@pytest.mark.parametrize("write", [clip, average])
def test_a_write_before_the_copy_begins_is_noticed(directory, begun, write):
    training = Training()
    training.step()
    checkpointer = Checkpointer(directory, overlap=True, linger=0.0)
    begun.clear()
    checkpointer.save(1, training.state)
    write(training)
    begun.set()
    with pytest.raises(InfrastructureError, match="Step 1 was not kept"):
        checkpointer.wait()
    checkpointer.close()


def test_a_state_of_all_kinds_of_tensors_is_as_it_was(directory):
    weights = [
        torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),
        torch.randn(5, 7).t(),
        torch.randn(6, 6)[::2, ::2],
        torch.tensor([float("nan"), -0.0]),
        torch.randn(9, dtype=torch.complex128),
        torch.randn(9).to(torch.bfloat16),
        torch.randn(9).to(torch.float8_e4m3fn),
        torch.zeros(0, 3),
        torch.tensor(3.0),
    ]
    model = torch.nn.Module()
    for number, weight in enumerate(weights):
        model.register_parameter(f"w{number}", torch.nn.Parameter(weight, requires_grad=False))
    checkpointer = Checkpointer(directory, overlap=True, linger=0.0)
    checkpointer.save(1, {"model": model})
    checkpointer.wait()
    _, found = checkpointer.read()
    for number, weight in enumerate(weights):
        kept = found["model"][f"w{number}"]
        assert kept.shape == weight.shape
        assert (
            kept.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(weight.contiguous().view(-1).view(torch.uint8))
        )
    checkpointer.close()


def test_an_error_of_the_copy_is_raised_by_the_next_call(directory, monkeypatch):
    checkpointer = Checkpointer(directory, overlap=True, linger=0.0)
    state = {"w": torch.ones(10)}
    checkpointer.save(1, state)
    checkpointer.wait()

    def refuse(save: SaveId, ready: int) -> int:
        raise InfrastructureError(f"no memory for step {save.step}")

    monkeypatch.setattr(checkpointer._client, "begin", refuse)
    checkpointer.save(2, state)
    with pytest.raises(InfrastructureError, match="no memory for step 2"):
        checkpointer.save(3, state)
    checkpointer.close()


def test_optimizers_do_not_wait_for_a_checkpointer_that_is_closed(directory):
    training = Training()
    checkpointer = Checkpointer(directory, overlap=True, linger=0.0)
    checkpointer.save(1, training.state)
    checkpointer.close()
    training.step()


def test_the_interval_decides_about_storage(directory):
    state = {"w": torch.ones(10)}
    checkpointer = Checkpointer(directory, interval=3, keep=10, linger=0.0)
    for step in range(1, 8):
        checkpointer.save(step, state)
    checkpointer.save(8, state, to="storage")
    checkpointer.wait()
    assert [path.name for path in sorted(directory.glob("step-*"))] == [
        "step-3",
        "step-6",
        "step-8",
    ]
    checkpointer.close()


def test_an_interval_is_picked_and_told(directory, caplog):
    caplog.set_level(logging.INFO, "dlrover")
    state = {"w": torch.ones(10)}
    checkpointer = Checkpointer(directory, interval="auto", hours_between_failures=1.0, linger=0.0)
    for step in range(1, 15):
        checkpointer.save(step, state)
    checkpointer.close()
    assert "Saving to memory every" in caplog.text


@pytest.mark.parametrize("interval", [0, -1, "often", 1.5])
def test_a_wrong_interval_is_refused(directory, interval):
    with pytest.raises(ConfigurationError, match="interval is"):
        Checkpointer(directory, interval=interval)


@pytest.mark.parametrize("size", [0, 1, 3, 8, 4096])
@pytest.mark.parametrize(
    "kind", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.complex128, torch.bool]
)
def test_a_sum_of_a_tensor_shows_any_change(size, kind):
    whole = torch.arange(1, size + 3).to(kind)
    for tensor in (whole, whole[1:], whole[:-1].expand(1, -1)):
        before = sum_of(tensor)
        if tensor.numel():
            tensor.view(torch.uint8).view(-1)[-1] ^= 1
            assert sum_of(tensor) != before
