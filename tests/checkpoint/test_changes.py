"""States that change between saves in every way: what is copied is always the state as it is."""

import copy
import operator
from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st
from random_trees import assert_same, blank, make

from dlrover.checkpoint.engine import buffers, copying
from dlrover.checkpoint.engine.copying import Copier
from dlrover.checkpoint.loading.replay import Replayer
from dlrover.checkpoint.loading.restore import Restoration
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.saver.memory import kernels, spans
from dlrover.errors import ConfigurationError

pytestmark = pytest.mark.torch

State = dict[str, dict]
BUFFER = 1 << 16


def begin() -> State:
    """Enough tensors in one dict that the walk remembers it, and others."""
    many = {f"t{n}": torch.randn(2 + n % 3, 4) for n in range(20)}
    odd = {"z": torch.randn(4, dtype=torch.complex64), "turned": torch.randn(3, 5).t()}
    return {"many": many, "odd": odd, "step": {"number": 0}}


def put(state: State, key: str, tensor: torch.Tensor) -> None:
    state["many"][key].data = tensor


def tie(state: State, key: str) -> None:
    state["many"][key] = state["many"]["t0"]


def grow_storage(state: State, key: str) -> None:
    tensor = state["many"][key]
    if tensor.untyped_storage().resizable():
        tensor.untyped_storage().resize_(4096)


def moved_view(state: State, key: str) -> None:
    tensor = state["many"][key]
    base = torch.randn(tensor.numel() + 3, dtype=torch.float64).to(tensor.dtype)
    tensor.set_(base.untyped_storage(), 3, tensor.shape, base[3:].view(tensor.shape).stride())


def negative(state: State, key: str) -> None:
    """The negative of the memory that a tensor has had, at the same address."""
    pairs = torch.view_as_complex(torch.randn(4, 2))
    state["many"][key] = pairs.imag
    state["many"][key].data = pairs.conj().imag


def swap_keys(state: State, key: str) -> None:
    many = state["many"]
    many["t1"], many[key] = many[key], many["t1"]


def reorder(state: State, key: str) -> None:
    state["many"][key] = state["many"].pop(key)


def count(state: State, _: str) -> None:
    state["step"]["number"] += 1


CHANGES: dict[str, Callable[[State, str], object]] = {
    "nothing": lambda state, key: None,
    "content": lambda state, key: state["many"][key].zero_(),
    "replaced": lambda state, key: state["many"].update({key: torch.randn(2, 4)}),
    "replaced by another type": lambda state, key: state["many"].update({key: torch.ones(8).int()}),
    "data": lambda state, key: put(state, key, torch.randn(2, 4)),
    "data of the same memory": lambda state, key: put(state, key, state["many"][key].view(-1)),
    "data of another type": lambda state, key: put(
        state, key, state["many"][key].contiguous().view(torch.uint8)
    ),
    "turned in place": lambda state, key: state["many"][key].squeeze().t_(),
    "turned": lambda state, key: put(state, key, state["many"][key].t()),
    "resized": lambda state, key: state["many"].update({key: torch.randn(3).resize_(2, 5).zero_()}),
    "larger storage": grow_storage,
    "moved view": moved_view,
    "negative": negative,
    "conjugate": lambda state, key: put(state, "t3", torch.randn(4, dtype=torch.cfloat).conj()),
    "tied": tie,
    "with a gradient": lambda state, key: state["many"][key].requires_grad_(),
    "new key": lambda state, key: state["many"].update({f"new {key}": torch.randn(3)}),
    "removed key": lambda state, key: state["many"].pop(key),
    "reordered": reorder,
    "swapped": swap_keys,
    "plain value": count,
    "a dict instead": lambda state, key: state["many"].update({key: {"inner": torch.ones(2)}}),
    "empty": lambda state, key: put(state, key, torch.zeros(0, 3)),
    "expanded": lambda state, key: put(state, key, torch.randn(1, 4).expand(3, 4)),
    "a part of another": lambda state, key: state["many"].update({key: state["many"]["t0"][:1]}),
    "None instead": lambda state, key: state["many"].update({key: None}),
    "a value of another type": lambda state, key: state["step"].update(number=1.5),
    "a tensor in a tuple": lambda state, key: state["step"].update(pair=(1, torch.randn(2))),
    "another form": lambda state, key: state["odd"].update(
        z=make("complex64", (2, 3), "strided", 1)
    ),
}
keys = st.sampled_from([f"t{n}" for n in range(20)])


def check(copier: Copier, state: State, buffer: torch.Tensor) -> None:
    """Copy, and compare the content and the checksums."""
    packed = copier.layout_of(state)
    buffer.fill_(77)
    copier.copy(buffer)
    expected = copy.deepcopy(state)
    layout = msgspec.msgpack.decode(packed.encoded, type=layouts.Layout)
    assert packed.layout_hash == layout.hash
    layouts.check(layout, packed.data_bytes)
    target = blank(state)
    skeleton = layouts.decode(layout.skeleton)
    Restoration(target, skeleton, layout.entries).run(buffers.views(buffer, layout.entries))
    assert_same(target, expected)
    assert (copier.sums is not None) == kernels().native
    if copier.sums is not None:
        offsets, sizes = spans(layout.entries)
        found = kernels().hash(offsets + buffer.data_ptr(), sizes)
        assert copier.sums.tolist() == found.tolist()


def follow(changes: list[tuple[str, str, int]]) -> None:
    """Check a state after each change: its name, a key and the number of a buffer."""
    state, copier = begin(), Copier()
    copier.threads = 2
    buffers = [torch.zeros(BUFFER, dtype=torch.uint8) for _ in range(3)]
    for buffer in buffers:
        check(copier, state, buffer)
    for change, key, number in changes:
        if isinstance(state["many"].get(key), torch.Tensor):
            try:
                CHANGES[change](state, key)
            except RuntimeError:  # torch refuses it for a tensor that was changed before
                continue
            check(copier, state, buffers[number])
            check(copier, state, buffers[number - 1])


@pytest.fixture(params=["compared", "asked"])
def walk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both walks: PyTorch compares the kinds of many tensors in one call, or each tensor is asked."""
    monkeypatch.setattr(copying, "_comparison_sees_all", lambda: request.param == "compared")


def test_this_version_of_pytorch_compares_the_kinds_of_many_tensors_in_one_call():
    assert copying._comparison_sees_all()


@pytest.mark.parametrize("blind", ["conj", "_neg_view"])
def test_a_comparison_that_overlooks_what_matters_is_not_used(blind, monkeypatch):
    """As if the views were of the same kind."""
    owner = torch.Tensor if blind == "conj" else torch
    monkeypatch.setattr(owner, blind, lambda tensor: tensor)
    assert not copying._comparison_sees_all.__wrapped__()


@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("native", ["auto", "off"])
def test_each_change_is_noticed(native: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DLROVER_NATIVE", native)
    follow([(name, f"t{5 + n % 15}", n % 3) for n, name in enumerate(CHANGES)])


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("native", ["auto", "off"])
def test_any_changes_are_noticed(native: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DLROVER_NATIVE", native)
    changes = st.tuples(st.sampled_from(sorted(CHANGES)), keys, st.integers(0, 2))
    settings(deadline=None, max_examples=40)(given(st.lists(changes, max_size=6))(follow))()


def test_a_tensor_whose_storage_was_made_smaller_is_refused():
    state, copier = begin(), Copier()
    copier.layout_of(state)
    state["many"]["t4"].untyped_storage().resize_(0)
    with pytest.raises(
        ConfigurationError, match=r"many\.t4 needs 48 bytes, and its storage has only 0"
    ):
        copier.layout_of(state)
    with pytest.raises(ConfigurationError, match=r"many\.t4 needs 48 bytes"):
        Copier().layout_of(state)


def test_a_storage_that_is_smaller_at_its_old_address_is_refused():
    """So much memory is mapped by itself, so that the kernel finds the same place for as many pages."""
    tensor, copier = torch.empty((1 << 26) + 64, dtype=torch.uint8), Copier()
    state, address = {"a": tensor}, tensor.data_ptr()
    copier.layout_of(state)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(tensor.nbytes - 8)
    assert tensor.data_ptr() == address, "the test needs the same address"
    needs = "a needs 67108928 bytes, and its storage has only 67108920"
    with pytest.raises(ConfigurationError, match=needs):
        copier.layout_of(state)


def test_a_tensor_with_gaps_whose_last_elements_are_beyond_its_storage_is_refused():
    """Its bytes alone would fit there."""
    tensor = torch.ones(100)[::2]
    tensor.untyped_storage().resize_(tensor.nbytes)
    with pytest.raises(ConfigurationError, match="a needs 396 bytes, and its storage has only 200"):
        Copier().layout_of({"a": tensor})


def test_after_a_refused_save_a_tensor_that_moved_and_moved_back_is_copied_as_it_is():
    there, rest = torch.arange(24.0).view(4, 6).t(), torch.ones(10)
    state, copier, buffer = {"a": there, "b": rest}, Copier(), torch.zeros(512, dtype=torch.uint8)
    copier.layout_of(state)
    copier.copy(buffer)
    state["a"], state["b"] = torch.zeros(4, 6).t(), torch.ones(10)
    state["b"].untyped_storage().resize_(0)
    with pytest.raises(ConfigurationError, match="b needs 40 bytes"):
        copier.layout_of(state)
    state["a"], state["b"] = there, rest
    packed = copier.layout_of(state)
    copier.copy(buffer)
    entries = msgspec.msgpack.decode(packed.encoded, type=layouts.Layout).entries
    assert torch.equal(buffers.views(buffer, entries)[0], there)


@pytest.mark.parametrize("end", ["before", "after"])
def test_after_an_interrupted_save_a_tensor_that_moved_is_copied_from_its_place(end, monkeypatch):
    copier, before, now = Copier(), torch.zeros(8, 8).T, torch.ones(8, 8).T
    packed = copier.layout_of({"a": before})
    buffer = torch.zeros(1024, dtype=torch.uint8)
    copier.copy(buffer)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if end == "after":
            patched.setattr(copying._CopyPlan, "replace", interrupted)
        else:
            patched.setattr(torch.Tensor, "untyped_storage", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copier.layout_of({"a": now})
    for tensor in (now, before):
        copier.layout_of({"a": tensor})
        copier.copy(buffer)
        entries = msgspec.msgpack.decode(packed.encoded, type=layouts.Layout).entries
        assert torch.equal(buffers.views(buffer, entries)[0], tensor)


class Odd(torch.Tensor):
    """A tensor with methods of its own."""


@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize(
    "make_odd",
    [
        lambda: torch.eye(4).to_sparse(),
        pytest.param(
            lambda: torch.eye(4).to_sparse_csr(),
            marks=pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
        ),
        lambda: torch.eye(4).to_mkldnn(),
        lambda: torch.eye(4, device="meta"),
        lambda: torch.eye(4).as_subclass(Odd),
        torch.nn.parameter.UninitializedParameter,
        pytest.param(
            lambda: torch.nested.nested_tensor([torch.eye(4), torch.ones(1, 4)]),
            marks=pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
        ),
    ],
)
def test_a_tensor_that_becomes_one_that_cannot_be_kept_is_refused_as_at_the_first_save(make_odd):
    state, copier = {"many": {"a": torch.zeros(4, 4), "b": torch.ones(2)}}, Copier()
    copier.layout_of(state)
    state["many"]["a"] = make_odd()
    with pytest.raises(ConfigurationError, match=r"The tensor many\.a .*, which is not supported"):
        copier.layout_of(state)


SAME = (
    "nothing",
    "a value of another type",
    "content",
    "replaced",
    "data",
    "moved view",
    "larger storage",
    "plain value",
)
"""Changes after which a state still has the tensors that it had, with other content."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("changed", ["the saved one", "the live one"])
def test_a_replay_restores_what_was_saved_or_leaves_it_to_others(change: str, changed: str):
    states = saved, live = begin(), begin()
    CHANGES[change](states[changed == "the live one"], "t6")
    live["step"].update(number=7, more=[1, (2, "x")])
    saved["step"].update(more=[1, (3, "y")])
    copier, buffer = Copier(), torch.zeros(BUFFER, dtype=torch.uint8)
    packed = copier.layout_of(saved)
    copier.copy(buffer)
    found = Replayer(live, Copier()).plan(packed.encoded)
    assert found is not None or change not in SAME
    if found is not None:
        entries = msgspec.msgpack.decode(packed.encoded, type=layouts.Layout).entries
        tensors = list(live["many"].values())
        found.run(buffers.views(buffer, entries))
        assert_same(live, saved)
        assert all(map(operator.is_, tensors, live["many"].values()))


def test_a_state_with_objects_or_with_tensors_below_plain_values_is_not_replayed():
    model = torch.nn.Linear(2, 2)
    packed = Copier().layout_of({"model": model.state_dict(), "values": [1, torch.ones(2)]})
    assert (
        Replayer({"model": model, "values": [1, torch.ones(2)]}, Copier()).plan(packed.encoded)
        is None
    )
    other = {"model": model.state_dict(), "values": [2, torch.ones(2)]}
    assert Replayer(other, Copier()).plan(packed.encoded) is None
    other["values"][0] = 1
    assert Replayer(other, Copier()).plan(packed.encoded) is not None
