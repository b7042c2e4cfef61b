"""A tf.data pipeline over data leased in shards: what it has only read ahead does not count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

tf = pytest.importorskip("tensorflow")

from dlrover.data.records import Records, acknowledged  # noqa: E402
from dlrover.errors import ConfigurationError  # noqa: E402
from dlrover.tensorflow.data import dataset  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NUMBER = tf.TensorSpec([], tf.int64)


@pytest.fixture
def read() -> Iterator:
    made: list[Records] = []

    def make(source=range(200), **options) -> Records:
        made.append(Records(source, **options))
        return made[-1]

    yield make
    for data in made:
        data.close()


def test_epochs_in_batches(read) -> None:
    data = read(epochs=2, shuffle=True)
    found = dataset(data, NUMBER, batch_size=32, prepare=lambda n: (n, n * n))
    assert found.element_spec == (tf.TensorSpec([None], tf.int64),) * 2
    for epoch in data.until_end():
        batches = [(n.numpy().tolist(), m.numpy().tolist()) for n, m in found]
        assert [len(n) for n, _ in batches] == [32] * 6 + [8]
        assert all(m == [x * x for x in n] for n, m in batches)
        order = [x for n, _ in batches for x in n]
        assert sorted(order) == list(range(200))
        if epoch == 0:
            assert order == list(read(epochs=2, shuffle=True))
    assert data.epoch == 2
    assert list(found) == []


def test_samples_of_several_parts(read) -> None:
    class Rows(list):
        def __getitem__(self, index: int) -> dict:
            return {"text": f"row {index}", "value": [index, 0.5]}

    signature = {"text": tf.TensorSpec([], tf.string), "value": tf.TensorSpec([2], tf.float32)}
    rows = list(dataset(read(Rows(range(5))), signature))
    assert [row["text"].numpy() for row in rows] == [f"row {n}".encode() for n in range(5)]
    assert rows[3]["value"].numpy().tolist() == [3, 0.5]


@pytest.mark.parametrize("prefetch", [0, 4])
def test_what_was_only_read_ahead_is_read_again(read, prefetch: int) -> None:
    data, seen = read(epochs=2), []
    for count, batch in enumerate(dataset(data, NUMBER, batch_size=8, prefetch=prefetch), 1):
        seen += batch.numpy().tolist()
        assert acknowledged([data.state_dict()]).count == 8 * count
        if count == 5:
            state = data.state_dict()
            break
    again = read(epochs=2, shard=3)
    again.load_state_dict(state)
    for _ in again.until_end():
        for batch in dataset(again, NUMBER, batch_size=10):
            seen += batch.numpy().tolist()
    assert Counter(seen) == dict.fromkeys(range(200), 2)


def test_a_loop_that_was_left_goes_on(read) -> None:
    data = read()
    found = dataset(data, NUMBER, batch_size=16)
    head = next(iter(found)).numpy().tolist()
    rest = [n for batch in found for n in batch.numpy().tolist()]
    assert sorted(head + rest) == list(range(200))
    assert data.epoch == 1


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # its length is not known
def test_keras_learns_from_each_sample_once(read) -> None:
    data = read(range(64), epochs=3, shuffle=True)
    model = tf.keras.Sequential([tf.keras.layers.Input([1]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    found = dataset(
        data, NUMBER, batch_size=8, prepare=lambda n: (tf.cast([n], tf.float32) / 64, [1.0])
    )
    for epoch in data.until_end():
        model.fit(found, shuffle=False, verbose=0)
        assert acknowledged([data.state_dict()]).count == 64 * (epoch + 1)


def test_wrong_numbers_are_named(read) -> None:
    with pytest.raises(ConfigurationError, match="prefetch is -1 and batch_size 3"):
        dataset(read(), NUMBER, batch_size=3, prefetch=-1)
