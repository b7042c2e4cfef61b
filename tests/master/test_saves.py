"""What became of a save that a user asked for, from the nodes' answers."""

import asyncio
from types import SimpleNamespace

import pytest

from dlrover.master.saves import UserSaves, outcomes
from dlrover.rpc.messages import MemoryStored, SaveRequest, ScaleReply, StoredPlace
from dlrover.spec.events import StepStored
from dlrover.spec.job import JobSpec
from tests.simulation.cluster import Cluster


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
        outcome=None,
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


@pytest.mark.parametrize("seed", range(3))
def test_a_request_that_is_lost_with_its_stream_keeps_no_other_one_waiting(seed):
    cluster = Cluster(JobSpec(name="job", min_nodes=2, max_nodes=2), nodes=2, steps=2000, seed=seed)
    cluster.run_until(lambda: cluster.training)

    async def stored(_request: str) -> tuple[StoredPlace, ...]:
        return (StoredPlace("/a", 7),)

    def save(reason: str) -> ScaleReply:
        asking = cluster.time.loop.create_task(cluster.master.saves.save(SaveRequest(reason)))
        cluster.time.after(0.0, lambda: lost and cluster.disconnect(lost.pop()))
        cluster.run_until(asking.done)
        return asking.result()

    for node in cluster.nodes:
        node.workers.save_now = stored
    lost, began = [cluster.nodes[1]], cluster.time.now
    name = lost[0].machine.node_id
    assert f"No answer came from node {name}." in save("night").sentence
    assert save("x" * 10_000).sentence == f"Step 7 is stored in /a: {'x' * 500}."
    assert cluster.time.now < began + 30.0
    cluster.stop()
    cluster.run_until(lambda: cluster.machine.outcome is not None)
    assert save("late").sentence == "The job has ended: stopped"


def test_each_end_is_recorded_once_for_each_directory_and_step():
    machine = SimpleNamespace(rendezvous=SimpleNamespace(last_round=1))
    recorded: list[StepStored] = []
    saves = UserSaves(machine, lambda *_: None, recorded.append)
    full = StoredPlace("/a", -1, "The disk is full.")
    saves.answered(1, MemoryStored("", (full, StoredPlace("/b", 7))))
    saves.answered(2, MemoryStored("", (full,)))
    machine.rendezvous.last_round = 2
    saves.answered(1, MemoryStored("", (full,)))
    assert [(event.directory, event.step) for event in recorded] == [
        ("/a", -1),
        ("/b", 7),
        ("/a", -1),
    ]
    assert recorded[0].reason == "the workers have ended"
