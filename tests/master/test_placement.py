"""What the master does for embedding servers by itself, with the reports that they send every two seconds."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dlrover.master.journal.history import History
from dlrover.master.journal.journal import open_journal
from dlrover.master.service import Master
from dlrover.spec.events import SlotsRestored
from dlrover.spec.job import JobSpec
from dlrover.spec.requests.placement import (
    SLOTS,
    Announce,
    PlacementReply,
    SlotsRecovered,
    SlotsUsed,
)


@contextlib.contextmanager
def master_at(directory: Path) -> Iterator[tuple[Master, History]]:
    journal = open_journal("file:", directory / "journal")
    history = History(directory / "events")
    with contextlib.closing(journal), contextlib.closing(history):
        master = Master(journal, history)
        job = JobSpec(
            name="job", min_nodes=1, max_nodes=1, managed_nodes=1, other_nodes=0, servers=2,
            min_servers=1, max_servers=3, server_failover="instance",
        )  # fmt: skip
        master.begin(job, str(directory), None)
        yield master, history


def announce(server: int, start: int = 1) -> Announce:
    return Announce(server, start, "127.0.0.1", 1000 + server, 3)


def test_fewer_servers_than_at_first_are_enough_once_no_more_are_wanted(tmp_path: Path) -> None:
    """They said how many the job wanted when they started: three, of which one never came."""

    async def asked() -> list[PlacementReply]:
        with master_at(tmp_path) as (master, _):
            use = master.requests.use
            return [
                await use(announce(0)),
                await use(SlotsUsed(0, 1, 2.0, {})),
                await use(announce(1)),
                await use(SlotsUsed(1, 1, 2.0, {})),
            ]

    first, alone, before, after = asyncio.run(asked())
    assert first.owners == alone.owners == before.owners == ()
    assert Counter(after.owners) == {0: SLOTS // 2, 1: SLOTS // 2}
    assert all(server.ready for server in after.servers.values())


def test_rows_that_went_back_to_a_checkpoint_are_an_event(tmp_path: Path) -> None:
    async def asked() -> list[object]:
        with master_at(tmp_path) as (master, history):
            for request in (
                announce(0),
                announce(1),
                SlotsUsed(1, 1, 2.0, {}),
                announce(0, start=2),
                SlotsRecovered(0, 2, 512, 40),
                SlotsRecovered(0, 2, 512, 40),
                SlotsRecovered(0, 1, 1, 1),
                announce(0, start=3),
                SlotsRecovered(0, 3, 3),
            ):
                await master.requests.use(request)
            return [event.body for event in history.events]

    found = [body for body in asyncio.run(asked()) if isinstance(body, SlotsRestored)]
    assert found == [SlotsRestored(0, 512, 40), SlotsRestored(0, 3, None)], (
        "one came twice, one was late"
    )
    assert found[0].sentence() == (
        "The rows of 512 slots of embedding server 0 are those of step 40: a server was lost with newer ones."
    )
    assert found[1].sentence() == (
        "The rows of 3 slots of embedding server 0 are lost: no checkpoint has them."
    )
