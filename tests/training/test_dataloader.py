"""A loader that tunes itself reads what a plain one reads, with real processes."""

from __future__ import annotations

import re
import time
from statistics import median

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from dlrover.data import dataloader  # noqa: E402
from dlrover.data.dataloader import ElasticDataLoader  # noqa: E402
from dlrover.data.dataset import ElasticDataset  # noqa: E402
from dlrover.errors import ConfigurationError  # noqa: E402
from dlrover.planning.tuning import Choice  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

READING, TRAINING = 0.1, 0.02


class Slow:
    """Samples that take a while, as from a network disk."""

    def __init__(self, size: int, seconds: float = 0.0) -> None:
        self.size, self.seconds = size, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


class Scripted:
    """Changes the number of processes after every window, whatever was measured."""

    def __init__(self, *counts: int) -> None:
        self.left, self.count = list(counts), 0

    def handle(self, _window) -> Choice:
        self.count = self.left.pop(0) if self.left else self.count
        return Choice(self.count, "because")


@pytest.fixture
def short_windows(monkeypatch) -> None:
    monkeypatch.setattr(dataloader, "BATCHES", 2)
    monkeypatch.setattr(dataloader, "SECONDS", 0.0)


def test_the_wait_for_slow_data_falls(monkeypatch, caplog) -> None:
    monkeypatch.setattr(dataloader, "BATCHES", 5)
    monkeypatch.setattr(dataloader, "SECONDS", 0.2)
    loader = ElasticDataLoader(Slow(60, READING), 1, auto_tuning=True, max_workers=8)
    waits, seen, batches = [], [], iter(loader)
    while True:
        asked = time.monotonic()
        batch = next(batches, None)
        if batch is None:
            break
        waits.append(time.monotonic() - asked)
        seen += batch.tolist()
        time.sleep(TRAINING)
    assert seen == list(range(60))
    assert loader.num_workers > 0
    assert re.search(r"The loader's processes: [2-4] from now on, 0 until now", caplog.text)
    assert median(waits[-20:]) < median(waits[:5]) / 2


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("persistent", [False, True])
def test_samples_and_random_numbers_stay_what_they_are(persistent) -> None:
    def read(loader) -> list:
        torch.manual_seed(3)
        found = [(batch.tolist(), torch.rand(()).item()) for batch in loader]
        return found + [(batch.tolist(), torch.rand(()).item()) for batch in loader]

    options = {"shuffle": True, "num_workers": 1, "persistent_workers": persistent}
    tuned = ElasticDataLoader(Slow(101), 3, auto_tuning=True, **options)
    tuned._readers = Scripted(2, 1, 3)
    found = read(tuned)
    assert tuned._readers.left == []
    assert tuned.num_workers == 3
    assert found == read(DataLoader(Slow(101), 3, **options))
    assert len(tuned) == 34


@pytest.mark.usefixtures("short_windows")
def test_a_data_set_that_is_dealt_is_read_once() -> None:
    data = ElasticDataset(Slow(200), shuffle=True)
    try:
        loader = data.loader(4, auto_tuning=True)
        loader._loader._readers = Scripted(2, 0, 1)
        seen = []
        for count, batch in enumerate(loader, 1):
            seen += batch.tolist()
            if count == 7:
                break
        for batch in loader:
            seen += batch.tolist()
    finally:
        data.close()
    assert loader._loader.num_workers == 1
    assert sorted(seen) == list(range(200))


def test_it_is_a_plain_loader_unless_it_is_told() -> None:
    loader = ElasticDataLoader(Slow(10), 2)
    assert loader._readers is None
    assert [batch.tolist() for batch in loader] == [[n, n + 1] for n in range(0, 10, 2)]

    class Numbers(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    assert ElasticDataLoader(Numbers(), 2, auto_tuning=True)._readers is None
    with pytest.raises(
        ConfigurationError, match="max_workers is 1; it must be at least num_workers"
    ):
        ElasticDataLoader(Slow(10), num_workers=2, max_workers=1)


def test_a_rank_has_its_part_of_the_processors(monkeypatch) -> None:
    monkeypatch.setattr(dataloader.cgroup, "processors", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert dataloader.processors() == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert ElasticDataLoader(Slow(1), auto_tuning=True)._readers.most == 12
