"""The way of a state from a rank that trains to those that join."""

import threading
from concurrent import futures
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils import _pytree as pytree  # noqa: E402

from dlrover.training.replicas import healing  # noqa: E402
from dlrover.training.replicas.groups import Peers  # noqa: E402

pytestmark = pytest.mark.torch


class Part:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


STATE = {
    "matrix": torch.arange(300.0).view(10, 30).t(),
    "small": torch.tensor(3, dtype=torch.int8),
    "empty": torch.empty(0, 4),
    "half": torch.arange(33).bfloat16(),
    "conjugate": torch.randn(3, dtype=torch.cfloat).conj(),
    "right": torch.tensor([True, False, True]),
    "values": {"rate": 0.5, "names": ["a", "b"], "again": [torch.ones(5), None]},
}


def assert_same(found: Any, expected: Any) -> None:
    found, kind = pytree.tree_flatten(found)
    expected, expected_kind = pytree.tree_flatten(expected)
    assert kind == expected_kind
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        else:
            assert one == other


def heal(state: dict[str, Any], source: int, joining: list[int], ranks: int) -> list[Part]:
    """Heal with one thread for each rank; return their parts."""
    store = torch.distributed.HashStore()
    parts = [Part(state if rank == source else {}) for rank in range(ranks)]

    def one(rank: int) -> None:
        peers = Peers(list(range(ranks)), rank, lambda: None, lambda: False)
        peers._backend = torch.distributed.ProcessGroupGloo(
            store, rank, ranks, timedelta(seconds=30)
        )
        healing.Healer({"part": parts[rank]}).heal(peers, source, joining, rank)

    with futures.ThreadPoolExecutor(ranks) as threads:
        list(threads.map(one, range(ranks)))
    return parts


@pytest.mark.parametrize("chunk", [7, 1200, 64 << 20])
@pytest.mark.parametrize(("source", "joining"), [(0, [1]), (1, [3]), (2, [0, 3])])
def test_those_that_join_get_the_state_and_no_other(monkeypatch, chunk, source, joining):
    monkeypatch.setattr(healing, "CHUNK", chunk)
    parts = heal(STATE, source, joining, 4)
    for rank, part in enumerate(parts):
        if rank not in joining:
            assert part.loaded is None
            continue
        assert part.loaded is not None
        assert_same(part.loaded, STATE)
        tensors = [part.loaded["matrix"], part.loaded["half"]]
        # Each has memory of its own: a checkpoint of one would otherwise hold them all.
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)


def test_a_state_without_tensors_is_given_too():
    assert heal({"step": 3}, 0, [1], 2)[1].loaded == {"step": 3}


def test_the_ranks_that_do_not_join_make_no_room_for_the_state(monkeypatch):
    """They train, and it may be as large as their memory."""
    threads_with_room: set[int] = set()
    empty = torch.empty

    def counted(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        threads_with_room.update([threading.get_ident()] if made.nbytes >= 1 << 22 else [])
        return made

    monkeypatch.setattr(torch, "empty", counted)
    heal({"large": torch.zeros(1 << 20)}, 0, [1], 3)
    assert len(threads_with_room) == 1
