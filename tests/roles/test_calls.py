"""Calls between processes of roles."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import numpy as np
import pytest

from dlrover.errors import ConfigurationError, RemoteError
from dlrover.roles import RoleGroup
from dlrover.roles.runtime import worker
from tests.roles.coordinators import Coordinator, coordinator

pytestmark = pytest.mark.slow

ROLLOUT = """
import os, signal, threading
from dlrover.roles import rpc, current_worker

class Rollout:
    def __init__(self):
        self.released = threading.Event()

    @rpc(idempotent=True)
    def double(self, numbers):
        return [2 * n for n in numbers]

    @rpc(idempotent=True)
    def die_at(self, numbers, poison, index):
        if poison in numbers and current_worker().index == index and current_worker().attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return numbers

    @rpc
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    @rpc
    def echo(self, value, *, named=None):
        return [value, named]

    @rpc
    def fail(self, numbers):
        raise ValueError(f"bad prompt {numbers}")

    @rpc
    def who(self):
        me = current_worker()
        return [me.job, me.role, me.index, me.attempt, me.instances]

    @rpc
    def hold(self):
        self.released.wait(20)
        return "released"

    @rpc(concurrent=True)
    def release(self):
        self.released.set()

    @rpc
    def unsendable(self):
        return object()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    with coordinator(tmp_path_factory.mktemp("job")) as made:
        (made.directory.path / "programs.py").write_text(textwrap.dedent(ROLLOUT))
        patch = pytest.MonkeyPatch()
        for name, value in made.variables("driver", 0, 1, 1).items():
            patch.setenv(name, value)
        try:
            for index in range(2):
                made.launch("rollout", index, "programs:Rollout", 1, 2)
            yield made
        finally:
            worker.leave()
            patch.undo()


@pytest.fixture
def rollouts(job: Coordinator) -> RoleGroup:
    group = RoleGroup("rollout", wait=25)
    group.wait(2, 25)
    return group


def test_all(rollouts, job):
    assert rollouts.call("who").result(20) == [["test", "rollout", i, 1, 2] for i in range(2)]
    value, named = rollouts.call(
        "echo", {"a": [1, None, "x", b"y", 2.5]}, named=np.arange(5)
    ).result(20)[0]
    assert value == {"a": [1, None, "x", b"y", 2.5]}
    assert (named == np.arange(5)).all() and named.flags.writeable
    assert list(rollouts.call_batch("double", 7, list(range(7)))) == [2 * n for n in range(7)]
    assert list(rollouts.call_batch("double", 7, list(range(7)), _chunk=1)) == [
        2 * n for n in range(7)
    ]
    with pytest.raises(RemoteError, match="bad prompt") as e:
        rollouts.call_rank0("fail", [1]).result(10)
    print(e.value)
    with pytest.raises(ConfigurationError, match="no method dubble; it has die"):
        rollouts.call_rank0("dubble", [1]).result(10)
    with pytest.raises(
        ConfigurationError, match=r"Argument 2 of echo \(at \['b'\]\[1\]\) is of type object"
    ):
        rollouts.call("echo", 1, {"b": [1, object()]})
    with pytest.raises(RemoteError, match="result of unsendable is of type object"):
        rollouts.call_rank0("unsendable").result(10)
    import time

    t = time.perf_counter()
    for i in range(2000):
        rollouts.call_rank0("echo", i).result(10)
    print("calls/s", 2000 / (time.perf_counter() - t))
