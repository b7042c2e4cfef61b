"""The service of a job of several roles, without a server: lost connections, and a coordinator that is replaced."""

from __future__ import annotations

import asyncio

import pytest

from dlrover.errors import InfrastructureError
from dlrover.roles import serving
from dlrover.roles.messages import (
    AckItems,
    Agreed,
    CallAddress,
    GetItems,
    JoinRole,
    LookCursor,
    MemberEnded,
    MemberPlace,
    OpenQueue,
    PublishPart,
    PutItems,
    RoleReply,
    RoleRequest,
    SetCursor,
    Turned,
    UseVersion,
    Version,
)
from dlrover.roles.runtime import holder
from dlrover.roles.serving import RolesService

TRAINER = MemberPlace("trainer", 0, 1)


class Inputs(list[bytes]):
    """A journal in memory, which outlives its service; it may be full."""

    refused = 0
    full = False

    def append(self, entry: bytes, now: float = 0.0) -> None:
        if self.full:
            self.refused += 1
            raise InfrastructureError("The journal is full.")
        super().append(entry)

    def replace(self, entry: bytes, now: float) -> None:
        self.append(entry)
        self[:-1] = []


def asked(service: RolesService, request: RoleRequest) -> RoleReply:
    return asyncio.run(service._ask(request))


def test_what_comes_before_a_process_has_joined_again_is_to_be_asked_again() -> None:
    service = RolesService(Inputs())
    join = JoinRole(TRAINER, CallAddress("127.0.0.1", 1))
    asked(service, join)
    service._submit(MemberEnded(TRAINER, "its connection has ended", final=False))
    for request in (SetCursor(TRAINER, b"x"), LookCursor(TRAINER)):
        with pytest.raises(InfrastructureError, match="trainer 0 has lost its connection and"):
            asked(service, request)
    asked(service, join)
    assert asked(service, SetCursor(TRAINER, b"x")) == Agreed()
    service.tell(MemberEnded(TRAINER, "it was killed by SIGKILL"))
    assert isinstance(asked(service, SetCursor(TRAINER, b"x")), Turned), "it is over"


def test_the_views_of_another_coordinator_have_higher_numbers() -> None:
    journal = Inputs()
    service = RolesService(journal)
    for index in range(3):
        asked(service, JoinRole(MemberPlace("a", index, 1), CallAddress("127.0.0.1", 1)))
        asked(service, SetCursor(MemberPlace("a", index, 1), b"x"))
    before = service._view
    assert before.number > 1
    for _ in range(2):
        service = RolesService(journal, list(journal))
        assert service._view.number >= before.number, "a publisher waits for the number"
        assert service._view.roles == before.roles


def test_the_journal_holds_what_is_not_settled_and_another_coordinator_goes_on_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "COMPACT", 5000)
    journal = Inputs()
    service = RolesService(journal, worlds=["trainer"])
    longest = 0
    for number in range(60):
        for request in (
            JoinRole(TRAINER, CallAddress("127.0.0.1", 1)),
            OpenQueue(TRAINER, "q", 4),
            PutItems(TRAINER, "q", 1, number, (bytes(300),), cursor=b"%d" % number),
            GetItems(TRAINER, "q", 2, number, 1),
            AckItems(TRAINER, "q", (number,), number % 2 - 1),
            PublishPart(TRAINER, "w", number, 0, 1, TRAINER, f"k{number}", 10),
            UseVersion(TRAINER, "w", Version(0, number)),
        ):
            asked(service, request)
        longest = max(longest, sum(map(len, journal)))
        if number % 7 == 0:
            again = RolesService(journal, list(journal), worlds=["trainer"])
            assert again.shared == service.shared
            assert again._view.number >= service._view.number
            service = again
    assert service.shared.queues.get("q").done == 60
    assert longest < 15_000, "the bodies alone have 18,000 bytes"


def test_the_process_that_keeps_weights_is_tried_for_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holder, "PAUSE", 0.001)
    journal = Inputs()
    journal.full = True

    async def run() -> None:
        keeping = asyncio.create_task(holder.keep(RolesService(journal), {}, 0))
        while journal.refused < 3 and not keeping.done():
            await asyncio.sleep(0.001)
        assert not keeping.done(), "it goes on trying"
        keeping.cancel()

    asyncio.run(run())
