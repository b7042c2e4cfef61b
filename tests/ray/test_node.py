"""Nodes without a cluster: a machine without room for a file or a process, and a request that Ray carries out by half."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrover.spec.job import Limits
from dlrover.spec.jobdir import JobDir

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # Ray's own
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed; scripts/test-engines installs it"),
]  # fmt: skip


class Left(BaseException):
    """The process of the actor has ended."""


@pytest.fixture
def node(tmp_path: Path, monkeypatch):
    """A node whose master tells its address and is then gone for good; everything that it does is noted."""
    from dlrover.ray import node as module

    made = object.__new__(module.NodeActor.__ray_metadata__.modified_class)
    made._job, made._dir = SimpleNamespace(name="job"), JobDir(tmp_path)
    made._process, made._ended, made._reason, made.done = None, threading.Event(), "", []
    asked = []
    master = SimpleNamespace(moved=SimpleNamespace(remote=asked.append))
    masters = iter([master, master, None])

    def leave(code: int) -> None:
        raise Left

    monkeypatch.setattr(module.cluster, "actor", lambda name: next(masters))
    monkeypatch.setattr(module.cluster, "remove_groups", made.done.append)
    monkeypatch.setattr(module.ray, "get", lambda reference: "10.0.0.1:1")
    context = SimpleNamespace(get_actor_name=lambda: "job/node/0")
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(module.os, "_exit", leave)
    monkeypatch.setattr(module, "DISK_DELAY", 0.0, raising=False)
    made.asked, made.module = asked, module
    return made


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_node_without_room_is_reported_lost_and_gives_its_resources_back(node, monkeypatch):
    monkeypatch.setattr(node.module.files, "write_atomically", full)
    with pytest.raises(Left):
        node._follow(0, 0)
    assert node.wait() == ("its agent could not be started: [Errno 28] No space left on device")
    assert node.done == ["job/node/0"]


def test_a_running_node_writes_down_its_master_again_once_there_is_room(node, monkeypatch):
    write, refusals = node.module.files.write_atomically, [full]

    def once(*args: object) -> None:
        (refusals.pop() if refusals else write)(*args)

    monkeypatch.setattr(node.module.files, "write_atomically", once)
    node._process = object()
    monkeypatch.setattr(node, "_end", lambda: node.done.append("ended"))
    with pytest.raises(Left):
        node._follow(0, 0)
    assert node.asked == ["", ""]
    assert b"10.0.0.1:1" in node._dir.master.read_bytes()
    assert not node._ended.is_set()
    assert node.done == ["ended", "job/node/0"]


def test_an_agent_has_the_time_that_its_savers_have(node):
    launch, limits = SimpleNamespace(shutdown_timeout=30), Limits(release_grace=600.0)
    node._role = SimpleNamespace(agent=SimpleNamespace(launch=launch, limits=limits))
    waits: list[float] = []
    node._ended = SimpleNamespace(wait=lambda seconds: not waits.append(seconds))
    node.finish()
    assert waits == [630.0 + node.module.END_WAIT]


def test_a_request_that_ray_has_carried_out_by_half_is_made_again_from_the_beginning(monkeypatch):
    from ray.exceptions import RaySystemError

    from dlrover.ray import platform

    there, steps, watched = set(), iter(["half", "whole", "whole"]), []

    def create(name: str, *_: object) -> None:
        if name in there:
            raise RaySystemError(f"name '{name}' already exists")  # as Ray says it
        there.add(name)
        if next(steps) == "half":
            raise RaySystemError("the head does not answer")

    async def watch(node_id: int, name: str, bundle: object) -> None:
        watched.append(name)

    monkeypatch.setattr(platform, "_create", create)
    monkeypatch.setattr(platform, "_remove", there.discard)
    monkeypatch.setattr(platform, "RETRY_DELAY", 0.0)
    monkeypatch.setattr(platform.jobs, "encode", lambda job: b"")
    monkeypatch.setattr(platform.jobs, "bundle_of", lambda job, name: {})
    master = SimpleNamespace(on_node_wait=lambda node_id, reason: None)
    made = platform.RayPlatform(SimpleNamespace(name="job"), master, [])
    monkeypatch.setattr(made, "_watch", watch)
    node = SimpleNamespace(node_id=0, node_rank=0)
    asyncio.run(asyncio.wait_for(made._make("job/node/0", node), 10))
    assert watched == ["job/node/0"]
