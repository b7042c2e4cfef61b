"""What became of a save that a user asked for, from the nodes' answers."""

from dlrover.master.saves import outcomes
from dlrover.rpc.messages import StoredPlace
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
