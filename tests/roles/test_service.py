"""The service of a job of several roles, without a server: lost connections, and a coordinator that is replaced."""

from __future__ import annotations

import asyncio

import pytest

from dlrover.errors import InfrastructureError
from dlrover.roles.messages import (
    Address,
    Agreed,
    JoinRole,
    LookCursor,
    MemberEnded,
    Place,
    RoleReply,
    RoleRequest,
    SetCursor,
    Turned,
)
from dlrover.roles.runtime import holder
from dlrover.roles.serving import RolesService

TRAINER = Place("trainer", 0, 1)


class Inputs(list[bytes]):
    """A journal in memory, which outlives its service; it may be full."""

    refused = 0
    full = False

    def append(self, entry: bytes, now: float = 0.0) -> None:
        if self.full:
            self.refused += 1
            raise InfrastructureError("The journal is full.")
        super().append(entry)


def asked(service: RolesService, request: RoleRequest) -> RoleReply:
    return asyncio.run(service._ask(request))


def test_what_comes_before_a_process_has_joined_again_is_to_be_asked_again() -> None:
    service = RolesService(Inputs())
    join = JoinRole(TRAINER, Address("127.0.0.1", 1))
    asked(service, join)
    service._submit(MemberEnded(TRAINER, "its connection has ended", final=False))
    for request in (SetCursor(TRAINER, b"x"), LookCursor(TRAINER)):
        with pytest.raises(InfrastructureError, match="trainer 0 has lost its connection and"):
            asked(service, request)
    asked(service, join)
    assert asked(service, SetCursor(TRAINER, b"x")) == Agreed()
    service.ended("trainer", 0, 1, "it was killed by SIGKILL")
    assert isinstance(asked(service, SetCursor(TRAINER, b"x")), Turned), "it is over"


def test_the_views_of_another_coordinator_have_higher_numbers() -> None:
    journal = Inputs()
    service = RolesService(journal)
    for index in range(3):
        asked(service, JoinRole(Place("a", index, 1), Address("127.0.0.1", 1)))
        asked(service, SetCursor(Place("a", index, 1), b"x"))
    before = service._view
    assert before.number > 1
    for _ in range(2):
        service = RolesService(journal, list(journal))
        assert service._view.number >= before.number, "a publisher waits for the number"
        assert service._view.roles == before.roles


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
