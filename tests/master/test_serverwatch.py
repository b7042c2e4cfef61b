"""Hot and uneven servers, by what their nodes use."""

import pytest

from dlrover.master.machine.watches.serverwatch import GROWTH, ServerWatch


def watch(*servers: tuple[float, float], looks: int = 3) -> ServerWatch:
    """Servers by what they use of what they have, from node 10 on."""
    made = ServerWatch()
    for _ in range(looks):
        for node, (used, cores) in enumerate(servers, start=10):
            made.note(node, used, cores)
    return made


def test_uneven_servers_are_to_be_rebalanced_first():
    found = watch((1.9, 2.0), (0.5, 2.0)).look(2, rebalance=True)
    assert found.rebalance
    assert (found.migrate, found.more) == ({}, False)
    assert found.reason == "the server on node 10 has 1.6 times the mean load of the servers"
    assert found.gain == pytest.approx(0.29, abs=0.01)


def test_a_hot_server_that_cannot_be_relieved_moves_to_more_cores():
    found = watch((1.9, 2.0), (0.5, 2.0)).look(2, rebalance=False)
    assert found.migrate == {10: 1.5}
    assert "node 10 (95% of its cores)" in found.reason
    assert not found.rebalance


def test_where_no_node_has_more_cores_there_are_too_few_servers():
    found = watch((1.9, 2.0), (0.5, 2.0)).look(2, rebalance=False, migrate=False)
    assert found.more
    assert "no node has more, so more servers" in found.reason


def test_a_node_grows_by_a_bounded_factor():
    found = watch((0.1, 0.1), (0.02, 0.1)).look(2, rebalance=False)
    assert found.migrate == {10: GROWTH}


def test_if_all_are_hot_there_are_too_few():
    found = watch((1.9, 2.0), (1.8, 2.0)).look(2, rebalance=True)
    assert found.more
    assert found.migrate == {}


def test_servers_that_idle_are_left_alone_however_uneven():
    assert watch((0.3, 8.0), (0.01, 8.0)).look(2, rebalance=True) is None


def test_even_servers_are_left_alone():
    assert watch((1.2, 2.0), (1.1, 2.0)).look(2, rebalance=True) is None


def test_nothing_is_said_before_all_servers_are_known():
    assert watch((1.9, 2.0), looks=3).look(2, rebalance=True) is None
    assert watch((1.9, 2.0), (0.5, 2.0), looks=2).look(2, rebalance=True) is None
    assert watch((1.9, 0.0), (0.5, 0.0)).look(2, rebalance=True) is None


def test_a_job_without_servers_has_no_hot_ones():
    assert watch().look(0, rebalance=True) is None


def test_after_something_was_done_it_looks_anew():
    made = watch((1.9, 2.0), (0.5, 2.0))
    made.begin(1)
    assert made.look(2, rebalance=True) is None


def test_a_single_peak_is_not_heat():
    made = ServerWatch()
    for used in (3.0, 7.9, 3.1):
        made.note(10, used, 8.0)
        made.note(11, 3.0, 8.0)
    assert made.look(2, rebalance=False) is None
