"""What another version of DLRover has written: refused with an error of its own, and left as it is."""

import json
import os
import socket
import struct

import msgspec
import pytest
import torch

from dlrover.checkpoint.engine import joining, tree
from dlrover.checkpoint.engine.copying import Copier
from dlrover.checkpoint.engine.direct import DirectWriter
from dlrover.checkpoint.engine.world import TorchWorld
from dlrover.checkpoint.loading import loader as loaders, restore
from dlrover.checkpoint.loading.plan import restoring
from dlrover.checkpoint.machine.policies import KeepLast
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import protocol, wire
from dlrover.checkpoint.saver.memory import Generation
from dlrover.checkpoint.saver.protocol import JoinSaver, ValidGenerations
from dlrover.checkpoint.saver.replicas import Receiver
from dlrover.checkpoint.storage import first_save, formats, storage
from dlrover.checkpoint.storage.formats import FORMAT, OtherFormatError
from dlrover.checkpoint.storage.lease import Lease
from dlrover.checkpoint.storage.stored_step import FileRecord, Manifest, read_manifest
from dlrover.checkpoint.storage.stores import MANIFEST, open_store
from dlrover.checkpoint.tools import tools
from dlrover.errors import ConfigurationError

pytestmark = pytest.mark.torch

SAID = f"written by another version of DLRover: format 1, this one reads {FORMAT}"


class Client:
    """A saver that holds nothing in memory."""

    def look(self) -> ValidGenerations:
        return ValidGenerations(())

    def keep(self, save: SaveId | None) -> None:
        assert save is None


@pytest.fixture(params=["directory", "url"])
def place(request, tmp_path):
    return open_store(tmp_path if request.param == "directory" else f"file://{tmp_path}")


def save(place, step: int, keep: int = 100) -> str:
    """Store a step; what went wrong."""
    copier = Copier()
    layout = copier.layout(tree.flatten({"w": torch.full((4,), float(step))}))
    writer = DirectWriter(place, storage.identity(place), KeepLast(keep), 0, 1, None)
    return writer.write(SaveId(0, step, step, 1), layout, copier.sources, {})


def make_old(place, file: str) -> bytes:
    """Put a file into an earlier format, which had other fields."""
    data = json.loads(place.read(file))
    for field in ("save", "place", "xxh3_64"):
        data.pop(field, None)
    place.write(file, json.dumps({**data, "format": 1, "was": "different"}).encode())
    return place.read(file)


def loader(place) -> loaders.Loader:
    state = {"w": torch.zeros(4)}
    planner = lambda question: restoring(restore.in_place(state, frozenset()), question)  # noqa: E731
    return loaders.Loader(TorchWorld(), Client(), place, storage.identity(place), planner)


def test_a_load_stops_at_the_step_of_another_version(place):
    for step in (1, 2):
        assert not save(place, step)
    before = make_old(place, f"step-2/{MANIFEST}")
    load = loader(place)
    with pytest.raises(OtherFormatError, match=SAID):
        load.load()
    assert not load.damaged, "else the next save would rename it"
    with pytest.raises(OtherFormatError, match=SAID):
        load.load_stored(2)
    assert load.load_stored(1).step == 1
    assert place.read(f"step-2/{MANIFEST}") == before


def test_it_is_neither_replaced_nor_pruned_nor_taken_for_left_over(place):
    assert not save(place, 1)
    files = place.files("step-1").keys()
    before = make_old(place, f"step-1/{MANIFEST}")
    assert SAID in save(place, 1, keep=1)
    assert not save(place, 2, keep=1)
    storage.remove_unfinished(place, session=9)
    assert place.read(f"step-1/{MANIFEST}") == before
    assert place.files("step-1").keys() >= files


def test_the_tools_call_it_by_its_name(place):
    for step in (1, 2, 3):
        assert not save(place, step)
    make_old(place, f"step-2/{MANIFEST}")
    make_old(place, "latest")
    assert {item.step: item.state for item in tools.listing(place.url)} == {
        1: "complete", 2: "other version", 3: "complete",
    }  # fmt: skip
    with pytest.raises(OtherFormatError, match=SAID):
        tools.verify(place.url, 2)
    assert tools.prune(place.url, 1).kept == [3]
    assert 2 in storage.steps(place)


def test_what_lies_beside_the_steps_is_not_damaged_either(place):
    save(place, 1)
    make_old(place, "latest")
    with pytest.raises(OtherFormatError, match=rf"latest was {SAID}"):
        storage.newest(place)
    place.write("latest", b'{"step":1}')
    with pytest.raises(OtherFormatError, match=SAID):
        storage.tracked(place)
    place.write("latest", b'{"format":4,"step":')
    assert storage.tracked(place).step == -1
    identity = storage.identity(place)
    first_save.record(place, identity, "job", JoinSaver(1, 1, (0,)), [SaveId(0, 1, 1, 1)])
    make_old(place, "saved")
    with pytest.raises(OtherFormatError, match=SAID):
        first_save.recorded(place, identity, "job")


def test_a_lease_of_another_version_is_not_taken(place):
    lease = Lease(place, "job")
    lease.join(1)
    lease.check(1, pytest.fail)
    before = make_old(place, "lease")
    later = Lease(place, "job")
    later.join(2)
    with pytest.raises(OtherFormatError, match=SAID):
        later.check(2, pytest.fail)
    later.release()
    assert place.read("lease") == before


def test_memory_of_another_version_is_not_damaged(fd):
    generation = Generation(fd)
    copier = Copier()
    layout = copier.layout(tree.flatten({"w": torch.zeros(4)}))
    generation.seal(layout, rank=0, world_size=1, save=SaveId(0, 1, 1, 1))
    struct.pack_into("<I", generation.buffer, 8, 1)
    with pytest.raises(OtherFormatError, match=SAID):
        generation.header()


@pytest.fixture
def fd():
    fd = os.memfd_create("test")
    os.ftruncate(fd, 1 << 16)
    yield fd
    os.close(fd)


def test_savers_and_workers_of_different_versions_do_not_meet(monkeypatch):
    mine = protocol.address("/checkpoints", "x")
    monkeypatch.setattr(protocol, "FORMAT", FORMAT + 1)
    assert protocol.address("/checkpoints", "x") != mine


@pytest.mark.parametrize(
    "hello", [["SaverHello", 7, b"token"], ["SaverHello", 7, b"token", FORMAT + 1]]
)
def test_a_replica_of_another_version_is_refused(hello):
    ours, theirs = socket.socketpair()
    data = msgspec.msgpack.encode(hello)
    with theirs:
        theirs.sendall(struct.pack(">I", len(data)) + data)
        Receiver(None, ours, "10.0.0.1", "").run()
        answer = wire.expect(theirs, wire.TransferReply)
    assert not answer.wanted
    assert "another version of DLRover" in answer.problem


def test_ranks_of_different_versions_are_refused_on_all_ranks():
    told = [msgspec.msgpack.encode([FORMAT, "a"]), msgspec.msgpack.encode([FORMAT + 1])]
    with pytest.raises(ConfigurationError, match="Rank 1 runs another version of DLRover"):
        joining._refuse_other_formats(told)
    joining._refuse_other_formats(told[:1])


def test_each_flipped_bit_of_a_record_is_damage_or_changes_nothing():
    manifest = Manifest(
        step=2,
        save=SaveId(0, 2, 2, 1),
        world_size=1,
        replicated=True,
        files={},
        metrics={"loss": 0.5},
    )
    for record in (manifest, manifest.save):
        data = formats.encode(record)
        for bit in range(8 * len(data)):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            try:
                assert formats.decode(bytes(flipped), type(record), "It") == record
            except msgspec.DecodeError:
                continue


def test_the_first_records_of_this_format_have_no_checksum():
    save = SaveId(0, 2, 2, 1)
    data = json.loads(formats.encode(save))
    del data["xxh3_64"]
    assert formats.decode(json.dumps(data).encode(), SaveId, "It") == save


def test_a_load_takes_no_step_whose_place_among_the_others_is_damaged(tmp_path):
    place = open_store(tmp_path)
    for step in (1, 2):
        assert not save(place, step)
    before = place.read(f"step-1/{MANIFEST}")
    place.write(f"step-1/{MANIFEST}", before.replace(b'"number":1', b'"number":3'))
    assert loader(place).load().step == 2


def test_a_folder_with_a_number_that_no_step_can_have_is_none(place):
    assert not save(place, 1)
    place.write(f"step-{10**20}/{MANIFEST}", b"{")
    assert loader(place).load().step == 1
    assert [item.step for item in tools.listing(place.url)] == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": -1},
        {"place": "a\0"},
        {"files": {"../latest": FileRecord(1, "")}},
        {"files": {"/dev/zero": FileRecord(1, "")}},
    ],
    ids=repr,
)
def test_a_manifest_with_ranks_or_files_of_no_step_is_damaged(place, change):
    for step in (1, 2):
        assert not save(place, step)
    found = read_manifest(place, "step-2")
    place.write(f"step-2/{MANIFEST}", formats.encode(msgspec.structs.replace(found, **change)))
    assert not tools.verify(place.url, 2).whole
    assert loader(place).load().step == 1
