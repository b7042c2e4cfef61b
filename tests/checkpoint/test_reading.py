"""Stored files that go away while they are read: an error that a load can deal with, never a signal."""

import errno
import os
from pathlib import Path

import pytest
import torch

from dlrover.checkpoint.engine import tree
from dlrover.checkpoint.loading.restore import Restoration
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.storage.local import BUFFER
from dlrover.checkpoint.storage.stores import ByteRange, is_damage, open_store
from dlrover.errors import InfrastructureError

SIZE = 2 * BUFFER
"""Small ranges and large ones are read into memory of different kinds."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "data").write_bytes(bytes(range(256)) * (SIZE // 256))
    return tmp_path


@pytest.mark.parametrize("nbytes", [1000, SIZE])
def test_a_file_that_shrinks_while_it_is_read_is_damaged(place, nbytes):
    reader = open_store(place).reader("step-1")
    wanted = ByteRange("data", 0, nbytes)
    before = bytes(reader.view(wanted))
    assert reader.size("data") == SIZE
    os.truncate(place / "step-1" / "data", 500)
    with pytest.raises(
        InfrastructureError, match=r"step-1/data ends at 500 bytes, within a tensor"
    ) as caught:
        reader.view(wanted)
    assert is_damage(caught.value)
    assert before[:1000] == bytes(range(256)) * 3 + bytes(range(232))


@pytest.mark.parametrize("deleted", [False, True])
def test_a_handle_that_another_machine_made_stale_is_looked_up_again(place, monkeypatch, deleted):
    reader = open_store(place).reader("step-1")
    reader.size("data")
    real, stale = os.preadv, {reader._fd("data")}

    def preadv(fd, *args):
        if fd in stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd, *args)

    monkeypatch.setattr(os, "preadv", preadv)
    if deleted:
        (place / "step-1" / "data").unlink()
        with pytest.raises(FileNotFoundError) as caught:
            reader.view(ByteRange("data", 0, 10))
        assert is_damage(caught.value)
    else:
        assert bytes(reader.view(ByteRange("data", 5, 3))) == bytes([5, 6, 7])


class Saved(list):
    """Saved tensors that can be read to where they belong; notes which were."""

    def fill(self, pending):
        self.filled = [index for _, index in pending]
        for target, index in pending:
            target.copy_(self[index])
        return []


@pytest.mark.torch
@pytest.mark.parametrize("hooked", [False, True])
def test_a_module_is_read_in_place_unless_it_changes_what_it_loads(hooked):
    module = torch.nn.Linear(3, 3, bias=False)
    content = torch.arange(9.0).view(3, 3)
    if hooked:

        def turn(_module, state, prefix, *_: object) -> None:
            state[prefix + "weight"] = state[prefix + "weight"].t()

        module.register_load_state_dict_pre_hook(turn)
    state = {"module": module}
    flat = tree.flatten(state)
    saved = Saved([content.clone()])
    skeleton = layouts.decode(layouts.encode(flat.packed))
    Restoration(state, skeleton, tree.specs(flat)).run(saved)
    expected = content.t() if hooked else content
    assert torch.equal(module.weight, expected)
    assert getattr(saved, "filled", []) == ([] if hooked else [0])


class Converting(torch.nn.Module):
    """A module of the second version, which converts a state of the first."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def _load_from_state_dict(self, state, prefix, metadata, *rest: object) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.torch
@pytest.mark.parametrize("kind", [Saved, list], ids=["read in place", "copied"])
def test_a_module_that_converts_older_states_loads_its_own_unchanged(kind):
    module = torch.nn.Sequential(Converting())
    state = {"module": module}
    flat = tree.flatten(state)
    skeleton = layouts.decode(layouts.encode(flat.packed))
    Restoration(state, skeleton, tree.specs(flat)).run(kind([torch.arange(3.0)]))
    assert torch.equal(module[0].weight, torch.arange(3.0))
