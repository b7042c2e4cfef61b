"""Sentences of events: numbers and their nouns."""

import pytest

from dlrover.spec.events import JobSubmitted


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((1, 1), "1 node"),
        ((2, 2), "2 nodes"),
        ((1, 4), "1 to 4 nodes"),
        ((1, 1, 1, 1), "1 node and 1 server"),
        ((2, 2, 1, 2), "2 nodes and 1 to 2 servers"),
    ],
)
def test_a_job_runs_on_as_many_nodes_and_servers(sizes: tuple[int, ...], words: str) -> None:
    assert JobSubmitted("job", *sizes).sentence() == f"Job job was submitted; it runs on {words}."
