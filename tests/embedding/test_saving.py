"""Checkpoints of tables on servers: full ones and increments, restored on any number of servers."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dlrover._native.tables import slots_of
from dlrover.checkpoint.storage import local
from dlrover.checkpoint.storage.stores import StorageAwayError, open_store
from dlrover.embedding.machine.chain import TableManifest, TablePart, chain
from dlrover.embedding.options import Expiry, RowOptimizer, TableOptions, decoded
from dlrover.embedding.remote import client, saving, server, stored
from dlrover.embedding.remote.client import ServerGroup
from dlrover.embedding.remote.saving import TableCheckpoints
from dlrover.errors import ConfigurationError, InfrastructureError, NoRoomError, ProtocolError
from dlrover.spec.requests.placement import SLOTS, Abandon, LoadTables, MoveSlots, PlacementReply
from tests.embedding.servers import DIM, OPTIONS, Model, cluster, expire, train
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)


def copy(model: Model) -> Model:
    return {key: row.copy() for key, row in model.items()}


def check(group: ServerGroup, model: Model, others: Model | None = None) -> None:
    keys = np.array([*model, *(others or {})], np.int64)
    for key, row in zip(keys.tolist(), group.rows(0, DIM, keys, insert=False), strict=True):
        assert (row == model.get(key, np.zeros(DIM))).all(), key


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_chain_is_restored_on_any_number_of_servers(tmp_path: Path, count: int) -> None:
    model: Model = {}
    with cluster(2) as (made, group):
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        train(group, model, 3)
        checkpoints.save(3)
        for step in (4, 5):
            train(group, model, 1, seed=step)
            expire(group, model, 20)
            checkpoints.save(step)
        checkpoints.wait()
        saved = copy(model)
        train(group, model, 2, seed=9)
        numbers = [each.number for each in stored.manifests(open_store(str(tmp_path)))]
        assert numbers == [2, 1, 0]
    with cluster(count) as (made, group):
        group.open("users", OPTIONS)
        assert TableCheckpoints(made.directory, str(tmp_path)).load() == 5
        check(group, saved, model)
        train(group, saved, 2, seed=10)


def test_a_step_is_an_integer_of_any_type(tmp_path: Path) -> None:
    with cluster(1) as (made, group):
        group.open("users", OPTIONS)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        checkpoints.save(np.int64(7))
        for step in (1.5, "5", np.float32(7)):
            for use in (checkpoints.save, checkpoints.load):
                with pytest.raises(ConfigurationError, match=r"step is .*; an integer is accepted"):
                    use(step)
        with pytest.raises(ConfigurationError, match="step is None; an integer is accepted"):
            checkpoints.save(None)
        assert checkpoints.load() == checkpoints.load(np.int32(7)) == 7


def test_an_increment_holds_what_changed(tmp_path: Path) -> None:
    with cluster(2) as (made, group):
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        model: Model = {}
        train(group, model, 5)
        checkpoints.save(5)
        group.push(0, np.array([*model][:7], np.int64), np.ones((7, DIM), np.float32))
        checkpoints.save(6)
        checkpoints.wait()
        increment, full = stored.manifests(open_store(str(tmp_path)))
        assert sum(part.rows for part in full.parts) == len(model)
        assert sum(part.rows for part in increment.parts) == 7


def without_second(model: Model, saved: Model) -> Model:
    """Return the rows once the second of two servers is lost: those of its slots are as they were saved."""
    lost = {key for key in model if slots_of(np.array([key]))[0] >= SLOTS // 2}
    assert 0 < len(lost) < len(model)
    kept = {key: row for key, row in model.items() if key not in lost}
    return kept | {key: saved[key] for key in lost if key in saved}


def test_a_lost_server_has_the_rows_of_the_last_save_and_the_others_newer_ones(
    tmp_path: Path,
) -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        train(group, model, 3)
        checkpoints.save(3)
        checkpoints.wait()
        saved = copy(model)
        train(group, model, 2, seed=1)
        made.kill(1)
        made.start(1, start=2)
        expected = without_second(model, saved)
        check(group, expected, model)
        train(group, expected, 2, seed=2)
        assert made.recovered == [SLOTS // 2]


def test_a_server_takes_over_the_saved_rows_of_one_that_no_other_replaces(tmp_path: Path) -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        train(group, model, 3)
        checkpoints.save(3)
        checkpoints.wait()
        saved = copy(model)
        train(group, model, 2, seed=1)
        made.kill(1)
        made.directory.ask(Abandon(1, 1))
        made.settle(lambda placement: placement.servers.keys() == {0})
        expected = without_second(model, saved)
        check(group, expected, model)
        train(group, expected, 2, seed=2)
        checkpoints.save(4)
        checkpoints.wait()
        assert [e.number for e in stored.manifests(open_store(str(tmp_path)))] == [0, 0]
        after = copy(expected)
        train(group, expected, 1, seed=3)
        assert checkpoints.load() == 4
        check(group, after, expected)


def test_slots_of_a_lost_server_wait_for_a_checkpoint_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RETRY", 0.01)
    with cluster(2) as (made, group):
        model: Model = {}
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        train(group, model, 3)
        checkpoints.save(3)
        checkpoints.wait()
        restore, failed = stored.restore, list[int]()

        def restored(*given: Any) -> int:
            if len(failed) < 2:
                failed.append(1)
                raise InfrastructureError("The storage is away.")
            return restore(*given)

        monkeypatch.setattr(stored, "restore", restored)
        made.kill(1)
        made.directory.ask(Abandon(1, 1))
        made.settle(lambda placement: placement.servers.keys() == {0})
        assert len(failed) == 2
        check(group, model)


def test_a_lost_server_that_starts_again_keeps_what_it_applies_before_another_has_its_slots(
    tmp_path: Path,
) -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        train(group, model, 3)
        checkpoints.save(3)
        checkpoints.wait()
        taker = made.servers[0]
        recover, taken, go_on = taker._recover, threading.Event(), threading.Event()

        def recover_slowly(*given: Any) -> None:
            recover(*given)
            taken.set()
            assert go_on.wait(10)

        taker._recover = recover_slowly
        made.kill(1)
        made.directory.ask(Abandon(1, 1))
        assert taken.wait(10)
        made.start(1, start=2)
        made.settle(lambda placement: placement.servers[1].ready)
        train(group, model, 3, seed=1)
        go_on.set()
        made.settle(lambda placement: not placement.moves)
        train(group, model, 3, seed=2)


def test_a_server_without_room_for_the_slots_of_a_lost_one_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "RETRY", 60.0)
    options = msgspec.structs.replace(decoded(OPTIONS), memory_bytes=300_000).json()
    with cluster(2) as (made, group):
        table, keys = group.open("users", options), np.arange(100_000)
        mine = keys[slots_of(keys) < SLOTS // 2]
        group.rows(table, DIM, mine[:1000], insert=True)
        others = keys[slots_of(keys) >= SLOTS // 2]
        for first in range(0, len(others), 100):
            with suppress(NoRoomError):
                group.rows(table, DIM, others[first : first + 100], insert=True)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        checkpoints.save(1)
        checkpoints.wait()
        made.kill(1)
        made.directory.ask(Abandon(1, 1))
        until(lambda: "The slots of a lost server still wait for their rows" in caplog.text)
        group.rows(table, DIM, mine[1000:2000], insert=True)


def test_slots_that_move_during_a_save_are_in_it_once_and_none_moves_during_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        train(group, model, 3)
        order, moved = saving._OrderLink.order, list[saving.Op]()
        late = {saving.Op.EXPORT: 1, saving.Op.LOAD: 0}
        early = {op: threading.Event() for op in late}

        def move_before(link: saving._OrderLink, op: saving.Op, body: bytes) -> bytes:
            """One server carries out its order when the other has, and slots have moved then, or are to move."""
            if link.index == late.get(op) and op not in moved:
                moved.append(op)
                assert early[op].wait(10)
                owners = made.directory.placement.owners
                slots = [slot for slot, owner in enumerate(owners) if owner == 0]
                made.directory.ask(MoveSlots(0, 2.0, 1.0, dict.fromkeys(slots[:10], 1)))
                made.settle(lambda placement: op is saving.Op.LOAD or not placement.moves)
            reply = order(link, op, body)
            if op in early:
                early[op].set()
            return reply

        monkeypatch.setattr(saving._OrderLink, "order", move_before)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        checkpoints.save(3)
        checkpoints.wait()
        (full,) = stored.manifests(open_store(str(tmp_path)))
        assert sum(part.rows for part in full.parts) == len(model)
        saved = copy(model)
        train(group, model, 3, seed=1)
        assert checkpoints.load() == 3
        assert moved == [saving.Op.EXPORT, saving.Op.LOAD]
        check(group, saved, model)
        made.settle(lambda placement: not placement.moves)
        check(group, saved, model)


@pytest.mark.parametrize("op", [saving.Op.EXPORT, saving.Op.LOAD], ids=["save", "load"])
def test_a_server_that_is_lost_meanwhile_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: saving.Op
) -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        train(group, model, 3)
        checkpoints.save(3)
        checkpoints.wait()
        order, killed = saving._OrderLink.order, list[int]()

        def killed_before(link: saving._OrderLink, ordered: saving.Op, body: bytes) -> bytes:
            if ordered is op and link.index == 1 and not killed:
                killed.append(1)
                made.kill(1)
                made.start(1, start=2)
            return order(link, ordered, body)

        monkeypatch.setattr(saving._OrderLink, "order", killed_before)
        if op is saving.Op.EXPORT:
            checkpoints.save(4)
            checkpoints.wait()
        assert checkpoints.load() == 3 + (op is saving.Op.EXPORT)
        assert killed
        check(group, model)


@pytest.mark.parametrize("step", [1, 2])
def test_a_server_that_is_lost_after_it_has_loaded_has_no_older_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        saved: dict[int, Model] = {}
        for each in (1, 2):
            train(group, model, 2, seed=each)
            checkpoints.save(each)
            saved[each] = copy(model)
        checkpoints.load(3 - step)
        order, back = saving._OrderLink.order, threading.Event()

        def lost_after(link: saving._OrderLink, op: saving.Op, body: bytes) -> bytes:
            if op is saving.Op.LOAD and link.index == 0:
                assert back.wait(10)
            reply = order(link, op, body)
            if op is saving.Op.LOAD and link.index == 1 and not back.is_set():
                made.kill(1)
                made.start(1, start=2)
                made.settle(lambda placed: placed.servers[1].start == 2 and placed.servers[1].ready)
                back.set()
            return reply

        monkeypatch.setattr(saving._OrderLink, "order", lost_after)
        assert checkpoints.load(step) == step
        assert back.is_set()
        check(group, saved[step], model)


def test_a_server_that_knows_the_placement_late_loads_no_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        for step in (1, 2):
            train(group, model, 2, seed=step)
            checkpoints.save(step)
        checkpoints.wait()
        monkeypatch.setattr(server, "FETCH_TIMEOUT", 0.1)
        slow, late = made.servers[1], threading.Event()
        follow = slow._follow

        def follow_late(placement: PlacementReply) -> None:
            if "other" in placement.tables and not late.is_set():
                late.wait(0.5)
                late.set()
            follow(placement)

        monkeypatch.setattr(slow, "_follow", follow_late)
        group.open("other", OPTIONS)
        assert checkpoints.load() == 2
        assert late.is_set()
        check(group, model)


def test_a_save_whose_server_is_lost_is_given_up_and_the_next_one_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        order, killed = saving._OrderLink.order, list[int]()

        def killed_before(link: saving._OrderLink, ordered: saving.Op, body: bytes) -> bytes:
            if ordered is saving.Op.WRITE and link.index == 1 and not killed:
                made.kill(1)
                made.start(1, start=2)
                killed.append(1)
            return order(link, ordered, body)

        monkeypatch.setattr(saving._OrderLink, "order", killed_before)
        checkpoints.save(1)
        until(lambda: killed)
        train(group, model, 3)
        checkpoints.save(2)
        train(group, model, 1, seed=1)
        saved = copy(model)
        checkpoints.save(3)
        checkpoints.wait()
        steps = [(e.step, e.number) for e in stored.manifests(open_store(str(tmp_path)))]
        assert steps == [(3, 1), (2, 0)]
        assert checkpoints.load() == 3
        check(group, saved)


@pytest.mark.parametrize("order", ["save", "load"])
def test_an_interrupt_waits_for_no_server(tmp_path: Path, order: str) -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        train(group, model, 2)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        checkpoints.save(1)
        checkpoints.wait()
        held, go_on = made.servers[1]._holding, threading.Event()
        name = {"save": "export_changes", "load": "load"}[order]
        carry_out = getattr(held, name)

        def slow(*given: object) -> object:
            if not go_on.is_set():
                os.kill(os.getpid(), signal.SIGUSR1)  # to the main thread
                assert go_on.wait(30)
            return carry_out(*given)

        setattr(held, name, slow)
        before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save(2) if order == "save" else checkpoints.load()
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert not go_on.is_set()
        go_on.set()
        if order == "load":
            check_refused(group, checkpoints)
            assert checkpoints.load() == 1
        checkpoints.save(3)
        checkpoints.wait()
        assert checkpoints.load() == 3
        check(group, model)


def check_refused(group: ServerGroup, checkpoints: TableCheckpoints) -> None:
    """Check that tables which are half loaded are neither used nor saved."""
    keys = np.arange(1000)
    for use in (
        lambda: group.rows(0, DIM, keys, insert=True),
        lambda: group.push(0, keys, np.ones((len(keys), DIM), np.float32)),
        group.evict,
        lambda: group.count_rows("users"),
        lambda: checkpoints.save(9),
    ):
        with pytest.raises(InfrastructureError, match=r"half loaded, since the load of step \d"):
            use()


def test_tables_that_a_damaged_checkpoint_was_half_loaded_into_are_used_by_nobody(
    tmp_path: Path,
) -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        good = TableCheckpoints(made.directory, str(tmp_path / "good"))
        train(group, model, 2)
        good.save(1)
        good.wait()
        saved = copy(model)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path / "damaged"))
        for step in (2, 3):
            train(group, model, 2, seed=step)
            checkpoints.save(step)
        checkpoints.wait()
        (increment, _) = stored.manifests(open_store(str(tmp_path / "damaged")))
        for path in (tmp_path / "damaged" / f"embedding-{increment.id}").glob("part-*"):
            path.write_bytes(path.read_bytes()[:-1])
        shutil.rmtree(tmp_path / "damaged" / f"embedding-{increment.parent}")
        with pytest.raises(InfrastructureError, match="embedding-"):
            checkpoints.load()
        check_refused(group, checkpoints)
        assert good.load() == 1
        check(group, saved, model)


def test_the_next_load_ends_what_a_killed_one_has_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "WARN_AFTER", 0.05)
    with cluster(2) as (made, group):
        model: Model = {}
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        train(group, model, 2)
        checkpoints.save(1)
        checkpoints.wait()
        for phase in ("settling", "loading"):
            version = made.directory.ask(LoadTables("killed", 1, phase)).version
        until(lambda: all(each._version >= version for each in made.servers.values()))
        waiting = threading.Thread(target=check, args=(group, model))
        waiting.start()
        made.start(2, servers=3)
        made.servers[0].leave(made.directory)
        until(lambda: "Waiting for the load of step 1 of the embedding tables" in caplog.text)
        assert waiting.is_alive()
        assert len(made.directory.placement.moves) > 0
        assert TableCheckpoints(made.directory, str(tmp_path)).load() == 1
        assert made.directory.placement.servers.keys() == {1, 2}
        waiting.join(10)
        assert not waiting.is_alive()
        check(group, model)


def test_a_late_order_of_an_interrupted_load_changes_no_row(tmp_path: Path) -> None:
    with cluster(1) as (made, group):
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        model: Model = {}
        for step in (1, 2):
            train(group, model, 2, seed=step)
            checkpoints.save(step)
        checkpoints.wait()
        _, first = stored.manifests(open_store(str(tmp_path)))
        assert checkpoints.load() == 2
        parts = stored.parts(open_store(str(tmp_path)), first)
        with pytest.raises(ProtocolError, match="The load of step 1 was given up"):
            made.servers[0]._holding.load("interrupted", first, (rows for _, rows in parts))
        check(group, model)


LAST_SAVE = """
import sys, threading
from dlrover.embedding.remote import stored
from dlrover.embedding.remote.saving import TableCheckpoints
from tests.embedding.servers import Cluster, train

write = stored.write_part
stored.write_part = lambda *given: (threading.main_thread().join(), write(*given))[1]
made = Cluster()
made.start(0, servers=1)
train(made.client(), {}, 2)
TableCheckpoints(made.directory, sys.argv[1]).save(1)
"""


@pytest.mark.slow
def test_a_program_that_ends_waits_for_its_last_checkpoint(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LAST_SAVE, tmp_path], check=True, timeout=50)
    assert [each.step for each in stored.manifests(open_store(str(tmp_path)))] == [1]


def test_after_a_failed_save_the_next_one_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise InfrastructureError("The disk is full.")

    with cluster(2) as (made, group):
        model: Model = {}
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        train(group, model, 2)
        checkpoints.save(2)
        train(group, model, 2, seed=1)
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(saving.stored, "publish", full)
            checkpoints.save(4)
            with pytest.raises(InfrastructureError, match="has failed: The disk is full"):
                checkpoints.wait()
        assert len([*tmp_path.glob("embedding-*")]) == 1, "what was written takes no room"
        checkpoints.save(5)
        checkpoints.wait()
        newest = stored.manifests(open_store(str(tmp_path)))[0]
        assert (newest.step, newest.number) == (5, 0)
        saved = copy(model)
        train(group, model, 2, seed=3)
        assert checkpoints.load(5) == 5
        check(group, saved, model)


def test_a_clock_that_is_set_back_changes_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(1) as (made, group):
        train(group, {}, 1)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        for step, now in enumerate((1000.0, 10.0, 5.0)):
            monkeypatch.setattr(saving.time, "time", lambda now=now: now)
            checkpoints.save(step, full=step == 2)
            checkpoints.wait()
        steps = [each.step for each in stored.manifests(open_store(str(tmp_path)))]
        assert steps == [2, 1, 0]
        assert checkpoints.load(0) == 0
        checkpoints.save(3)
        checkpoints.wait()
        assert checkpoints.load() == 3, "it adds to an earlier one and is the last one"


def test_a_directory_is_the_one_of_the_process_that_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with cluster(1) as (made, group):
        model: Model = {}
        train(group, model, 1)
        checkpoints = TableCheckpoints(made.directory, "tables")
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)  # as the servers, which have a working directory of their own
        checkpoints.save(1)
        checkpoints.wait()
        assert not [*elsewhere.iterdir()]
        assert checkpoints.load() == 1
        check(group, model)


def test_old_checkpoints_are_deleted_unless_a_kept_one_adds_to_them(tmp_path: Path) -> None:
    with cluster(1) as (made, group):
        train(group, {}, 1)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path), keep=2)
        for step in range(4):
            checkpoints.save(step)
        checkpoints.wait()
        steps = [each.step for each in stored.manifests(open_store(str(tmp_path)))]
        assert steps == [3, 2, 1, 0], "the last one adds to all before it"
        for step in (4, 5):
            checkpoints.save(step, full=True)
        checkpoints.wait()
        steps = [each.step for each in stored.manifests(open_store(str(tmp_path)))]
        assert steps == [5, 4]
        with pytest.raises(ConfigurationError, match="has no embedding checkpoint of step 1"):
            checkpoints.load(1)


def test_after_going_back_to_an_earlier_step_what_is_saved_then_counts(tmp_path: Path) -> None:
    with cluster(2) as (made, group):
        checkpoints, model = TableCheckpoints(made.directory, str(tmp_path), keep=1), Model()
        held: dict[int, Model] = {}
        for step in (1, 2, 3):
            train(group, model, 1, seed=step)
            checkpoints.save(step)
            held[step] = dict(model)
        assert checkpoints.load(1) == 1
        model = dict(held[1])
        train(group, model, 1, seed=7)
        checkpoints.save(2)
        checkpoints.wait()
        train(group, {**model}, 1, seed=8)
        assert TableCheckpoints(made.directory, str(tmp_path)).load() == 2
        train(group, model, 1, seed=9)
        steps = [each.step for each in stored.manifests(open_store(str(tmp_path)))]
        assert steps == [2, 1], "what was abandoned is deleted, although its steps were later"


def test_two_directories_of_one_job_each_have_every_change(tmp_path: Path) -> None:
    """Changes are marked once: an increment after the other directory's save would lack some."""
    with cluster(2) as (made, group):
        model: Model = {}
        one, other = (TableCheckpoints(made.directory, str(tmp_path / name)) for name in "ab")
        for step, checkpoints in enumerate((one, other, one, one, other)):
            train(group, model, 1, seed=step)
            checkpoints.save(step)
            checkpoints.wait()
            held = copy(model)
        numbers = [each.number for each in stored.manifests(open_store(str(tmp_path / "a")))]
        assert numbers == [1, 0, 0], "full again after the other's save"
        train(group, model, 1, seed=9)
        assert other.load() == 4
        check(group, held, model)


def test_a_server_that_is_new_makes_the_next_checkpoint_full(tmp_path: Path) -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        train(group, model, 2)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        checkpoints.save(1)
        checkpoints.wait()
        made.start(2, servers=3)
        made.settle(lambda placement: placement.owners.count(2) == SLOTS // 3)
        train(group, model, 2, seed=1)
        checkpoints.save(2)
        checkpoints.wait()
        assert stored.manifests(open_store(str(tmp_path)))[0].number == 0
        checkpoints.load()
        check(group, model)


def test_a_damaged_checkpoint_is_replaced_by_the_one_before_it(tmp_path: Path) -> None:
    with cluster(2) as (made, group):
        model: Model = {}
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        held: dict[int, Model] = {}
        for step in (1, 2, 3):
            train(group, model, 1, seed=step)
            checkpoints.save(step)
            checkpoints.wait()
            held[step] = copy(model)
        store = open_store(str(tmp_path))
        newest, second, _ = stored.manifests(store)
        (tmp_path / f"embedding-{newest.id}" / "manifest.json").write_bytes(b"{")
        (tmp_path / second.parts[0].file).write_bytes(b"damaged")
        made.kill(1)
        made.start(1, start=2)
        assert checkpoints.load() == 1
        check(group, held[1], model)
        made.kill(0)
        made.start(0, start=2)
        check(group, held[1], model)


def test_what_a_killed_save_has_left_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(1) as (made, group):
        train(group, {}, 1)
        left = tmp_path / "embedding-0123"
        left.mkdir()
        (left / "begun").touch()
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        checkpoints.save(1)
        checkpoints.wait()
        assert left.exists(), "another process may be writing there"
        monkeypatch.setattr(stored, "ABANDONED", -1.0)
        checkpoints.save(2)
        checkpoints.wait()
        assert not left.exists()
        assert len(stored.manifests(open_store(str(tmp_path)))) == 2


def test_a_damaged_manifest_is_deleted_once_enough_others_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(1) as (made, group):
        train(group, {}, 1)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path), keep=2)
        checkpoints.save(1)
        checkpoints.wait()
        (damaged,) = tmp_path.glob("embedding-*")
        (damaged / "manifest.json").write_bytes(b"")
        checkpoints.save(2, full=True)
        checkpoints.wait()
        checkpoints.save(3)
        checkpoints.wait()
        assert damaged.exists(), "it has been changed a moment ago"
        monkeypatch.setattr(stored, "ABANDONED", -1.0)
        stored.prune(open_store(str(tmp_path)), 3)
        assert damaged.exists(), "there are two others, and three are to be kept"
        checkpoints.save(4)
        checkpoints.wait()
        assert not damaged.exists()
        assert [e.step for e in stored.manifests(open_store(str(tmp_path)))] == [4, 3, 2]


def test_a_store_that_is_away_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with cluster(1) as (made, group):
        train(group, {}, 1)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        for step in (1, 2):
            checkpoints.save(step)
        checkpoints.wait()
        monkeypatch.setattr(local._LocalStore, "read", away)
        with pytest.raises(StorageAwayError, match="Input/output error"):
            checkpoints.load()
        with pytest.raises(StorageAwayError, match="Input/output error"):
            stored.restore(open_store(str(tmp_path)), "any", lambda *_args: None)


def test_damage_is_noticed(tmp_path: Path) -> None:
    with cluster(1) as (made, group):
        train(group, {}, 1)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        assert checkpoints.load() is None
        checkpoints.save(1)
        checkpoints.wait()
        (part,) = tmp_path.glob("embedding-*/part-0.rows")
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
        with pytest.raises(
            InfrastructureError, match="is damaged: its checksum is not the manifest's"
        ):
            checkpoints.load()
        part.unlink()
        with pytest.raises(InfrastructureError, match="cannot be read"):
            checkpoints.load()


def manifest(
    id_: str, number: int, parent: str = "", slots: tuple[int, ...] = tuple(range(SLOTS))
) -> TableManifest:
    half = len(slots) // 2
    parts = tuple(
        TablePart(f"{id_}/{i}", some, 1, 1, "00")
        for i, some in enumerate((slots[:half], slots[half:]))
    )
    return TableManifest(id=id_, parent=parent, number=number, step=number, tables={}, parts=parts)


def test_a_chain_has_no_gap_no_double_and_no_disorder() -> None:
    known = {
        each.id: each for each in (manifest("a", 0), manifest("b", 1, "a"), manifest("c", 2, "b"))
    }
    assert [each.id for each in chain(known["c"], known.__getitem__)] == ["a", "b", "c"]
    cases = {
        "b has number 1 of its chain and no parent": [manifest("b", 1)],
        "c has number 2 of its chain, and its parent a has number 0": [
            manifest("a", 0),
            manifest("c", 2, "a"),
        ],
        "b holds another one, a": [
            msgspec.structs.replace(manifest("a", 0), id="a"),
            manifest("c", 1, "b"),
        ],
        "lacks 24 of 1024 slots, the first of them 1000": [
            manifest("a", 0, slots=tuple(range(1000)))
        ],
        "has slot 0 in a/0 and a/1": [manifest("a", 0, slots=(*range(SLOTS), 0))],
    }
    for message, given in cases.items():
        found = {each.id: each for each in given} | (
            {"b": given[0]} if "another" in message else {}
        )
        with pytest.raises(InfrastructureError, match=message):
            chain(given[-1], found.__getitem__)


def ready(group: ServerGroup, options: TableOptions, name: str = "users") -> int:
    table = group.open(name, options.json())
    group.rows(table, options.dim, np.arange(200), insert=True)
    return table


BASE = decoded(OPTIONS)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"dim": 2}, "with dim 4, and it is open with dim 2"),
        ({"dim": 8, "dtype": "float16"}, "dim 4, dtype float32, and"),
        ({"optimizer": RowOptimizer(name="momentum")}, "optimizer adagrad, and it is open with"),
    ],
)
def test_rows_of_another_kind_are_refused(tmp_path: Path, other: dict, says: str) -> None:
    options = msgspec.structs.replace(BASE, optimizer=RowOptimizer(name="adagrad"))
    with cluster(2) as (made, group):
        ready(group, options)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        checkpoints.save(1)
        checkpoints.wait()
    with cluster(1) as (made, group):
        table = ready(group, msgspec.structs.replace(options, **other))
        before = group.rows(table, other.get("dim", DIM), np.arange(200), insert=False)
        with pytest.raises(ConfigurationError, match=says):
            TableCheckpoints(made.directory, str(tmp_path)).load()
        after = group.rows(table, other.get("dim", DIM), np.arange(200), insert=False)
        assert (before == after).all()


def test_a_table_that_is_opened_after_a_load_has_its_rows(tmp_path: Path) -> None:
    with cluster(2) as (made, group):
        ready(group, BASE)
        ready(group, BASE, "items")
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        checkpoints.save(1)
        checkpoints.wait()
    with cluster(1) as (made, group):
        assert TableCheckpoints(made.directory, str(tmp_path)).load() == 1
        group.open("items", OPTIONS)
        assert group.count_rows("items") == group.count_rows("users") == 200


def test_too_little_memory_does_not_bring_back_an_older_checkpoint(tmp_path: Path) -> None:
    options = msgspec.structs.replace(BASE, memory_bytes=600_000)
    with cluster(3) as (made, group):
        table = ready(group, options)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        checkpoints.save(1)
        group.rows(table, DIM, np.arange(20_000), insert=True)
        checkpoints.save(2)
        checkpoints.wait()
    with cluster(1) as (made, group):
        group.open("users", options.json())
        with pytest.raises(NoRoomError, match="found no room; memory_bytes is 600000"):
            TableCheckpoints(made.directory, str(tmp_path)).load()


def steps(group: ServerGroup, table: int, count: int) -> None:
    for _ in range(count):
        group.rows(table, DIM, np.arange(200), insert=True)
        group.push(table, np.arange(200), np.zeros((200, DIM), np.float32))


@pytest.mark.parametrize("full", [True, False])
def test_rows_are_no_older_after_the_training_went_back(tmp_path: Path, full: bool) -> None:
    with cluster(2) as (made, group):
        table = ready(group, msgspec.structs.replace(BASE, expiry=Expiry(steps=30)))
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        checkpoints.save(0)
        group.rows(table, DIM, np.arange(200, 300), insert=True)
        steps(group, table, 10)
        checkpoints.save(10, full=full)
        checkpoints.wait()
        for _ in range(4):
            steps(group, table, 20)
            checkpoints.load()
        assert group.evict() == 0
        steps(group, table, 20)
        assert group.evict() == 100
        assert group.count_rows("users") == 200


def test_rows_are_no_older_on_a_server_that_counted_more_updates(tmp_path: Path) -> None:
    with cluster(2) as (made, group):
        table = ready(group, msgspec.structs.replace(BASE, expiry=Expiry(steps=30)))
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        steps(group, table, 10)
        checkpoints.save(10)
        checkpoints.wait()
        steps(group, table, 100)
        made.kill(0)
        made.start(0, start=2)
        made.settle(lambda placement: placement.servers[0].ready)
        group.rows(table, DIM, np.arange(200, 300), insert=True)
        steps(group, table, 10)
        made.servers[0].leave(made.directory)
        made.settle(lambda placement: placement.servers.keys() == {1})
        assert group.evict() == 0
        steps(group, table, 20)
        assert group.evict() == 100


def test_rows_count_as_used_now_when_their_expiry_counts_something_else(tmp_path: Path) -> None:
    with cluster(2) as (made, group):
        steps(group, ready(group, msgspec.structs.replace(BASE, expiry=Expiry(steps=30))), 5)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path))
        checkpoints.save(1)
        checkpoints.wait()
    for expiry in (Expiry(seconds=30), Expiry(steps=30)):
        with cluster(1) as (made, group):
            table = group.open("users", msgspec.structs.replace(BASE, expiry=expiry).json())
            checkpoints = TableCheckpoints(made.directory, str(tmp_path))
            assert checkpoints.load() == 1
            assert group.evict() == 0
            steps(group, table, 1)
            checkpoints.save(1)
            checkpoints.wait()


def test_a_checkpoint_that_was_copied_is_left_alone(tmp_path: Path) -> None:
    with cluster(1) as (made, group):
        ready(group, BASE)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path), keep=1)
        for step in (1, 2, 3):
            checkpoints.save(step, full=True)
            checkpoints.wait()
            if step == 1:
                (folder,) = tmp_path.glob("embedding-*")
                shutil.copytree(folder, f"{folder}-copy")
        assert len([*tmp_path.glob("embedding-*")]) == 2
        assert checkpoints.load() == 3


def test_the_checkpoints_that_can_be_restored_are_kept(tmp_path: Path) -> None:
    with cluster(1) as (made, group):
        ready(group, BASE)
        checkpoints = TableCheckpoints(made.directory, str(tmp_path), keep=1)
        checkpoints.save(1)
        checkpoints.save(2, full=True)
        checkpoints.wait()
        store = open_store(str(tmp_path))
        (second,) = stored.manifests(store)
        checkpoints.save(3, full=True)
        checkpoints.wait()
        third, *_ = stored.manifests(store)
        broken = msgspec.structs.replace(third, parent=second.id, number=1)
        (tmp_path / f"embedding-{third.id}" / "manifest.json").write_bytes(
            msgspec.json.encode(broken)
        )
        checkpoints.save(4)
        checkpoints.wait()
        checkpoints.save(5)
        checkpoints.wait()
        assert [each.step for each in stored.manifests(store)] == [5]
