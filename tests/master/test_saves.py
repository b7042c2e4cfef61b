"""What became of a save that a user asked for, from the nodes' answers."""

import asyncio
from types import SimpleNamespace

from dlrover.master.saves import UserSaves, outcomes
from dlrover.rpc.messages import MemoryStored, SaveRequest, ScaleReply, StoredPlace
from dlrover.spec.events import StepStored


def test_each_directory_has_one_outcome() -> None:
    answers = [
        StoredPlace("/a", 7),
        StoredPlace("/b", -1, "The disk is full."),
        StoredPlace("/a", 7),
    ]
    found = outcomes(answers, (), "night")
    assert found == [
        StepStored("/a", 7, "night"),
        StepStored("/b", -1, "night", "The disk is full."),
    ]
    assert [event.sentence() for event in found] == [
        "Step 7 is stored in /a: night.",
        "Nothing new is stored in /b (night): The disk is full.",
    ]


def test_a_node_that_does_not_answer_has_not_stored_its_part() -> None:
    (found,) = outcomes([StoredPlace("/a", 7)], {3, 2}, "night")
    assert (found.step, found.problem) == (-1, "No answer came from nodes 2, 3.")
    assert outcomes([], (), "night") == []


def test_a_node_that_is_away_meanwhile_is_not_waited_for() -> None:
    """Its request or its answer may be lost."""
    nodes = {number: SimpleNamespace(connected=number != 2) for number in (1, 2)}
    machine = SimpleNamespace(
        rounds=SimpleNamespace(worlds={1: None, 2: None}),
        rendezvous=SimpleNamespace(collecting=False),
        nodes=nodes,
    )

    async def saved(answers: bool) -> ScaleReply:
        events: list[StepStored] = []
        saves: UserSaves

        def say(node_id: int, message) -> None:
            if node_id == 1 and answers:
                place = StoredPlace("/a", 7)
                loop = asyncio.get_running_loop()
                loop.call_soon(saves.answered, 1, MemoryStored(message.id, (place,)))

        saves = UserSaves(machine, say, events.append)
        return await asyncio.wait_for(saves.save(SaveRequest("night")), 20)

    reply = asyncio.run(saved(answers=True))
    assert reply.refused
    assert reply.sentence.endswith("(night): No answer came from node 2.")
    nodes[1].connected = False
    assert asyncio.run(saved(answers=False)).sentence == "No answer came from nodes 1, 2."
