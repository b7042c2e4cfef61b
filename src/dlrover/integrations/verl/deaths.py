"""What Ray knows of actors that died and of the room for new ones."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dlrover.errors import InfrastructureError

logger = logging.getLogger(__name__)

POLL = 0.1
"""Seconds between two looks at Ray's tables."""
SILENCE = 10.0
"""Seconds that a group's first start waits for room before it says so."""
LINES = 10
"""Last lines of a dead process's standard error that are shown."""
LINES_TIMEOUT = 20.0
"""Seconds for a process on its machine to read them."""
CAUSES = (
    ("intended exit", "its process left in an orderly way"),
    ("code 2. End of file", "its process was killed, for example by the kernel for want of memory, or crashed"),
    ("its node has died", "its node is gone"),
    ("node was terminated", "its node is gone"),
    ("ray.kill", "ray.kill ended it"),
    ("OUT_OF_MEMORY", "Ray killed it for want of memory on its node"),
    ("memory pressure", "Ray killed it for want of memory on its node"),
)  # fmt: skip
"""What Ray says of a death, and what that means."""


def dead(actors: Sequence[Any], grace: float) -> list[int]:
    """Return the ranks whose actors are dead, and wait ``grace`` seconds for the first of them to become so.

    One that Ray itself started again has lost what its program had set up, and is dead as well.
    """
    found: list[int] = []

    def any_dead() -> bool:
        rows = [_row(actor) for actor in actors]
        found[:] = [
            rank for rank, row in enumerate(rows)
            if row is None or row["State"] in ("DEAD", "RESTARTING") or row["NumRestarts"]
        ]  # fmt: skip
        return bool(found)

    until(any_dead, grace)
    return found


def end(actors: Sequence[Any], timeout: float) -> None:
    """Kill actors and wait until Ray has forgotten them, so that others can have their names.

    Raises:
        InfrastructureError: they do not die.
    """
    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(actor)

    def ended() -> bool:
        rows = [_row(actor) for actor in actors]
        return all(row is None or row["State"] == "DEAD" for row in rows)

    if not until(ended, timeout):
        raise InfrastructureError(f"its other actors have not ended within {timeout:g} s")


def room(groups: Sequence[Any], timeout: float) -> None:
    """Wait until placement groups have their resources, which Ray seeks anew when a node is lost.

    Raises:
        InfrastructureError: the cluster lacks them.
    """
    rows: list[dict[str, Any]] = []

    def placed() -> bool:
        rows[:] = [ray.util.placement_group_table(group) for group in groups]
        return all(row["state"] in ("CREATED", "REMOVED") for row in rows)

    if not until(placed, timeout) or any(row["state"] == "REMOVED" for row in rows):
        row = next(row for row in rows if row["state"] != "CREATED")
        raise InfrastructureError(
            f"its {_needs(row)} and did not get it within {timeout:g} s; {_nodes()}"
        )


@contextlib.contextmanager
def explained(prefix: str) -> Iterator[None]:
    """Meanwhile, say once what placement groups whose names begin with ``prefix`` wait for, if they do."""
    over = threading.Event()
    threading.Thread(target=_explain, args=(prefix, over), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _explain(prefix: str, over: threading.Event) -> None:
    if over.wait(SILENCE):
        return
    rows = ray.util.placement_group_table().values()
    waiting = [row for row in rows if row["name"].startswith(prefix) and row["state"] == "PENDING"]
    if waiting and not over.is_set():
        free = _resources(ray.available_resources()) or "nothing"
        logger.warning(
            "A worker group waits for room: its %s; %s; %s is free. max_colocate_count of its"
            " RayResourcePool is the number of CPUs for each process; 10 is verl's default",
            _needs(waiting[0]), _nodes(), free,
        )  # fmt: skip


def _needs(row: dict[str, Any]) -> str:
    bundles = "; ".join(_resources(one) for one in row["bundles"].values())
    return f"placement group {row['name']} ({row['state']}, {row['strategy']}) needs {bundles}"


def _nodes() -> str:
    have = "; ".join(_resources(one["Resources"]) for one in ray.nodes() if one["Alive"])
    return f"the cluster's nodes have {have or 'nothing'}"


def until(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait until a condition holds; return whether it does."""
    deadline = time.monotonic() + timeout
    while not (holds := condition()) and time.monotonic() < deadline:
        threading.Event().wait(POLL)
    return holds


def described(actor_id: str) -> str:
    """Return which actor died, where and why, in words."""
    row = _table(actor_id)
    if row is None:
        return f"actor {actor_id}; Ray knows nothing more about it"
    place = f"actor {row['Name'] or row['ActorClassName']}, process {row['Pid']} on node {row['Address']['IPAddress']}"
    return f"{place}: {_cause(row)}"


def last_lines(actor_id: str) -> str:
    """Return the last lines of standard error of an actor's process, indented; empty if its node has no answer."""
    row = _table(actor_id)
    if row is None or not row["Pid"]:
        return ""
    there = NodeAffinitySchedulingStrategy(row["Address"]["NodeID"], soft=False)
    read = ray.remote(num_cpus=0, max_retries=0)(_read)
    with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
        lines = ray.get(
            read.options(scheduling_strategy=there).remote(row["Pid"]), timeout=LINES_TIMEOUT
        )
        if lines:
            return "\nThe last lines of its standard error:\n" + "\n".join(
                f"  {one}" for one in lines
            )
    return ""


def _read(pid: int) -> list[str]:
    """Return the last lines of standard error of a process of this node."""
    logs = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"  # noqa: SLF001
    files = sorted(logs.glob(f"worker-*-{pid}.err"), key=lambda path: path.stat().st_mtime)
    lines = files[-1].read_text(errors="replace").splitlines() if files else []
    return [line for line in lines if not line.startswith(":")][-LINES:]  # Ray's own marks


def _row(actor: Any) -> dict[str, Any] | None:
    return _table(actor._actor_id.hex())  # noqa: SLF001


def _table(actor_id: str) -> dict[str, Any] | None:
    from ray._private.state import state  # noqa: PLC0415

    return state.actor_table(actor_id) or None


def _cause(row: dict[str, Any]) -> str:
    """Return why an actor died."""
    cause = row["DeathCause"]
    kind = cause.WhichOneof("context") if cause is not None else None
    if kind is None:
        return f"Ray gives no cause, its state is {row['State']}"
    said = str(getattr(getattr(cause, kind), "error_message", "") or getattr(cause, kind)).strip()
    if kind == "oom_context":
        return "Ray killed it for want of memory on its node"
    if kind == "creation_task_failure_context":
        return "its constructor or the import of its class has failed"
    return next((means for words, means in CAUSES if words in said), said.splitlines()[-1].strip())


def _resources(of: dict[str, float]) -> str:
    shown = (
        f"{name} {count:g}"
        for name, count in of.items()
        if ":" not in name and "_group_" not in name
    )
    return ", ".join(shown)
