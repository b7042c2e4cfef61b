"""States on an accelerator, where there is one: `scripts/check-accelerators` runs these."""

import pytest
import torch

from dlrover.checkpoint import Checkpointer

pytestmark = [pytest.mark.slow, pytest.mark.torch]
WIDTH = 4096


@pytest.fixture
def device() -> torch.device:
    if not torch.accelerator.is_available():
        pytest.skip("there is no accelerator")
    return torch.accelerator.current_accelerator()


def busy(device: torch.device) -> None:
    """Queue about 50 ms of work of an H100."""
    matrix = torch.full((WIDTH, WIDTH), 1e-4, device=device)
    for _ in range(20):
        matrix = matrix @ matrix


@pytest.mark.parametrize("kind", ["cpu", "accelerator"])
def test_all_kinds_of_tensors_come_back(directory, kind, request):
    device = torch.device("cpu") if kind == "cpu" else request.getfixturevalue("device")

    def state(fill: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(fill)
        numbers = torch.randn(300, 70, device=device) * fill
        found = {
            str(dtype): numbers.to(dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64,
                         torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
        }  # fmt: skip
        found |= {
            "transposed": numbers.t(), "part": numbers[::2, 3:], "one": numbers.sum(),
            "nothing": numbers[:0], "host": numbers.cpu(), "conjugate": found["torch.complex64"].conj(),
        }  # fmt: skip
        return found

    saved, loaded = state(1), state(0)
    checkpointer = Checkpointer(directory, linger=0.0)
    checkpointer.save(1, saved, to="storage")
    checkpointer.wait()
    assert checkpointer.load(loaded).source == "memory"
    for name, tensor in saved.items():
        assert loaded[name].device == tensor.device
        assert torch.equal(loaded[name].cpu().resolve_conj(), tensor.cpu().resolve_conj()), name
    checkpointer.close()
    reader = Checkpointer(directory, read_only=True)
    again = state(0)
    assert reader.load(again).source == "storage"
    assert all(torch.equal(again[name].cpu(), tensor.cpu()) for name, tensor in saved.items())
    reader.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_state_is_that_of_the_call_whatever_is_queued(directory, device, overlap):
    weights = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH, device=device))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    weights.grad = torch.full_like(weights, -1.0)
    checkpointer = Checkpointer(directory, linger=0.0, overlap=overlap)
    for step in range(1, 9):
        busy(device)
        optimizer.step()  # queued behind the work: not done when `save` is called
        checkpointer.save(step, {"weights": weights})
        optimizer.step()
        checkpointer.wait()
        _, found = checkpointer.read()
        assert found["weights"].unique().tolist() == [2.0 * step - 1]
    checkpointer.close()


def test_a_state_that_grows_and_moves_between_devices(directory, device):
    checkpointer = Checkpointer(directory, linger=0.0, overlap=True)
    for step in range(1, 7):
        where = device if step % 2 else torch.device("cpu")
        state = {"grown": torch.full((step * 100_000,), float(step), device=where)}
        checkpointer.save(step, state)
        checkpointer.wait()
        loaded = {"grown": torch.zeros_like(state["grown"])}
        assert checkpointer.load(loaded).step == step
        assert torch.equal(loaded["grown"], state["grown"])
    checkpointer.close()
