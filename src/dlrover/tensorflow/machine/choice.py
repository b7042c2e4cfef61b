"""Which tasks of the job a TensorFlow cluster is built of, and when another one is due."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass

from dlrover.spec.node import CHIEF, EVALUATOR, SERVER, WORKER
from dlrover.spec.requests.cluster import ClusterReply, ClusterTask
from dlrover.spec.words import counted

OWN_ROLES = (CHIEF, EVALUATOR, WORKER, SERVER)


@dataclass(frozen=True)
class TaskPlace:
    """What a process is in its job."""

    role: str
    index: int
    host: str
    """Address at which the other processes reach it."""

    @property
    def serves(self) -> bool:
        """True if the process executes what the chief sends it."""
        return self.role in (WORKER, SERVER)


def place(env: Mapping[str, str]) -> TaskPlace | None:
    """Return the place that ``dlrover-run --chief`` gave a process; None if another launcher started it."""
    role = env.get("ROLE_NAME", "")
    if role not in OWN_ROLES or "ROLE_RANK" not in env:
        return None
    return TaskPlace(role, int(env["ROLE_RANK"]), env.get("MASTER_ADDR", "127.0.0.1"))


@dataclass(frozen=True)
class ClusterChoice:
    """Tasks of one TensorFlow cluster; their order gives their numbers in it."""

    workers: tuple[ClusterTask, ...] = ()
    servers: tuple[ClusterTask, ...] = ()

    @property
    def tasks(self) -> tuple[ClusterTask, ...]:
        """All tasks."""
        return self.workers + self.servers

    @property
    def addresses(self) -> frozenset[tuple[str, str]]:
        """The role and address of each task: a cluster with the same ones is the same to TensorFlow."""
        return frozenset((task.role, task.address) for task in self.tasks)

    def spec(self, chief: str) -> dict[str, list[str]]:
        """Return the content of a ``tf.train.ClusterSpec``; ``chief`` is the chief's address."""
        return {
            CHIEF: [chief],
            WORKER: [task.address for task in self.workers],
            SERVER: [task.address for task in self.servers],
        }

    def extends(self, earlier: ClusterChoice) -> bool:
        """Return whether each task of both clusters has the same number in both."""
        return all(
            _place_of(task, before) in (-1, number)
            for before, after in ((earlier.workers, self.workers), (earlier.servers, self.servers))
            for number, task in enumerate(after)
        )

    def in_words(self) -> str:
        """Return ``2 workers and 1 parameter server``."""
        workers, servers = len(self.workers), len(self.servers)
        return f"{counted(workers, 'worker')} and {counted(servers, 'parameter server')}"


def _place_of(task: ClusterTask, tasks: Sequence[ClusterTask]) -> int:
    """Return the number of a task among those of its role, by its address; -1 if it is not there."""
    addresses = [other.address for other in tasks]
    return addresses.index(task.address) if task.address in addresses else -1


def _in_place(
    chosen: Sequence[ClusterTask], used: Sequence[ClusterTask]
) -> tuple[ClusterTask, ...]:
    """Return tasks so that those in use keep their numbers, and the others fill the holes."""
    kept = {_place_of(task, used): task for task in chosen if _place_of(task, used) >= 0}
    new = [task for task in chosen if _place_of(task, used) < 0]
    numbers = [kept.get(number) or (new.pop(0) if new else None) for number in range(len(used))]
    return (*(task for task in numbers if task is not None), *new)


def tf_config(spec: Mapping[str, list[str]], role: str, index: int) -> str:
    """Return the value of ``TF_CONFIG`` for a task."""
    return json.dumps({"cluster": spec, "task": {"type": role, "index": index}})


def choose(
    reply: ClusterReply,
    spares: int,
    used: ClusterChoice | None = None,
    lost: AbstractSet[ClusterTask] = frozenset(),
    *,
    only_servers: bool = False,
) -> tuple[ClusterChoice | None, str]:
    """Choose the tasks of the next cluster; without enough of them, return None and what is awaited.

    The first cluster awaits all workers. A later one does with those that are there: the others come back with a
    change of its own. Variables need every wanted server, less the spares; while wanted ones have not all come, as many as
    the last cluster had will do. Tasks in use are preferred.

    Args:
        reply: the job's tasks.
        spares: parameter servers to keep idle.
        used: the present or the last cluster.
        lost: tasks that do not answer.
        only_servers: leave out the workers, which come and go by themselves.
    """
    there = [task for task in reply.tasks if task not in lost and task not in reply.leaving]
    workers = tuple(task for task in there if task.role == WORKER and not only_servers)
    servers = [task for task in there if task.role == SERVER]
    wanted = max(1, reply.wanted.get(SERVER, 1) - spares)
    if used is not None and len(servers) < wanted:
        wanted = min(wanted, len(used.servers))
    known = used.addresses if used is not None else frozenset()
    servers = sorted(servers, key=lambda task: (SERVER, task.address) not in known)[:wanted]
    fewest = 1 if used is not None else max(1, reply.wanted.get(WORKER, 1))
    fewest = 0 if only_servers else fewest
    missing = [
        f"{need - have} of {counted(need, what)}"
        for what, need, have in (
            ("worker", fewest, len(workers)),
            ("parameter server", wanted, len(servers)),
        )
        if have < need
    ]
    if missing:
        return None, " and ".join(missing)
    before = used or ClusterChoice()
    return ClusterChoice(
        _in_place(workers, before.workers), _in_place(sorted(servers), before.servers)
    ), ""


def named(tasks: Iterable[ClusterTask]) -> str:
    """Return tasks in words."""
    return ", ".join(f"{task.role} {task.index} ({task.address})" for task in tasks)


@dataclass(frozen=True)
class ClusterChange:
    """Why a cluster is to be built again."""

    reason: str = ""
    """Empty: it stays."""
    lost: bool = False
    """True if a task is gone; TensorFlow may wait for it forever."""


def change(
    reply: ClusterReply,
    spares: int,
    used: ClusterChoice,
    lost: AbstractSet[ClusterTask] = frozenset(),
    *,
    only_servers: bool = False,
) -> ClusterChange:
    """Return why the cluster in use is to be built again; ``lost`` are tasks that do not answer."""
    listed = {(task.role, task.address) for task in reply.tasks}
    gone = [task for task in used.tasks if (task.role, task.address) not in listed]
    if gone:
        return ClusterChange(f"{named(gone)} {'is' if len(gone) == 1 else 'are'} gone", lost=True)
    best, _ = choose(reply, spares, used, lost, only_servers=only_servers)
    if best is None or best.addresses == used.addresses:
        return ClusterChange()
    return ClusterChange(f"the job now has {best.in_words()} instead of {used.in_words()}")
