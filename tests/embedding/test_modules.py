"""The PyTorch modules give the outputs and gradients of torch's own, on rows of a table."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest

from dlrover.embedding.options import decoded
from dlrover.embedding.remote.table import RemoteTable
from dlrover.embedding.table import HashTable, text_keys
from dlrover.errors import ConfigurationError
from tests.embedding.servers import DIM, OPTIONS, cluster

torch = pytest.importorskip("torch")
nn = torch.nn
modules = pytest.importorskip("dlrover.embedding.modules")
EmbeddingOptimizer, prefetched = modules.EmbeddingOptimizer, modules.prefetched
HashEmbedding, HashEmbeddingBag = modules.HashEmbedding, modules.HashEmbeddingBag
pytestmark = pytest.mark.torch


def plain() -> HashTable:
    return HashTable.of(decoded(OPTIONS))


def filled(count: int = 50) -> tuple[HashTable, nn.Embedding]:
    """A table and a module of torch with equal rows."""
    table, module = plain(), nn.Embedding(count, DIM)
    keys = np.arange(count)
    table.lookup(keys)
    with torch.no_grad():
        table.update(keys, table.peek(keys) - module.weight.numpy())
    return table, module


def rows(table: HashTable, count: int = 50) -> torch.Tensor:
    return torch.from_numpy(table.peek(np.arange(count)))


def sgd(module: nn.Embedding | nn.EmbeddingBag) -> None:
    with torch.no_grad():
        module.weight -= module.weight.grad
        module.weight.grad = None


def test_an_embedding_is_torchs_with_rows_that_a_table_updates() -> None:
    table, module = filled()
    ours = HashEmbedding(table)
    assert not list(ours.parameters())
    for seed in range(3):
        keys = torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(seed))
        found, expected = ours(keys), module(keys)
        torch.testing.assert_close(found, expected)
        (found**2).sum().backward()
        (expected**2).sum().backward()
        sgd(module)
        torch.testing.assert_close(rows(table), module.weight.detach())


def test_evaluation_inserts_nothing_and_has_no_gradient() -> None:
    table = plain()
    ours = HashEmbedding(table).eval()
    assert (ours(torch.tensor([5, 6])) == 0).all()
    assert len(table) == 0
    ours.train()
    with torch.no_grad():
        assert not ours(torch.tensor([5])).requires_grad
    assert len(table) == 1


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_is_torchs(mode: str) -> None:
    table, module = filled()
    ours = HashEmbeddingBag(table, mode=mode)
    theirs = nn.EmbeddingBag(50, DIM, mode=mode, _weight=module.weight)
    keys, offsets = torch.tensor([3, 4, 3, 9, 1]), torch.tensor([0, 2, 2, 4])
    found, expected = ours((keys, offsets)), theirs(keys, offsets)
    torch.testing.assert_close(found, expected)
    (found**2).sum().backward()
    (expected**2).sum().backward()
    sgd(theirs)
    torch.testing.assert_close(rows(table), theirs.weight.detach())
    table_of_keys = torch.tensor([[1, 2], [2, 2]])
    torch.testing.assert_close(ours(table_of_keys), theirs(table_of_keys))


def test_features_have_rows_of_their_own_and_one_request() -> None:
    table = plain()
    ours = HashEmbeddingBag(table, ["user", "item"])
    keys = torch.tensor([[1], [2]])
    asked = []
    lookup = table.lookup
    table.lookup = lambda given: (asked.append(given), lookup(given))[1]
    out = ours({"item": keys, "user": keys}, {"user": torch.ones(2, 1), "item": torch.zeros(2, 1)})
    assert out.shape == (2, 2 * DIM)
    assert len(asked) == 1
    assert len(table) == 4
    assert (out[:, DIM:] == 0).all(), "the item's weights are 0"
    with pytest.raises(
        ConfigurationError, match="bags has user; the features user, item are expected"
    ):
        ours({"user": keys})
    with pytest.raises(ConfigurationError, match="features has a name twice: a, a"):
        HashEmbeddingBag(table, ["a", "a"])


def test_held_gradients_are_applied_once_in_step() -> None:
    table, module = filled()
    ours = HashEmbedding(table)
    optimizer = EmbeddingOptimizer(nn.Sequential(ours))
    before = rows(table)
    for keys in (torch.tensor([1, 2]), torch.tensor([2, 3])):
        (ours(keys) ** 2).sum().backward()
        (module(keys) ** 2).sum().backward()
    torch.testing.assert_close(rows(table), before)
    optimizer.step()
    sgd(module)
    torch.testing.assert_close(rows(table), module.weight.detach())
    ours(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    torch.testing.assert_close(rows(table), module.weight.detach())
    with pytest.raises(ConfigurationError, match="Linear has no HashEmbedding"):
        EmbeddingOptimizer(nn.Linear(1, 1))


def one_update_of_two_towers(ours: list, tables: list) -> None:
    """Two towers with keys in common, and one backward pass: the tables have one update of each key."""
    whole = HashTable.of(tables[0].options)
    keys, others = np.array([1, 2, 3]), np.array([2, 3, 4])
    expected = whole.lookup(np.concatenate([keys, others]))
    loss = (ours[0](torch.from_numpy(keys)) ** 2).sum() + (
        ours[1](torch.from_numpy(others)) ** 2
    ).sum()
    loss.backward()
    whole.update(np.concatenate([keys, others]), 2 * expected)
    np.testing.assert_allclose(tables[0].peek(np.arange(6)), whole.peek(np.arange(6)), rtol=1e-5)


@pytest.mark.parametrize("modules", [1, 2])
def test_a_key_of_several_lookups_has_one_update_in_a_backward_pass(modules: int) -> None:
    table = HashTable(DIM, optimizer="adam", learning_rate=0.5)
    ours = [HashEmbedding(table) for _ in range(modules)]
    one_update_of_two_towers([ours[0], ours[-1]], [table])


def test_a_key_of_several_lookups_has_one_update_on_servers() -> None:
    with cluster(2) as (_, group):
        tables = [RemoteTable(group, "users", HashTable(DIM, optimizer="adam")) for _ in range(2)]
        one_update_of_two_towers([HashEmbedding(table) for table in tables], tables)


def test_modules_that_share_a_table_have_one_update_in_a_step() -> None:
    table = HashTable(DIM, optimizer="adam", learning_rate=0.5)
    whole = HashTable.of(table.options)
    model = nn.ModuleList([HashEmbedding(table), HashEmbedding(table)])
    optimizer = EmbeddingOptimizer(model)
    out = model[0](torch.tensor([1, 2])).sum() + model[1](torch.tensor([2, 3])).sum()
    out.backward(retain_graph=True)
    out.backward()
    optimizer.step()
    whole.lookup(np.array([1, 2, 3]))
    whole.update(np.array([1, 2, 3]), np.array([[2.0], [4], [2]]) * np.ones(DIM))
    np.testing.assert_allclose(table.peek(np.arange(5)), whole.peek(np.arange(5)), rtol=1e-5)


def test_a_backward_pass_that_fails_changes_no_row() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("the pass fails")

    table, _ = filled()
    ours, before = HashEmbedding(table), rows(table)
    fails = Fails.apply(torch.ones(1, requires_grad=True))
    later = ours(torch.tensor([2]))  # what was made last has its gradient first
    with pytest.raises(RuntimeError, match="the pass fails"):
        (fails.sum() + later.sum()).backward()
    assert (rows(table) == before).all()
    ours(torch.tensor([3])).sum().backward()
    assert (rows(table) != before).any(1).nonzero().tolist() == [[3]]


def test_rows_of_a_step_are_freed_after_it_without_the_collector() -> None:
    ours = HashEmbedding(plain())
    fetch, rows = ours._fetch, []

    def noted(keys: torch.Tensor, *, insert: bool):
        found = fetch(keys, insert=insert)
        rows.append(weakref.ref(found.rows))
        return found

    ours._fetch = noted
    gc.disable()
    try:
        ours(torch.arange(5)).sum().backward()
        assert [each() for each in rows] == [None]
    finally:
        gc.enable()


def test_rows_that_were_fetched_ahead_are_used() -> None:
    table = plain()
    ours = HashEmbedding(table)
    asked: list[int] = []
    lookup = table.lookup
    table.lookup = lambda given: (asked.append(len(given)), lookup(given))[1]
    batches = [torch.tensor([step, step + 1]) for step in range(5)]
    seen = []
    for batch in prefetched(batches, ours, lambda batch: batch):
        seen.append(batch)
        assert ours(batch).shape == (2, DIM)
    assert seen == batches
    assert len(asked) == 5, "each batch is fetched once"


def test_rows_of_bags_that_were_fetched_ahead_are_used() -> None:
    for features in ((), ("user", "item")):
        table = plain()
        ours = HashEmbeddingBag(table, features)
        asked: list[int] = []
        lookup = table.lookup
        table.lookup = lambda given, asked=asked, lookup=lookup: (
            asked.append(len(given)),
            lookup(given),
        )[1]
        keys = [torch.tensor([[step, step + 1]]) for step in range(5)]
        batches = [dict.fromkeys(features, each) if features else each for each in keys]
        for batch in prefetched(batches, ours, lambda batch: batch):
            assert ours(batch).shape == (1, DIM * max(1, len(features)))
        assert len(asked) == 5, "each batch is fetched once"


def test_rows_that_were_fetched_ahead_for_evaluation_are_not_used_in_training() -> None:
    ours, batches = HashEmbedding(plain()), [torch.tensor([step]) for step in range(3)]
    ours.eval()
    for batch in prefetched(batches, ours, lambda batch: batch):
        ours.train()
        before = ours(batch)
        before.sum().backward()
        assert (ours.table.peek(batch) == before.detach() - 1).all()
        ours.eval()


def test_weights_have_the_shape_of_the_keys() -> None:
    keys, features = torch.tensor([[1, 2, 3], [4, 5, 6]]), ["user", "item"]
    one, two = HashEmbeddingBag(plain()), HashEmbeddingBag(plain(), features)
    bags = {"user": keys, "item": (torch.tensor([1, 2]), torch.tensor([0, 1]))}
    weights = {"user": torch.ones(2, 3), "item": torch.ones(2)}
    torch.testing.assert_close(two(bags, weights), two(bags))
    shape = r"have shape \(3, 2\); that of the keys, \(2, 3\), is accepted"
    for bag, given, weight, words in (
        (one, keys, torch.ones(3, 2), "weights " + shape),
        (two, bags, weights | {"user": torch.ones(3, 2)}, "weights of user " + shape),
        (two, bags, torch.ones(2, 3), "weights has Tensor; the features user, item are expected"),
        (two, bags, {"user": torch.ones(2, 3)}, "weights has user; the features user, item are"),
        (HashEmbeddingBag(plain(), mode="max"), keys, torch.ones(2, 3), "mode is 'max'; weights"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            bag(given, weight)


def test_two_bags_are_not_taken_for_keys_and_offsets() -> None:
    ours = HashEmbeddingBag(plain())
    keys, offsets = torch.tensor([3, 4, 3]), torch.tensor([0, 2])
    torch.testing.assert_close(ours((keys, offsets.int())), ours((keys, offsets)))
    with pytest.raises(ConfigurationError, match=r"a list of 2 tensors; .* or a tuple of keys and"):
        ours([keys, offsets])
    with pytest.raises(
        ConfigurationError, match=r"offsets have type torch\.float32; int64 or int32"
    ):
        ours((keys, offsets.float()))


def test_texts_are_keys_of_features() -> None:
    table = plain()
    ours = HashEmbeddingBag(table, ["user", "item"])
    keys = torch.from_numpy(text_keys(["anna", "bert"]))
    out = ours({"user": keys[:1, None], "item": keys[1:, None]})
    out.sum().backward()
    (user,) = table.peek(ours.table_keys("user", keys[:1]))
    assert (user == 2).all()
    assert (user == table.peek(ours.table_keys("user", text_keys(["anna"])))[0]).all()
    assert (table.peek(ours.table_keys("item", keys[:1])) == 0).all()
    assert (plain().lookup(["anna"]) == plain().lookup(text_keys(["anna"]))).all()
    assert text_keys([]).dtype == np.int64
    with pytest.raises(ConfigurationError, match="feature is 'age'; accepted are user, item"):
        ours.table_keys("age", keys)
    for wrong in (["anna"], {"user": [["anna"]], "item": [["bert"]]}):
        with pytest.raises(ConfigurationError, match=r"type list; .* text_keys returns"):
            (ours if isinstance(wrong, dict) else HashEmbedding(table))(wrong)


def test_bags_without_keys_are_zeros() -> None:
    for mode in ("sum", "mean", "max"):
        ours = HashEmbeddingBag(plain(), mode=mode)
        assert (ours(torch.zeros((2, 0), dtype=torch.int64)) == torch.zeros(2, DIM)).all()


def test_keys_are_integers() -> None:
    with pytest.raises(
        ConfigurationError, match=r"keys have type torch.float32; int64 is accepted"
    ):
        HashEmbedding(plain())(torch.ones(2))
    for keys in (torch.zeros(2, 0), (torch.ones(2), torch.tensor([0]))):
        with pytest.raises(ConfigurationError, match=r"keys have type torch.float32; int64 is"):
            HashEmbeddingBag(plain(), ["user"])({"user": keys})


def test_what_torch_modules_take_and_these_do_not_is_named() -> None:
    with pytest.raises(ConfigurationError, match="table is 4; a HashTable, or what open_table"):
        HashEmbedding(4)
    with pytest.raises(ConfigurationError, match="features is 'user'; a list of names"):
        HashEmbeddingBag(plain(), "user")
    bag = HashEmbeddingBag(plain(), ["a", "b"])
    with pytest.raises(ConfigurationError, match="bags has 1 of a, 2 of b; the same number"):
        bag({"a": torch.tensor([[1]]), "b": torch.tensor([[1], [2]])})
    with pytest.raises(TypeError, match=r"cannot be pickled or copied; save it, .* HashTable.load"):
        copy.deepcopy(bag)
