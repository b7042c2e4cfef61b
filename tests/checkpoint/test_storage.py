"""Files: what torch and DCP read, and what several savers write together."""

import dataclasses
import errno
import io
import os
import stat
import threading
import zipfile
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dlrover.checkpoint.engine import buffers, direct, tree
from dlrover.checkpoint.engine.copying import Copier
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.policies import KeepLast
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import memory
from dlrover.checkpoint.saver.memory import Generation
from dlrover.checkpoint.storage import persist, storage
from dlrover.checkpoint.storage.dcp import torch_file
from dlrover.checkpoint.storage.persist import PersistJob, RankPart
from dlrover.checkpoint.storage.stored_step import StoredStep, read_manifest
from dlrover.checkpoint.storage.stores import IDENTITY, MANIFEST, open_store
from dlrover.errors import ConfigurationError, InfrastructureError

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def unfinished(directory: Path, step: int, session: int) -> Path:
    return directory / f".step-{step}.{session:016x}-{step}"


@pytest.mark.parametrize("dtype", sorted(tree.DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
@pytest.mark.parametrize("at", [0, 1001])
def test_torch_reads_a_wrapped_tensor_without_trusting_it(dtype, shape, at):
    tensor = torch.ones(shape).to(tree.DTYPES[dtype])
    dense = tensor.reshape(-1)
    data = dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    head, tail = torch_file(dtype, shape, memoryview(data), at)
    assert (at + len(head)) % 64 == 0
    whole = head + data + tail
    read = torch.load(io.BytesIO(whole), weights_only=True)
    assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
    assert read.numpy(force=True).tobytes() == data if dtype == "float32" else True
    assert zipfile.ZipFile(io.BytesIO(whole)).testzip() is None


def generation(state: dict) -> tuple[Generation, layouts.Layout]:
    """A state in memory, as a saver holds it."""
    copier = Copier()
    packed = copier.layout(tree.flatten(state))
    fd = os.memfd_create("test")
    os.ftruncate(fd, memory.capacity_for(packed))
    held = Generation(fd)
    os.close(fd)
    copier.copy(torch.frombuffer(held.data, dtype=torch.uint8))
    return held, msgspec.msgpack.decode(packed.encoded, type=layouts.Layout)


def source(state: dict) -> RankPart:
    held, layout = generation(state)
    return RankPart(held.tensor_bytes, layout, memory.compute_sums(held, layout.entries))


def job(
    directory: Path,
    sources: dict[int, RankPart],
    world_size: int,
    patience: float = 10.0,
    number: int = 7,
) -> PersistJob:
    clock = threading.Event()
    return PersistJob(
        store=open_store(directory),
        save=SaveId(0, number, 7, 1),
        world_size=world_size,
        sources=sources,
        pause=lambda seconds: clock.wait(seconds) and None,
        patience=patience,
    )


def state(rank: int = 0) -> dict:
    return {
        "model": {
            "w": torch.arange(12.0).view(3, 4),
            "tied": torch.ones(2),
            "empty": torch.empty(0),
        },
        "groups": [{"lr": 0.1, "params": [0, 1]}],
        "pair": (1, torch.ones(2)),
        "rank": rank,
    }


def test_dcp_reads_every_leaf(tmp_path):
    persist.persist(job(tmp_path, {0: source(state())}, 1))
    read = {
        "model": {"w": torch.zeros(3, 4), "tied": torch.zeros(2), "empty": torch.empty(0)},
        "groups": [{"lr": 0.0, "params": []}],
        "pair": None,
        "rank": -1,
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(read, checkpoint_id=tmp_path / "step-7", no_dist=True)
    assert repr(read) == repr(state())


def test_savers_of_several_nodes_write_one_checkpoint_and_replicas_once(tmp_path):
    jobs = [job(tmp_path, {rank: source(state(rank))}, 2) for rank in range(2)]
    threads = [threading.Thread(target=persist.persist, args=(part,)) for part in reversed(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    final = tmp_path / "step-7"
    manifest = read_manifest(open_store(final), "")
    assert manifest.replicated
    assert "__1_0.distcp" not in manifest.files
    assert set(os.listdir(final)) == {*manifest.files, MANIFEST}
    with StoredStep(open_store(final), "") as stored:
        for rank in range(2):
            index = stored.index(rank)
            assert layouts.decode(index.skeleton)["rank"] == rank
            assert all(stored.verified(tensor) is not None for tensor in index.tensors)


def test_a_step_that_is_published_before_its_last_part_is_synced_needs_no_second_attempt(
    tmp_path, monkeypatch
):
    """Before, the node whose part came last tried again half a second later, with a warning."""
    other = threading.Thread(target=persist.persist, args=(job(tmp_path, {0: source(state())}, 2),))
    last = job(tmp_path, {1: source(state(1))}, 2)
    sync = last.store.sync

    def published_first(folder: str) -> None:
        other.join(20)
        sync(folder)

    monkeypatch.setattr(last.store, "sync", published_first)
    other.start()
    persist.persist(last)
    assert storage.steps(open_store(tmp_path)) == [7]


def test_a_worker_without_memory_writes_its_part_beside_those_of_savers(tmp_path):
    mine = state(1)
    copier = Copier()
    packed = copier.layout(tree.flatten(mine))
    worker = direct.DirectWriter(open_store(tmp_path), "", KeepLast(1), rank=1, world_size=2)
    saver = job(tmp_path, {0: source(state())}, 2)
    storing = threading.Thread(target=persist.persist, args=(saver,))
    storing.start()
    assert worker.write(SaveId(0, 7, 7, 1), packed, copier.sources, {}) == ""
    storing.join(20)
    with StoredStep(open_store(tmp_path), "step-7") as stored:
        assert stored.manifest.replicated
        assert layouts.decode(stored.index(1).skeleton)["rank"] == 1


def test_ranks_that_differ_keep_their_own_tensors(tmp_path):
    mine = {**state(1), "model": {**state()["model"], "w": torch.zeros(3, 4)}}
    persist.persist(job(tmp_path, {0: source(state()), 1: source(mine)}, 2))
    final = tmp_path / "step-7"
    for rank, expected in enumerate((state()["model"]["w"], torch.zeros(3, 4))):
        with StoredStep(open_store(final), "") as stored:
            found = {t.path: bytes(stored.verified(t)) for t in stored.index(rank).tensors}
        assert found["model", "w"] == expected.numpy().tobytes()
    assert not read_manifest(open_store(final), "").replicated


def test_a_node_that_never_comes_is_named(tmp_path):
    with pytest.raises(InfrastructureError, match="rank 1's index did not come"):
        persist.persist(job(tmp_path, {0: source(state())}, 2, patience=0.1))
    assert storage.steps(open_store(tmp_path)) == []


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path):
    for value in (1, 2):
        persist.persist(job(tmp_path, {0: source({"value": value})}, 1, number=value))
    with StoredStep(open_store(tmp_path), "step-7") as stored:
        assert layouts.decode(stored.index(0).skeleton) == {"value": 2}
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-7"]


@pytest.mark.parametrize("is_file", [False, True])
def test_what_another_program_keeps_under_the_name_of_a_step_is_not_deleted(tmp_path, is_file):
    theirs, moved = (tmp_path / f"step-7{suffix}" for suffix in ("", ".bad"))
    if not is_file:
        theirs.mkdir()
        theirs, moved = theirs / "model.pt", moved / "model.pt"
    theirs.write_text("mine")
    for _ in range(2):  # the second one replaces a step of ours
        persist.persist(job(tmp_path, {0: source(state())}, 1))
    assert moved.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-7", "step-7.bad"]
    assert read_manifest(open_store(tmp_path), "step-7")


def test_a_manifest_holds_what_was_measured(tmp_path):
    mine = dataclasses.replace(job(tmp_path, {0: source(state())}, 1), metrics={"loss": 0.5})
    persist.persist(mine)
    assert read_manifest(open_store(tmp_path), "step-7").metrics == {"loss": 0.5}


def test_a_directory_that_is_another_one_is_left_alone(tmp_path):
    def guard(expected: str) -> None:
        storage.check_identity(open_store(tmp_path), expected)

    mine = job(tmp_path, {0: source(state())}, 1)
    for found in ([], [IDENTITY]):
        with pytest.raises(OSError, match="not the directory any more"):
            persist.persist(dataclasses.replace(mine, guard=lambda: guard("another")))
        assert os.listdir(tmp_path) == found
        storage.identity(open_store(tmp_path))
    (tmp_path / IDENTITY).write_bytes(b"\xff" * 32)
    with pytest.raises(OSError, match="not the directory any more"):
        guard("another")
    name = storage.identity(open_store(tmp_path))
    persist.persist(dataclasses.replace(mine, guard=lambda: guard(name)))
    assert storage.steps(open_store(tmp_path)) == [7]


def test_a_directory_that_is_gone_is_not_made_again(tmp_path):
    with pytest.raises(FileNotFoundError):
        persist.persist(job(tmp_path / "gone", {0: source(state())}, 1))
    assert os.listdir(tmp_path) == []


def test_what_this_world_gave_up_is_removed_before_the_next_step(tmp_path):
    for step, session in ((5, 1), (8, 1), (5, 2)):
        unfinished(tmp_path, step, session).mkdir()
    unfinished(tmp_path, 6, 1).write_text("in the way")
    persist.persist(job(tmp_path, {0: source(state())}, 1))
    left = {unfinished(tmp_path, *key).name for key in ((8, 1), (5, 2), (6, 1))}
    assert set(os.listdir(tmp_path)) == {"latest", "step-7"} | left


def test_names_that_dcp_cannot_tell_apart_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"named a\.b"):
        persist.persist(job(tmp_path, {0: source({"a": {"b": 1}, "a.b": 2})}, 1))


def test_what_other_worlds_left_is_removed(tmp_path):
    for session in (1, 2):
        unfinished(tmp_path, 5, session).mkdir()
    storage.remove_unfinished(open_store(tmp_path), 2)
    assert os.listdir(tmp_path) == [unfinished(tmp_path, 5, 2).name]


def test_what_somebody_may_be_writing_stays(tmp_path):
    for step in (5, 6, 7):
        directory = unfinished(tmp_path, step, 1)
        directory.mkdir()
        (directory / "file").touch()
    old = unfinished(tmp_path, 5, 1)
    for path in (old, old / "file", unfinished(tmp_path, 6, 1)):
        os.utime(path, (1.0, 1.0))
    storage.remove_unfinished(open_store(tmp_path), 2, idle=60.0)
    assert sorted(os.listdir(tmp_path)) == [unfinished(tmp_path, step, 1).name for step in (6, 7)]


def test_a_directory_is_named_once(tmp_path):
    found = set()
    threads = [
        threading.Thread(target=lambda: found.add(storage.identity(open_store(tmp_path / "a"))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    assert storage.identity(open_store(tmp_path / "b")) not in found
    assert os.listdir(tmp_path / "a") == [IDENTITY]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_links_and_syncs_of_directories_is_one(tmp_path, monkeypatch, number):
    sync = os.fsync

    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(fd)

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "fsync", fsync)
    name = storage.identity(open_store(tmp_path))
    assert storage.identity(open_store(tmp_path)) == name
    persist.persist(job(tmp_path, {0: source(state())}, 1))
    assert sorted(os.listdir(tmp_path)) == [IDENTITY, "latest", "step-7"]


def test_views_of_a_layout_are_the_tensors():
    held, layout = generation(state())
    data = torch.frombuffer(held.data, dtype=torch.uint8)
    found = buffers.views(data, layout.entries)
    assert torch.equal(found[0], state()["model"]["w"])


def test_an_identity_whose_writer_has_died_gets_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "IDENTITY_WAIT", 0.1)
    (tmp_path / IDENTITY).write_bytes(b"1437d8")
    with pytest.raises(InfrastructureError, match=r"checkpoint-id is incomplete: .* Delete it\."):
        storage.identity(open_store(str(tmp_path)))
