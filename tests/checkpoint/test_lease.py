"""Two trainings on one directory: only the one that holds the lease stores and deletes there."""

import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.machine.policies import KeepLast
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.storage import formats, lease as leases, storage
from dlrover.checkpoint.storage.lease import Lease, job_of
from dlrover.checkpoint.storage.stored_step import Manifest
from dlrover.checkpoint.storage.stores import MANIFEST, open_store
from dlrover.errors import ConfigurationError, InfrastructureError

HERE, ELSEWHERE = "boot-1 pid:[1]", "boot-2 pid:[1]"


class Clock:
    """Time that passes only when somebody waits; what happens meanwhile is called."""

    def __init__(self) -> None:
        self.now, self.meanwhile = 0.0, []

    def pause(self, seconds: float) -> None:
        self.now += seconds
        for act in self.meanwhile:
            act()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(leases.time, "monotonic", lambda: made.now)
    return made


class Node:
    """A machine: what runs there sees its own processes only."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self._place, self._patch, self._name = place, monkeypatch, name

    @contextlib.contextmanager
    def here(self):
        with self._patch.context() as patched:
            patched.setattr(leases, "_namespace", lambda: self._name)
            yield

    def lease(self, job: str, session: int) -> Lease:
        """Of a saver that a world has joined."""
        made = Lease(open_store(self._place), job)
        made.join(session)
        return made

    def check(self, lease: Lease, session: int, clock: Clock) -> None:
        with self.here():
            lease.check(session, clock.pause)


@pytest.fixture
def nodes(tmp_path, monkeypatch) -> list[Node]:
    return [Node(tmp_path, monkeypatch, name) for name in (HERE, ELSEWHERE)]


def test_an_old_world_behind_a_partition_stores_nothing_any_more(nodes, clock):
    a, b = nodes
    old = a.lease("job", 1)
    a.check(old, 1, clock)
    new = b.lease("job", 2)
    a.check(old, 1, clock)  # nobody else has stored anything yet
    b.check(new, 2, clock)
    assert clock.now == 0.0, "the same job goes on at once"
    with pytest.raises(InfrastructureError, match="belongs to another training"):
        a.check(old, 1, clock)
    b.check(new, 2, clock)
    again = a.lease("job", 1)  # its saver was started again
    with pytest.raises(InfrastructureError, match="since this one began"):
        a.check(again, 1, clock)


def test_an_old_world_that_has_stored_nothing_yet_cannot_take_it_back(nodes, clock):
    a, b = nodes
    old, new = a.lease("job", 1), b.lease("job", 2)
    b.check(new, 2, clock)
    with pytest.raises(InfrastructureError, match="since this one began"):
        a.check(old, 1, clock)


def test_a_new_world_is_not_locked_out_by_what_the_old_one_still_stores(nodes, clock):
    """The old one takes the lease only after the new one has begun, also when its saver is started again."""
    a, b = nodes
    a.lease("job", 1).leave(1)
    new = b.lease("job", 2)
    again = a.lease("job", 1)
    a.check(again, 1, clock)
    b.check(new, 2, clock)
    with pytest.raises(InfrastructureError, match="since this one began"):
        a.check(again, 1, clock)
    b.check(new, 2, clock)
    assert clock.now == 0.0


def test_who_cannot_tell_when_it_began_takes_nothing_from_a_world_that_lives(nodes, clock):
    a, b = nodes
    new = b.lease("job", 2)
    b.check(new, 2, clock)
    clock.meanwhile.append(new.beat)
    old = Lease(open_store(a._place), "job")
    with pytest.raises(InfrastructureError, match="in use by another training"):
        a.check(old, 1, clock)
    clock.meanwhile.clear()
    a.check(old, 1, clock)


def test_a_directory_that_can_only_be_read_has_no_numbers(tmp_path, monkeypatch, caplog):
    store = open_store(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(store, "write", refuse)
    lease = Lease(store, "job")
    lease.join(1)
    assert lease._joined == {1: None}
    assert not caplog.text


def test_another_job_that_lives_is_not_disturbed(nodes, clock):
    a, b = nodes
    first = a.lease("one", 1)
    a.check(first, 1, clock)
    second = b.lease("two", 2)
    clock.meanwhile.append(first.beat)
    with pytest.raises(InfrastructureError, match=r"in use by another training \(job one, process"):
        b.check(second, 2, clock)
    assert clock.now < leases.WATCH
    a.check(first, 1, clock)


def test_a_job_does_not_begin_where_another_one_trains(nodes, clock):
    a, b = nodes
    first = a.lease("one", 1)
    a.check(first, 1, clock)
    clock.meanwhile.append(first.beat)
    with b.here(), pytest.raises(ConfigurationError, match="a directory of its own"):
        b.lease("two", 2).refuse_other(clock.pause)
    assert clock.now < leases.LOOK
    now = clock.now
    with b.here():
        b.lease("one", 3).refuse_other(clock.pause)  # the same job, restarted
        b.lease("", 4).refuse_other(clock.pause)  # which cannot be told apart
    assert clock.now == now


@pytest.mark.parametrize("released", [True, False])
def test_a_job_begins_where_another_one_has_ended(nodes, clock, released):
    a, b = nodes
    first = a.lease("one", 1)
    a.check(first, 1, clock)
    if released:
        with a.here():
            first.release()
    else:
        first.leave(1)
        clock.meanwhile.append(first.beat)
    with b.here():
        b.lease("two", 2).refuse_other(clock.pause)
    assert (clock.now == 0.0) is released


@pytest.mark.parametrize("job", ["two", ""])
def test_a_dead_job_locks_nobody_out(nodes, clock, job):
    a, b = nodes
    first = a.lease("one" if job else "", 1)
    a.check(first, 1, clock)
    first.beat()
    second = b.lease(job, 2)
    b.check(second, 2, clock)
    assert leases.WATCH <= clock.now < 2 * leases.WATCH


def test_a_job_whose_rank_0_is_gone_does_not_beat(nodes, clock):
    """Its saver may still serve other ranks of the next world."""
    a, b = nodes
    first = a.lease("", 1)
    a.check(first, 1, clock)
    first.leave(1)
    clock.meanwhile.append(first.beat)
    b.check(b.lease("", 2), 2, clock)


def test_what_was_released_or_died_on_this_machine_is_taken_at_once(nodes, clock):
    a, b = nodes
    first = a.lease("one", 1)
    a.check(first, 1, clock)
    first.release()
    second = b.lease("two", 2)
    b.check(second, 2, clock)
    code = (
        "import sys; from dlrover.checkpoint.storage import lease; from dlrover.checkpoint.storage.stores import open_store;"
        f"lease._namespace = lambda: {HERE!r};"
        "taken = lease.Lease(open_store(sys.argv[1]), 'one'); taken.join(3); taken._take(3, None)"
    )
    subprocess.run([sys.executable, "-c", code, str(a._place)], check=True)
    third = a.lease("two", 4)
    a.check(third, 4, clock)
    assert clock.now == 0.0


def test_worlds_of_one_saver_follow_each_other(nodes, clock):
    """The earlier one finishes what it was asked for; no identifier is needed."""
    a, _ = nodes
    served = a.lease("", 1)
    served.join(2)
    a.check(served, 1, clock)
    a.check(served, 2, clock)
    a.check(served, 1, clock)
    a.check(served, 2, clock)
    worker = a.lease("", 2)  # rank 0 writes a step itself
    a.check(worker, 2, clock)
    assert clock.now == 0.0


def test_a_lease_that_cannot_be_decoded_is_made_again(nodes, clock, tmp_path):
    a, _ = nodes
    first = a.lease("one", 1)
    (tmp_path / "lease").write_bytes(b"\0" * 20)
    a.check(first, 1, clock)
    a.check(first, 1, clock)


def test_who_has_lost_the_lease_deletes_nothing(nodes, clock, tmp_path):
    a, b = nodes
    store = open_store(tmp_path)
    old = a.lease("job", 1)
    for step in range(3):
        save = SaveId(0, step, step, 1)
        draft = store.draft(save)
        manifest = Manifest(step=step, save=save, world_size=1, replicated=True, files={})
        store.write(draft.path(MANIFEST), formats.encode(manifest))
        store.publish(draft, {MANIFEST})
    a.check(old, 1, clock)
    b.check(b.lease("job", 2), 2, clock)
    with pytest.raises(InfrastructureError, match="since this one began"):
        storage.prune(store, KeepLast(1), lambda: a.check(old, 1, clock))
    assert storage.steps(store) == [2, 1, 0]
    assert {"lease", "lease.worlds"} == set(os.listdir(tmp_path)) - {"step-0", "step-1", "step-2"}


def test_a_job_is_known_by_what_its_launcher_gives_it():
    names = ("TORCHELASTIC_RUN_ID", "DLROVER_KUBERNETES_JOB", "DLROVER_JOB_DIR")
    for given, expected in [
        (("none", "", ""), ""), (("abc", "job", "dir"), "abc"), (("none", "job", "dir"), "job"),
        ((None, None, "dir"), "dir"),
    ]:  # fmt: skip
        pairs = zip(names, given, strict=True)
        assert job_of({name: value for name, value in pairs if value is not None}) == expected


def test_in_any_order_one_of_two_worlds_holds_it_and_the_other_is_told(nodes, clock, tmp_path):
    """Both are of one job; whoever begins later is never the one that is refused, once it has stored."""
    a, b = nodes
    for order in itertools.product("ab", repeat=5):
        (tmp_path / "lease").unlink(missing_ok=True)
        old, new = a.lease("job", 1), None
        a.check(old, 1, clock)
        refused = False
        for who in order:
            if who == "b":
                new = new or b.lease("job", 2)
                b.check(new, 2, clock)
                refused = True
            elif refused:
                with pytest.raises(InfrastructureError, match="since this one began"):
                    a.check(old, 1, clock)
            else:
                a.check(old, 1, clock)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(120)
def test_two_trainings_on_one_directory(two_nodes, monkeypatch):
    """Another job is refused while the first one lives; a new world of the job takes over at once."""
    a, b = two_nodes

    def training(node: Path, job: str):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        return Checkpointer(node, linger=0.0)

    first = training(a, "one")
    first.save(1, {"step": 1}, to="storage")
    first.wait()
    with pytest.raises(ConfigurationError, match=r"in use by another training \(job one, process"):
        training(b, "two")
    b.until_no_saver()
    newer = training(b, "one")
    newer.save(3, {"step": 3}, to="storage")
    newer.wait()
    first.save(4, {"step": 4}, to="storage")
    with pytest.raises(InfrastructureError, match="belongs to another training"):
        first.wait()
    first.close()
    newer.close()
    b.until_no_saver()
    assert storage.steps(open_store(a)) == [3, 1]
    another = training(b, "three")  # the one before has ended in order
    another.save(5, {"step": 5}, to="storage")
    another.wait()
    another.close()
