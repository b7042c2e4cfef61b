"""Data sets in jobs with parameter servers, which have no part in them."""

import pytest

from dlrover.data.records import Records
from dlrover.errors import ConfigurationError


def state(monkeypatch, role: str, rank: int, of_role: int, samples: int) -> dict:
    """Of one process of a world of three, after it has read so many samples of the first epoch."""
    given = {"ROLE_NAME": role, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": of_role, "WORLD_SIZE": 3}
    data = Records(list(range(10)), epochs=3)
    if role == "worker":  # one that runs alone deals to itself
        for _ in zip(range(samples), data, strict=False):
            pass
        data.epoch = 1
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    found = data.state_dict()
    for name in given:
        monkeypatch.delenv(name)
    data.close()
    return found


def test_what_servers_save_of_a_data_set_is_passed_over(monkeypatch):
    states = [
        state(monkeypatch, "worker", 0, 1, samples=4),
        state(monkeypatch, "ps", 0, 2, samples=0),
        state(monkeypatch, "ps", 1, 2, samples=0),
    ]
    data = Records(list(range(10)), epochs=3)
    data.load_rank_states(states)
    assert data.epoch == 1, "servers are in no epoch"
    data.epoch = 0
    assert sorted(data) == list(range(4, 10))
    data.close()


def test_of_workers_all_are_needed(monkeypatch):
    states = [
        state(monkeypatch, "worker", 0, 2, samples=4),
        state(monkeypatch, "ps", 0, 1, samples=0),
    ]
    with pytest.raises(ConfigurationError, match="was saved by 2 ranks, and the state of 1"):
        Records(list(range(10)), epochs=3).load_rank_states(states)
    with pytest.raises(ConfigurationError, match="No worker has saved"):
        Records(list(range(10)), epochs=3).load_rank_states(states[1:])


def test_a_role_of_that_name_in_a_job_without_servers_reads_data(monkeypatch):
    states = [state(monkeypatch, "ps", rank, 3, samples=0) for rank in range(3)]
    Records(list(range(10)), epochs=3).load_rank_states(states)
