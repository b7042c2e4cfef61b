"""The journal gives the machines their state back, and the history keeps each event once."""

import asyncio
import contextlib
import os
import resource
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import process_time

import pytest

from dlrover.errors import (
    ConfigurationError,
    DamagedJournalError,
    FencedError,
    FormatError,
    InfrastructureError,
)
from dlrover.master import app
from dlrover.master.diagnosis_rules import built_in
from dlrover.master.journal import history
from dlrover.master.journal.file import FileJournal
from dlrover.master.journal.history import History
from dlrover.master.journal.journal import JOURNALS, Journal, open_journal
from dlrover.master.machine import inputs
from dlrover.master.machine.job import JobMachine
from dlrover.master.service import Master
from dlrover.rpc.messages import Hello
from dlrover.spec import events
from dlrover.spec.failure import Action, Origin, Rule
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.jobdir import FORMAT
from dlrover.spec.requests.cluster import UseCluster
from tests.simulation.cluster import WORKER_KINDS, Cluster
from tests.simulation.nodes import Delays

PATIENT = Limits(max_infrastructure_restarts=1000, no_progress_restarts=1000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "job #1?" / "journal.sqlite"


@pytest.fixture
def journal(path: Path):
    path.parent.mkdir()
    with contextlib.closing(FileJournal(path)) as opened:
        yield opened


def replayed(path: Path, into: History | None = None) -> JobMachine:
    """The machine as a new master finds it."""
    machine = JobMachine()
    with contextlib.closing(FileJournal(path, read_only=True)) as journal:
        for time, entry in journal.entries():
            for command in machine.handle(entry, time):
                if into is not None and isinstance(command, inputs.Emit):
                    into.add(command.body, time)
    machine.validate()
    return machine


# ---- what every store does

KEEPS = ["file:", "file:{path}/elsewhere.sqlite"]
"""Journals that outlive a master, as a setting names them."""
ALL = [*KEEPS, "memory:"]


class Store:
    """A place for a journal, opened as often as a test likes; everything is closed at its end."""

    def __init__(self, url: str, directory: Path) -> None:
        self._url = url.format(path=directory)
        self._own_file = directory / "journal.sqlite"
        self._opened = contextlib.ExitStack()

    def open(self, *, read_only: bool = False) -> Journal:
        return self._opened.enter_context(contextlib.closing(self.new(read_only=read_only)))

    def new(self, *, read_only: bool = False) -> Journal:
        """A journal that its thread has to close."""
        return open_journal(self._url, self._own_file, read_only=read_only)

    def close(self) -> None:
        self._opened.close()


@pytest.fixture
def store(request, tmp_path):
    with contextlib.closing(Store(request.param, tmp_path)) as place:
        yield place


on_all = pytest.mark.parametrize("store", ALL, indirect=True)
on_those_that_keep = pytest.mark.parametrize("store", KEEPS, indirect=True)


def test_every_scheme_is_tested():
    assert {url.partition(":")[0] for url in ALL} == set(JOURNALS)


@on_all
def test_a_new_journal_is_empty_and_belongs_to_its_first_master(store):
    journal = store.open()
    assert journal.epoch == 1
    assert list(journal.entries()) == []
    journal.check()


@on_all
def test_a_master_goes_beyond_the_epochs_that_its_agents_have_met(store):
    journal = store.open()
    journal.raise_epoch(7)
    assert journal.epoch == 8
    journal.raise_epoch(3)
    assert journal.epoch == 9
    journal.append(inputs.DeadlinePassed(), 1.0)
    journal.check()


@on_all
def test_inputs_and_requests_are_taken(store):
    journal = store.open()
    journal.append(inputs.Submitted(JobSpec(name="job"), "/tmp/job"), 1.0)
    journal.append(UseCluster((), b"note"), 2.0)
    assert len(list(journal.entries())) in (0, 2)


@on_those_that_keep
def test_a_later_master_finds_the_entries(store):
    first = store.open()
    written = [(1.0, inputs.MasterStarted(3)), (0.5, UseCluster((), b"note"))]
    for time, entry in written:
        first.append(entry, time)
    assert list(store.open().entries()) == written
    assert list(store.open(read_only=True).entries()) == written


@on_those_that_keep
def test_each_start_takes_the_next_epoch_and_refuses_the_one_before(store):
    masters = [store.open() for _ in range(3)]
    assert [m.epoch for m in masters] == [1, 2, 3]
    for old in masters[:2]:
        for act in (
            lambda m: m.append(inputs.DeadlinePassed(), 1.0),
            lambda m: m.check(),
            lambda m: m.raise_epoch(9),
        ):
            with pytest.raises(FencedError, match=f"epoch 3; this one has epoch {old.epoch}"):
                act(old)
    masters[2].append(inputs.MasterStarted(1), 2.0)
    assert [entry for _, entry in masters[2].entries()] == [inputs.MasterStarted(1)]


@on_those_that_keep
def test_a_reader_takes_no_epoch(store):
    master = store.open()
    assert store.open(read_only=True).epoch == 0
    master.append(inputs.DeadlinePassed(), 1.0)


@on_those_that_keep
def test_of_masters_that_start_together_one_is_the_last(store):
    """Opened and written by many threads at once: the entries are those of one epoch at a time."""

    def master(_: int) -> tuple[int, int]:
        written = 0
        with contextlib.closing(store.new()) as journal, contextlib.suppress(FencedError):
            for _ in range(20):
                journal.append(inputs.MasterStarted(journal.epoch), 0.0)
                written += 1
        return journal.epoch, written

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        pending = [pool.submit(master, n) for n in range(5) for pool in (one, other)]
        done = dict(future.result() for future in pending)
    assert sorted(done) == list(range(1, 11))
    epochs = [entry.replayed for _, entry in store.open(read_only=True).entries()]
    assert epochs == sorted(epochs)
    assert len(epochs) == sum(done.values())
    assert done[10] == 20


@pytest.mark.slow
def test_masters_that_open_a_new_file_at_once_wait_for_each_other(tmp_path):
    barrier = threading.Barrier(4)

    def open_with_the_others(path: Path) -> int:
        barrier.wait()
        with contextlib.closing(FileJournal(path)) as journal:
            return journal.epoch

    with ThreadPoolExecutor(4) as pool:
        for number in range(50):
            paths = [tmp_path / f"{number}.sqlite"] * 4
            assert sorted(pool.map(open_with_the_others, paths)) == [1, 2, 3, 4]


@pytest.mark.parametrize("url", ["", "file", "sqlite:", "k8s://name", "memory:x"])
def test_a_journal_that_nobody_knows_is_refused(url, tmp_path):
    with pytest.raises(ConfigurationError, match=f"journal {url} is unknown; it takes"):
        open_journal(url, tmp_path / "journal.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_nobody_reads_the_memory_of_a_master(tmp_path):
    with pytest.raises(InfrastructureError, match="in the memory of the master"):
        open_journal("memory:", tmp_path / "journal.sqlite", read_only=True)


def test_a_file_that_was_deleted_and_made_again_belongs_to_the_later_master(journal, path):
    for file in path.parent.iterdir():
        file.unlink()
    journal.append(inputs.DeadlinePassed(), 1.0)  # nobody else is there
    with contextlib.closing(FileJournal(path)) as successor:
        assert successor.epoch == journal.epoch == 1
        with pytest.raises(FencedError, match="was replaced"):
            journal.append(inputs.DeadlinePassed(), 2.0)
        assert list(successor.entries()) == []


# ---- what is written comes back


def test_entries_come_back_in_order_with_their_times(journal, path):
    written = [
        (1.5, inputs.Submitted(JobSpec(name="jöb"), "/tmp/job")),
        (2.5, UseCluster((), b"\x00\xff")),
        (2.5, Hello("uid", -1, 2**63 - 1, "host", 0)),
        (0.5, inputs.DeadlinePassed()),
        (3.0, UseCluster(())),
    ]
    for time, entry in written:
        journal.append(entry, time)
    assert list(journal.entries()) == written
    with contextlib.closing(FileJournal(path, read_only=True)) as reader:
        assert list(reader.entries()) == written


def test_entries_survive_a_master_that_closed_nothing(journal, path):
    journal.append(inputs.DeadlinePassed(), 1.0)
    with contextlib.closing(FileJournal(path)) as successor:
        successor.append(inputs.MasterStarted(1), 2.0)
        assert [entry for _, entry in successor.entries()] == [
            inputs.DeadlinePassed(),
            inputs.MasterStarted(1),
        ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_the_replayed_state_equals_the_live_one(seed, journal, path, tmp_path):
    """After any history of faults, in every field, and with the same events."""
    cluster = eventful(seed)
    for time, entry in cluster.journal:
        journal.append(entry, time)
    recorder = History(tmp_path / "events.jsonl")
    with contextlib.closing(recorder):
        machine = replayed(path, recorder)
    assert machine == cluster.machine
    assert recorder.events == cluster.events == history.read(tmp_path / "events.jsonl")
    for field in vars(machine):  # equality compares them all: none may be left out of it
        assert getattr(machine, field) == getattr(cluster.machine, field), field


KILLS_RELAUNCH = Rule(
    cause="killed_here",
    signals=("SIGKILL",),
    origin=Origin.INFRASTRUCTURE,
    action=Action.RELAUNCH,
    title="was killed",
    advice="Look who did it.",
)
"""The user's: it has to come back out of the journal."""


def test_a_journal_of_another_release_replays_by_its_own_rules(journal, path):
    submitted = inputs.Submitted(JobSpec(name="job", max_restarts=3), rules=(KILLS_RELAUNCH,))
    journal.append(submitted, 1.0)
    journal.append(inputs.MasterStarted(1), 2.0)
    machine = replayed(path)
    assert machine.state.table.rules == (KILLS_RELAUNCH,) != built_in()


def eventful(seed: int) -> Cluster:
    managed = seed % 2 * 3
    spec = JobSpec(
        name="job",
        min_nodes=2,
        max_nodes=3,
        managed_nodes=managed,
        max_restarts=1000,
        limits=PATIENT,
        diagnosis_rules=(KILLS_RELAUNCH,),
    )
    cluster = Cluster(
        spec, nodes=3 - managed, steps=10**6, seed=seed, delays=Delays(revive=(0.5, 9.0))
    )
    cluster.inject(
        [
            lambda n: cluster.kill_worker(n, cluster.time.random.choice(WORKER_KINDS), 1),
            cluster.kill_agent,
            cluster.break_device,
            cluster.disconnect,
            lambda _: cluster.kill_master(after_commands=1),
        ],
        every=3.0,
        until=80.0,
    )
    cluster.run(cluster.time.random.uniform(10.0, 80.0))
    cluster.run_until(
        lambda: not cluster.master_away
    )  # what a dying master did not tell is told then
    return cluster


# ---- journals that cannot be used


@pytest.mark.parametrize("other", [1, FORMAT + 1])
@pytest.mark.parametrize("read_only", [True, False])
def test_a_journal_of_another_format_is_refused_and_left_as_it_is(journal, path, other, read_only):
    journal.append(inputs.DeadlinePassed(), 1.0)
    journal.close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version={other}")
    before = path.read_bytes()
    with pytest.raises(FormatError) as refused:
        FileJournal(path, read_only=read_only)
    assert str(refused.value) == (
        f"{path} has format {other}, of another version of DLRover; this one reads format {FORMAT}. Finish the "
        "job with the version that began it, or start a new job in another directory: this file stays as it is."
    )
    assert path.read_bytes() == before


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    path = tmp_path / "journal.sqlite"
    path.write_text("not a database, but long enough to have a header that could be one" * 9)
    with pytest.raises(
        InfrastructureError, match=r"journal.sqlite is damaged: file is not a database"
    ):
        FileJournal(path)


def test_a_journal_that_is_not_there_is_not_made_by_a_reader(tmp_path):
    with pytest.raises(InfrastructureError, match="cannot be opened"):
        FileJournal(tmp_path / "journal.sqlite", read_only=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param("'input', x'c1'", id="body"),
        pytest.param(
            "'store', x'83a474797065a3736574a36b6579a26b87a576616c7565c40176'",
            id="text that is none",
        ),
        pytest.param("'inpus', x'80'", id="kind"),
        pytest.param("CAST(x'ff' AS TEXT), x'80'", id="kind that is no text"),
    ],
)
def test_a_damaged_entry_is_named(journal, path, damaged):
    journal.append(inputs.DeadlinePassed(), 1.0)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"INSERT INTO entries (time, kind, body) VALUES (2.0, {damaged})")
        db.commit()
    with pytest.raises(DamagedJournalError, match=r"journal.sqlite is damaged at entry 2: "):
        list(journal.entries())


def test_a_damaged_page_is_named(journal, path):
    for number in range(100):
        journal.append(inputs.NodeExited(number, "x" * 500), 1.0)
    journal.close()
    with path.open("r+b") as file:
        file.seek(5 * 4096)
        file.write(b"\xff" * 100)
    damage = r"journal.sqlite is damaged behind entry \d+, in the page at byte 20480: "
    with (
        contextlib.closing(FileJournal(path)) as again,
        pytest.raises(DamagedJournalError, match=damage),
    ):
        list(again.entries())


@pytest.mark.slow
def test_a_full_disk_is_an_infrastructure_error_and_loses_nothing_before_it(tmp_path):
    """The limit on a file's size stands in for the end of a disk."""
    path = tmp_path / "journal.sqlite"
    program = f"""
from pathlib import Path
from dlrover.errors import InfrastructureError
from dlrover.master.journal.file import FileJournal
from dlrover.spec.requests.cluster import UseCluster

journal = FileJournal(Path({str(path)!r}))
for number in range(1000):
    try:
        journal.append(UseCluster((), bytes(1000)), float(number))
    except InfrastructureError as error:
        print(number, error)
        break
"""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    ran = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        preexec_fn=limit,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    number, _, message = ran.stdout.partition(" ")
    assert message.startswith(f"The journal {path} cannot be written: ")
    with contextlib.closing(FileJournal(path)) as journal:
        assert [time for time, _ in journal.entries()] == [float(n) for n in range(int(number))]
        journal.append(UseCluster(()), 0.0)


# ---- events


def bodies() -> list[events.EventBody]:
    return [events.JobSubmitted("job", 1, 2), events.NodeLaunched(0), events.JobEnded(0, "done")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def write(file: Path, written: list[events.EventBody]) -> list[events.Event]:
    """What a master adds when it replays from the beginning."""
    recorder = History(file)
    with contextlib.closing(recorder):
        return [recorder.add(body, float(time)) for time, body in enumerate(written)]


def test_events_are_numbered_and_readable_at_once(file):
    recorder = History(file)
    with contextlib.closing(recorder):
        assert recorder.add(bodies()[0], 5.0) == events.Event(1, 5.0, bodies()[0])
        assert history.read(file) == recorder.events


def test_events_that_the_file_has_are_not_written_twice(file):
    write(file, bodies()[:2])
    recorded = write(file, bodies())
    assert history.read(file) == recorded
    assert [event.seq for event in recorded] == [1, 2, 3]


def test_a_last_line_that_a_crash_cut_short_is_written_again(file):
    recorded = write(file, bodies())
    whole = file.read_bytes()
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        lines = whole[:cut].count(b"\n")
        assert history.read(file) == recorded[:lines]
        write(file, bodies())
        assert file.read_bytes() == whole


def test_thousands_of_events_on_a_full_disk_take_no_time(file):
    """All of them wait to be written, for as long as the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    recorder, body = History(file), events.StepStored("/checkpoints", 1, "x" * 4000, "")
    with contextlib.closing(recorder):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file can grow, as on a full disk
        before = process_time()
        try:
            for _ in range(1500):
                recorder.add(body, 1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert process_time() - before < 0.25
        assert not file.stat().st_size
        recorder.add(body, 2.0)
    assert history.read(file) == recorder.events


def stored(step: int) -> events.StepStored:
    return events.StepStored("/checkpoints", step, "asked for", "")


def life(directory: Path, *steps: int) -> list[events.Event]:
    """The events of a job after a master that took in some stored steps and died."""

    async def live() -> list[events.Event]:
        with (
            contextlib.closing(FileJournal(directory / "journal.sqlite")) as journal,
            contextlib.closing(History(directory / "events.jsonl")) as recorder,
        ):
            master = Master(journal, recorder)
            job = JobSpec(name="job", min_nodes=2, max_nodes=2)
            master.begin(job, str(directory), None)
            for step in steps:
                master.submit(stored(step))
            master.close()
            return list(recorder.events)

    return asyncio.run(live())


def test_no_event_is_left_out_after_a_journal_has_lost_its_last_entries(tmp_path: Path) -> None:
    """A full disk or a crash of the machine may have kept entries from the journal, and not their events."""
    first = life(tmp_path, 1, 2, 3)
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db, db:
        db.execute("DELETE FROM entries WHERE seq > (SELECT MAX(seq) - 2 FROM entries)")
    second = life(tmp_path, 4)
    third = life(tmp_path, 5)
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    steps = [e.body.step for e in third if isinstance(e.body, events.StepStored)]
    assert steps == [1, 2, 3, 4, 5]
    assert [event.seq for event in third] == [*range(1, len(third) + 1)]
    assert history.read(tmp_path / "events.jsonl") == third


def test_a_reader_needs_no_room_beside_an_ended_jobs_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with contextlib.closing(FileJournal(path)) as journal:
        journal.append(inputs.NodeDisconnected(0), 1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file can grow, as on a full disk
    try:
        with contextlib.closing(FileJournal(path, read_only=True)) as journal:
            assert list(journal.entries()) == [(1.0, inputs.NodeDisconnected(0))]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_only_its_owner_can_read_a_journal(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with contextlib.closing(FileJournal(tmp_path / "journal.sqlite")):
            modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert len(modes) == 3
    assert set(modes.values()) == {"0o600"}, modes


def test_a_job_knows_its_journal_on_a_machine_that_its_master_has_moved_to(tmp_path: Path) -> None:
    own, others = tmp_path / "own/train-1", tmp_path / "others/train-1"
    own.mkdir(parents=True)
    assert app._is_same(str(own), own)
    assert app._is_same("/there/is/no/such/place/train-1", own)
    assert not app._is_same("/there/is/no/such/place/train-2", own)
    others.mkdir(parents=True)
    assert not app._is_same(str(others), own)
