import pytest
import torch
from hypothesis import example, given, settings
from random_trees import assert_same, blank, make, trees

from dlrover.checkpoint.engine import buffers, tree
from dlrover.checkpoint.engine.copying import Copier
from dlrover.checkpoint.loading.restore import Restoration
from dlrover.checkpoint.machine import layout as layouts
from dlrover.errors import ConfigurationError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def saved(copier: Copier, state) -> tuple:
    packed = copier.layout(tree.flatten(state))
    buffer = torch.zeros(packed.data_bytes + 1, dtype=torch.uint8)
    copier.copy(buffer)
    import msgspec

    layout = msgspec.msgpack.decode(packed.encoded, type=layouts.Layout)
    layouts.check(layout, packed.data_bytes)
    return layouts.decode(layout.skeleton), layout.entries, buffers.views(buffer, layout.entries)


def restore(state, skeleton, entries, views) -> None:
    Restoration(state, skeleton, entries).run(views)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(trees)
@example({"one element, not next to another": make("bfloat16", (1,), "strided", 0)})
def test_any_tree_comes_back_bit_equal(state):
    target = blank(state)
    restore(target, *saved(Copier(), state))
    assert_same(target, state)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(trees, trees)
def test_a_copier_that_knows_another_state_copies_this_one(before, state):
    copier = Copier()
    saved(copier, before)
    target = blank(state)
    restore(target, *saved(copier, state))
    assert_same(target, state)


def test_the_same_memory_seen_otherwise_is_noticed():
    copier = Copier()
    tensor = torch.arange(6, dtype=torch.float32)
    for seen in (
        tensor,
        tensor.view(2, 3),
        tensor.view(3, 2).t(),
        tensor.view(torch.int32),
        tensor,
    ):
        target = {"a": torch.zeros_like(seen)}
        restore(target, *saved(copier, {"a": seen}))
        assert torch.equal(target["a"], seen)
    value = torch.randn(4, dtype=torch.complex64)
    for seen in (value, value.conj()):
        target = {"a": torch.zeros(4, dtype=torch.complex64)}
        restore(target, *saved(copier, {"a": seen}))
        assert torch.equal(target["a"], seen)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_tensors_are_restored_in_place_and_nothing_refers_to_the_buffer():
    model, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    optimizer, fresh = (torch.optim.AdamW(m.parameters(), lr=0.5) for m in (model, other))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    skeleton, entries, views = saved(
        Copier(), {"m": model, "o": optimizer, "n": {"best": 3, "list": [1]}}
    )
    weight = other.weight
    state = {"m": other, "o": fresh, "n": {"best": None, "list": []}}
    restore(state, skeleton, entries, views)
    for view in views:
        view.zero_()
    assert other.weight is weight
    assert_same(other.state_dict(), model.state_dict())
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert state["n"] == {"best": 3, "list": [1]}
    moment = fresh.state[weight]["exp_avg"]
    restore(state, skeleton, entries, views)
    assert fresh.state[weight]["exp_avg"] is moment
    assert not moment.any()


def test_a_scheduler_that_counts_continues_as_the_saved_one():
    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        schedules = torch.optim.lr_scheduler
        parts = [
            schedules.ConstantLR(optimizer, 0.1, 2),
            schedules.MultiStepLR(optimizer, [1, 1, 3], 0.5),
        ]
        return schedules.SequentialLR(optimizer, parts, [2])

    def steps(state: dict, count: int) -> list[float]:
        rates = []
        for _ in range(count):
            state["optimizer"].step()
            state["scheduler"].step()
            rates += state["scheduler"].get_last_lr()
        return rates

    states = []
    for _ in range(2):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        states.append({"optimizer": optimizer, "scheduler": scheduler(optimizer)})
    steps(states[0], 1)
    restore(states[1], *saved(Copier(), states[0]))
    assert steps(states[1], 6) == steps(states[0], 6)


def test_tied_weights_are_kept_once():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model[1].weight = model[0].weight
    packed = Copier().layout(tree.flatten({"m": model}))
    assert packed.data_bytes < 2 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": 1}, "keys that the state has not: b"),
        ({"a": 1, "b": 2, "c": 3}, "keys that the checkpoint has not: c"),
        ({"a": torch.ones(2), "b": 2}, "a is a tensor, but not in the checkpoint"),
        ({"a": 1, "b": {"x": torch.ones(3)}}, r"b.x has shape \[3\]"),
        ({"a": 1, "b": {"x": torch.ones(2, dtype=torch.int32)}}, "b.x has shape"),
        ({"a": 1, "b": {"x": torch.ones(2), "y": 0}}, "in b that the checkpoint has not: y"),
        ({"a": 1, "b": [torch.ones(2)]}, "b is a list of 1 elements"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_stays(state, words):
    skeleton, entries, views = saved(Copier(), {"a": 5, "b": {"x": torch.zeros(2)}})
    before = repr(state)
    with pytest.raises(ConfigurationError, match=words):
        restore(state, skeleton, entries, views)
    assert repr(state) == before


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.empty(2, device="meta"), "x.0 is on the meta device"),
        (torch.eye(2).to_sparse(), "x.0 has the layout"),
    ],
)
def test_unsupported_tensors_are_named(tensor, words):
    with pytest.raises(ConfigurationError, match=words):
        Copier().layout(tree.flatten({"x": [tensor]}))


def test_the_state_that_optimizers_will_have_is_expected():
    model = torch.nn.Linear(8, 8, bias=False)
    adam = torch.optim.Adam(model.parameters())
    assert tree.expected_bytes({"o": adam}) == 2 * 8 * 8 * 4
    assert tree.expected_bytes({"o": torch.optim.SGD(model.parameters(), lr=1.0)}) == 0
    model(torch.ones(1, 8)).sum().backward()
    adam.step()
    assert tree.expected_bytes({"o": adam}) == 0
