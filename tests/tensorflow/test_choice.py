"""Which tasks a TensorFlow cluster is built of. No TensorFlow is needed."""

import json

import pytest

from dlrover.errors import ConfigurationError
from dlrover.spec.requests.cluster import ClusterReply, ClusterTask
from dlrover.tensorflow.machine.choice import ClusterChoice, change, choose, place, tf_config
from dlrover.tensorflow.machine.options import GuardOptions


def task(role: str, index: int, start: int = 1) -> ClusterTask:
    return ClusterTask(role, index, start, f"{role}{index}:{start}")


WORKERS = (task("worker", 0), task("worker", 1))
SERVERS = (task("ps", 0), task("ps", 1), task("ps", 2))


def reply(
    *tasks: ClusterTask, servers: int = 3, leaving: tuple[ClusterTask, ...] = ()
) -> ClusterReply:
    return ClusterReply(tasks=tasks, leaving=leaving, wanted={"worker": 2, "ps": servers})


ALL = reply(*SERVERS, *WORKERS)


def test_the_first_cluster_awaits_all_and_leaves_the_spares() -> None:
    assert choose(ALL, 0) == (ClusterChoice(WORKERS, SERVERS), "")
    assert choose(ALL, 1) == (ClusterChoice(WORKERS, SERVERS[:2]), "")
    assert choose(reply(WORKERS[0], SERVERS[1]), 0) == (
        None, "1 of 2 workers and 2 of 3 parameter servers",
    )  # fmt: skip
    assert choose(reply(*WORKERS), 5)[1] == "1 of 1 parameter server", "one is needed in any case"


def test_a_spare_takes_the_place_of_a_lost_server_and_nobody_else_moves() -> None:
    used = ClusterChoice(WORKERS, (SERVERS[0], SERVERS[2]))
    chosen, _ = choose(ALL, 1, used)
    assert chosen == used
    chosen, _ = choose(ALL, 1, used, {SERVERS[2]})
    assert chosen == ClusterChoice(WORKERS, (SERVERS[0], SERVERS[1]))
    chosen, missing = choose(ALL, 0, ClusterChoice(WORKERS, SERVERS), {SERVERS[2]})
    assert (chosen, missing) == (None, "1 of 3 parameter servers")


def test_tasks_keep_their_numbers_and_newcomers_fill_the_holes() -> None:
    used = ClusterChoice(WORKERS, SERVERS)
    again = task("ps", 1, 2)
    chosen, _ = choose(reply(*WORKERS, SERVERS[0], again, SERVERS[2]), 0, used)
    assert chosen == ClusterChoice(WORKERS, (SERVERS[0], again, SERVERS[2]))
    assert chosen.extends(used)
    more, _ = choose(reply(*ALL.tasks, task("ps", 3), servers=4), 0, used)
    assert more == ClusterChoice(WORKERS, (*SERVERS, task("ps", 3)))
    assert more.extends(used)
    fewer, _ = choose(reply(*WORKERS, *SERVERS[1:], servers=2), 0, used)
    assert fewer == ClusterChoice(WORKERS, SERVERS[1:])
    assert not fewer.extends(used), "the first two have other numbers"
    assert ClusterChoice(WORKERS, SERVERS[:2]).extends(used)
    assert not ClusterChoice(WORKERS[::-1], SERVERS).extends(used)


def test_a_later_cluster_does_with_the_workers_that_are_there() -> None:
    used = ClusterChoice(WORKERS, SERVERS)
    chosen, _ = choose(reply(WORKERS[1], *SERVERS), 0, used)
    assert chosen == ClusterChoice((WORKERS[1],), SERVERS)


def test_a_lost_server_does_not_await_servers_that_were_never_there() -> None:
    used = ClusterChoice(WORKERS, SERVERS[:2])
    again = task("ps", 0, 2)
    chosen, _ = choose(reply(*WORKERS, again, SERVERS[1], servers=4), 0, used)
    assert chosen == ClusterChoice(WORKERS, (again, SERVERS[1])), "two more are still awaited"
    assert choose(reply(*WORKERS, SERVERS[1], servers=4), 0, used)[0] is None
    three = reply(*WORKERS, *SERVERS, servers=4)
    assert choose(three, 0, used)[0] == used, "the cluster grows once, when all are there"
    assert not change(three, 0, used).reason
    assert choose(three, 0)[1] == "1 of 4 parameter servers", "the first cluster awaits all"


def test_a_task_that_does_not_answer_is_no_reason_to_build_the_cluster_again() -> None:
    used = ClusterChoice(WORKERS[:1], SERVERS)
    assert change(ALL, 0, used).reason
    assert not change(ALL, 0, used, {WORKERS[1]}).reason
    returned = reply(*SERVERS, WORKERS[0], task("worker", 1, 2))
    assert change(returned, 0, used, {WORKERS[1]}).reason


def test_changes() -> None:
    used = ClusterChoice(WORKERS, SERVERS)
    assert not change(ALL, 0, used).reason
    moved = task("ps", 1, 2)
    found = change(reply(*WORKERS, SERVERS[0], moved, SERVERS[2]), 0, used)
    assert (found.reason, found.lost) == ("ps 1 (ps1:1) is gone", True)
    leaving = reply(*ALL.tasks, servers=2, leaving=(SERVERS[2],))
    found = change(leaving, 0, used)
    assert found.reason == (
        "the job now has 2 workers and 2 parameter servers instead of 2 workers and 3 parameter servers"
    )
    assert not found.lost
    fewer = ClusterChoice(WORKERS, SERVERS[:2])
    assert not change(reply(*WORKERS, *SERVERS[:2]), 0, fewer).reason, "the third has not come"
    assert change(ALL, 0, fewer).reason
    assert not change(ALL, 1, fewer).reason, "the third is a spare"


def test_a_server_that_leaves_is_not_chosen() -> None:
    found = reply(*ALL.tasks, servers=2, leaving=(SERVERS[0],))
    chosen, _ = choose(found, 0, ClusterChoice(WORKERS, SERVERS))
    assert chosen == ClusterChoice(WORKERS, SERVERS[1:])


def test_a_worker_that_returns_to_its_address_changes_nothing() -> None:
    again = ClusterTask("worker", 1, 2, WORKERS[1].address)
    assert not change(reply(WORKERS[0], again, *SERVERS), 0, ClusterChoice(WORKERS, SERVERS)).reason


def test_what_tensorflow_gets() -> None:
    spec = ClusterChoice(WORKERS[:1], SERVERS[:1]).spec("here:1")
    assert spec == {"chief": ["here:1"], "worker": ["worker0:1"], "ps": ["ps0:1"]}
    assert json.loads(tf_config(spec, "chief", 0)) == {
        "cluster": spec,
        "task": {"type": "chief", "index": 0},
    }


def test_places() -> None:
    found = place({"ROLE_NAME": "ps", "ROLE_RANK": "1", "MASTER_ADDR": "10.0.0.7"})
    assert found is not None
    assert (found.role, found.index, found.host, found.serves) == ("ps", 1, "10.0.0.7", True)
    assert place({"ROLE_NAME": "default", "ROLE_RANK": "0"}) is None
    assert place({}) is None


@pytest.mark.parametrize(("name", "value", "least"), [("keep", 0, 1), ("spares", -1, 0)])
def test_options_out_of_range(name: str, value: int, least: int) -> None:
    given = dict.fromkeys(GuardOptions.__dataclass_fields__, 1) | {"checkpoint": "", name: value}
    with pytest.raises(ConfigurationError) as caught:
        GuardOptions(**given)
    assert str(caught.value) == f"{name} is {value}; it must be at least {least}."
