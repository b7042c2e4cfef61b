"""Data loaders over a dataset leased in shards: which batches the training has got, and which it has not."""

from collections import Counter
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dlrover.data.dataset import ElasticDataset  # noqa: E402
from dlrover.errors import ConfigurationError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

BAD = frozenset({5, 77})
LOADERS = pytest.mark.parametrize("num_workers", [0, 2])


class Squares:
    """Pairs of numbers; some cannot be read."""

    def __init__(self, bad: frozenset[int] = frozenset()) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index in self.bad:
            raise ValueError("rotten")
        return index, index * index


@pytest.fixture
def read() -> Iterator:
    made: list[ElasticDataset] = []

    def make(bad: frozenset[int] = frozenset(), **options) -> ElasticDataset:
        made.append(ElasticDataset(Squares(bad), shuffle=True, **options))
        return made[-1]

    yield make
    for data in made:
        data.close()


def numbers(batches) -> list[int]:
    found = []
    for first, second in batches:
        assert torch.equal(first * first, second)
        found += first.tolist()
    return found


@LOADERS
def test_batches_in_the_order_of_the_samples(read, num_workers: int) -> None:
    loader = read(epochs=2).loader(32, num_workers=num_workers)
    expected = [number for number, _ in read()]
    batches = list(loader)
    assert [len(first) for first, _ in batches] == [32] * 6 + [8]
    assert numbers(batches) == expected
    assert sorted(numbers(loader)) == list(range(200))
    assert list(loader) == []


@LOADERS
def test_what_was_only_read_ahead_is_read_again_after_a_restore(read, num_workers: int) -> None:
    data = read(epochs=2)
    seen: list[int] = []
    for count, batch in enumerate(data.loader(16, num_workers=num_workers), 1):
        seen += numbers([batch])
        if count == 5:
            state = data.state_dict()
            break
    again = read(epochs=2, shard=3)
    again.load_state_dict(state)
    assert len(seen) == 80
    for _ in again.until_end():
        seen += numbers(again.loader(10))
    assert Counter(seen) == dict.fromkeys(range(200), 2)


@LOADERS
def test_a_loader_that_was_left_goes_on(read, num_workers: int) -> None:
    data = read()
    loader = data.loader(16, num_workers=num_workers)
    head = numbers([next(iter(loader))])
    assert len(head) == 16
    assert sorted(head + numbers(loader)) == list(range(200))


@LOADERS
def test_loops_within_and_beside_loops_share_an_epoch(read, num_workers: int) -> None:
    data = read(epochs=2)
    loader = data.loader(16, num_workers=num_workers)
    loops = [iter(loader), iter(data.loader(16, num_workers=num_workers)), iter(loader)]
    seen = numbers(next(loop) for _ in range(2) for loop in loops)
    seen += numbers(loader)
    assert sorted(seen) == list(range(200))
    assert [list(loop) for loop in loops] == [[], [], []]
    assert data.epoch == 1


@LOADERS
def test_a_loader_goes_on_from_the_checkpoint_that_is_restored_in_its_loop(
    read, num_workers: int
) -> None:
    data = read(epochs=2)
    learned: list[int] = []
    state, then, restores = data.state_dict(), list(learned), 2
    for _ in data.until_end():
        for batch in data.loader(16, num_workers=num_workers):
            learned += numbers([batch])
            if len(learned) == 64:
                state, then = data.state_dict(), list(learned)
            elif len(learned) == 128 and restores:
                restores -= 1
                data.load_state_dict(state)
                learned = list(then)
    assert not restores
    assert Counter(learned) == dict.fromkeys(range(200), 2)


@LOADERS
def test_what_cannot_be_read_is_tried_again_and_left_out(read, num_workers: int) -> None:
    data = read(bad=BAD, attempts=2)
    found = numbers(data.loader(16, num_workers=num_workers))
    assert sorted(found) == [n for n in range(200) if n not in BAD]
    assert data.epoch == 1


def test_a_plain_data_loader_reads_in_the_training_process(read) -> None:
    assert sorted(numbers(DataLoader(read(), batch_size=16))) == list(range(200))


def test_a_plain_data_loader_with_processes_is_refused(read) -> None:
    with pytest.raises(ConfigurationError, match=r"use data.loader\(batch_size="):
        list(DataLoader(read(), batch_size=16, num_workers=1))


def test_options_of_data_loader(read) -> None:
    batches = list(read().loader(100, collate_fn=lambda samples: [a for a, _ in samples]))
    assert sorted(number for batch in batches for number in batch) == list(range(200))
    for wrong in ({"shuffle": True}, {"sampler": []}, {"drop_last": True}):
        with pytest.raises(ConfigurationError, match="does not take"):
            read().loader(2, **wrong)
    with pytest.raises(ConfigurationError, match="batch_size 0"):
        read().loader(0)


def test_a_batch_may_be_larger_than_what_a_worker_gets_at_the_end(read) -> None:
    """It holds its share of what is left and cannot go on without more."""
    batches = list(read(shard=1).loader(190))
    assert [len(first) for first, _ in batches] == [190, 10]
