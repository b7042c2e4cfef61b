"""Processes and nodes that are lost, with the steps that only they had: where they are found again."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from dlrover import config
from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.stores import open_store
from tests.support.forks import Fork, Forks

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(240)]

ENV = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
SCRIPT = Path(__file__).parent / "scripts" / "held.py"


class World:
    """Ranks with a process each, on nodes that stand for machines."""

    def __init__(
        self, forks: Forks, nodes: list[Path], last: list[int], held: int = 0, **options
    ) -> None:
        self._forks = forks
        self._processes: list[Fork] = []
        self._number = 0
        self.env: dict[str, str] = {}
        self._meet = nodes[0].parent
        self._plan = {
            "nodes": [str(node) for node in nodes], "last": last, "options": options,
            "held": held,
        }  # fmt: skip

    def _start(self, verb: str) -> None:
        self._number += 1
        self._meet.mkdir(exist_ok=True)
        plan = {
            **self._plan,
            "verb": verb,
            "meet": f"file://{self._meet}/meet-{verb}-{self._number}",
        }
        self._processes = [
            self._forks.start(SCRIPT, rank, json.dumps(plan), env={**os.environ, **ENV, **self.env})
            for rank in range(len(self._plan["last"]))
        ]

    def save(self) -> None:
        """Every rank saves its steps; they stay connected."""
        self._start("save")
        for process in self._processes:
            assert process.line() == "saved\n", process.errors()

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            self._processes[rank].send_signal(signal.SIGKILL)
            self._processes[rank].wait()

    def load(self) -> list[str]:
        """What every rank says that it got."""
        self._start("load")
        return [process.communicate()[0].strip() for process in self._processes]

    def end(self) -> None:
        for process in self._processes:
            process.kill()


@pytest.fixture
def world(forks: Forks):
    made = []

    def make(*args, **options) -> World:
        made.append(World(forks, *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_a_worker_that_dies_has_its_newest_step_stored(directory, world):
    ended = world([directory], [4], save_at_breakpoint=True, linger=0.0)
    ended.save()
    ended.kill(0)
    directory.until_no_saver()
    assert storage.steps(open_store(directory)) == [4]
    assert sorted(path.name for path in directory.glob(".*")) == []


def test_a_saver_that_is_stopped_stores_first(directory):
    checkpointer = Checkpointer(directory, save_at_breakpoint=True)
    checkpointer.save(1, {"w": torch.ones(9)}, to="storage")
    checkpointer.save(2, {"w": torch.full((9,), 2.0)})
    checkpointer.close()
    directory.stop_saver()
    assert storage.steps(open_store(directory)) == [2, 1]
    state = {"w": torch.zeros(9)}
    checkpointer = Checkpointer(directory, linger=0.0)
    record = checkpointer.load(state)
    checkpointer.close()
    assert (record.step, record.source) == (2, "storage")
    assert torch.equal(state["w"], torch.full((9,), 2.0))


@pytest.mark.parametrize(
    ("last", "stored"),
    [
        ([3, 4, 3, 4], 3),
        pytest.param([3, 3, 3, 3], 3, marks=pytest.mark.heavy),
    ],
)
def test_two_nodes_store_the_newest_step_that_all_ranks_have(
    two_nodes, directory, world, last, stored
):
    ended = world(two_nodes, last, save_at_breakpoint=True, linger=1.0)
    ended.save()
    ended.kill(1)
    ended.kill(0, 2, 3)
    for node in two_nodes:
        node.until_no_saver(30)
    assert storage.steps(open_store(directory)) == [stored]
    assert sorted(path.name for path in directory.glob(".*")) == []
    assert ended.load() == [f"{stored} from storage"] * 4


@pytest.mark.parametrize("secret", ["", "5" * 64])
def test_what_a_lost_node_had_comes_from_its_replica(two_nodes, directory, world, secret):
    """Its workers and its saver are gone; the other node's workers end, as they do in a restart."""
    lost = world(two_nodes, [3, 3, 3, 3], held=4, replicas=1)
    lost.env = {config.REPLICA_SECRET: secret}
    lost.save()
    lost.kill(2, 3)
    two_nodes[1].kill_savers()
    lost.kill(0, 1)
    assert lost.load() == ["3 from memory"] * 2 + ["3 from peer"] * 2
    for node in two_nodes:
        node.stop_saver()
    assert sorted(path.name for path in directory.glob(".*")) == []
