"""Calls between processes of roles: real processes, some of which are killed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest

from dlrover import launched
from dlrover.checkpoint.saver import certificates
from dlrover.errors import (
    ConfigurationError,
    InfrastructureError,
    MemberLostError,
    ProtocolError,
    RemoteError,
)
from dlrover.roles import RoleGroup, current_worker
from dlrover.roles.runtime import wire
from dlrover.roles.runtime.listener import CallState
from dlrover.roles.runtime.wire import CallOp
from tests.roles.coordinators import Coordinator, coordinator, joined
from tests.support.children import Child
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAM = """
import os, signal, threading
from dlrover.roles import current_worker, rpc

def own(cause):
    raise ValueError(f"bad prompt {cause}")

class Rollout:
    def __init__(self, config):
        self.released = threading.Event()
        self.config = config

    @rpc(idempotent=True)
    def double(self, numbers, die_once=()):
        me = current_worker()
        if me.attempt == 1 and set(numbers) & set(die_once):
            os.kill(os.getpid(), signal.SIGKILL)
        return [2 * n for n in numbers]

    @rpc(idempotent=True)
    def die(self, numbers):
        os.kill(os.getpid(), signal.SIGKILL)

    @rpc
    def once(self, numbers, index):
        if current_worker().index == index:
            os.kill(os.getpid(), signal.SIGKILL)
        return numbers

    @rpc
    def echo(self, value, *, named=None):
        return [value, named]

    @rpc
    def fail(self, cause):
        own(cause)

    @rpc
    def who(self):
        me = current_worker()
        return [me.job, me.role, me.index, me.attempt, me.instances]

    @rpc
    def hold(self):
        return self.released.wait(60)

    @rpc(concurrent=True)
    def release(self):
        self.released.set()

    @rpc
    def unsendable(self):
        return {"a": [1, object()]}

    def private(self):
        pass
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    with coordinator(tmp_path_factory.mktemp("calls")) as made:
        made.write("programs.py", PROGRAM)
        for index in range(2):
            made.launch("rollout", index, "programs:Rollout", instances=2)
        with joined(made, "driver") as me:
            me.calls._machine = "another machine"  # calls go by TCP, with TLS
            RoleGroup("rollout").wait(2, 60)
            yield made


@pytest.fixture
def rollouts(job: Coordinator) -> RoleGroup:
    """Both members; those that the last test has killed are started again."""
    for index in range(2):
        process = job.processes.get(("rollout", index))
        if process is None or process.poll() is not None:
            job.again("rollout", index)
    group = RoleGroup("rollout", wait=60)
    group.wait(2, 60)
    return group


def test_calls_of_all_of_the_first_and_of_a_batch(rollouts: RoleGroup) -> None:
    assert [who[:3] for who in rollouts.call("who")] == [["test", "rollout", i] for i in range(2)]
    assert rollouts.call_rank0("who").result(60)[4] == 2
    plain = {"a": [1, None, True, "x", b"y", 2.5], "b": {}}
    assert rollouts.call("echo", plain, named=-1).result(60) == [[plain, -1]] * 2
    assert rollouts.call("echo", ["x", "y"], _scatter=True, named=[1, 2]).result(60) == [
        ["x", 1],
        ["y", 2],
    ]
    for chunk in (0, 1, 3):
        found = rollouts.call_batch("double", 7, list(range(7)), _chunk=chunk)
        assert list(found) == found.result(60) == [2 * n for n in range(7)]
        assert found[2:4] == [4, 6]
        assert found[-1] == 12
    assert not rollouts.call_batch("double", 0, []).result(60)
    with pytest.raises(
        ConfigurationError, match="Sequence 1 has 3 elements; it must have one for each element: 4"
    ):
        rollouts.call_batch("double", 4, [1, 2, 3])
    assert not RoleGroup("critic", optional=True).call("who").result(1)


def test_arrays_come_as_they_are_and_can_be_written_to(rollouts: RoleGroup) -> None:
    for array in (
        np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2],
        np.array(3, np.float32),
        np.empty((0, 5), np.float64),
        np.array([True, False]),
        np.arange(1 << 20),
    ):
        value, _ = rollouts.call_rank0("echo", {"x": [array]}).result(60)
        (same,) = value["x"]
        assert same.dtype == array.dtype
        assert same.flags.writeable
        np.testing.assert_array_equal(same, array)
    large = [rollouts.call_rank0("echo", np.full(1 << 18, n)).result(60)[0] for n in range(6)]
    assert all((array == n).all() for n, array in enumerate(large)), "each has memory of its own"
    assert rollouts.call_rank0("echo", np.float32(1.5)).result(60)[0] == 1.5


def test_an_argument_or_a_result_that_cannot_be_sent_is_named(rollouts: RoleGroup) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"^Argument 2 of echo \(at \['b'\]\[1\]\) is of type Future, which cannot be sent to another process",
    ):
        rollouts.call("echo", 1, {"b": [1, Future()]})
    with pytest.raises(ConfigurationError, match=r"^Argument named of echo is of type function"):
        rollouts.call("echo", 1, named=until)
    with pytest.raises(
        RemoteError, match=r"The result of unsendable \(at \['a'\]\[1\]\) is of type object"
    ):
        rollouts.call_rank0("unsendable").result(60)


def test_the_root_cause_of_a_remote_error_is_in_the_error(rollouts: RoleGroup) -> None:
    with pytest.raises(RemoteError) as caught:
        rollouts.call_rank0("fail", 7).result(60)
    error = caught.value
    assert (error.kind, error.text) == ("ValueError", "bad prompt 7")
    lines = str(error).splitlines()
    assert lines[0] == "rollout 0: fail raised ValueError: bad prompt 7"
    assert lines[-1] == "ValueError: bad prompt 7"
    assert any("programs.py" in line and "in own" in line for line in lines)
    assert not any("listener.py" in line for line in lines)
    with pytest.raises(
        ConfigurationError, match="rollout has no method private; it has die, double"
    ):
        rollouts.call_rank0("private").result(60)


def test_a_member_answers_that_it_lives_while_its_method_runs(
    rollouts: RoleGroup, job: Coordinator
) -> None:
    held = rollouts.call_rank0("hold")
    address = rollouts.members()[0].address
    with wire.connect(address, "another machine", current_worker().link.secret, tls=True) as sock:

        def state() -> CallState:
            wire.send(sock, CallOp.PING, 1)
            return msgspec.msgpack.decode(wire.receive(sock).head, type=CallState)

        running = until(lambda: state().running)
        assert running[0][0] == "hold", "it lives, and its progress is another question"
        waiting = rollouts.call_rank0("who")
        until(lambda: state().waiting == 1)
        assert not held.done()
        rollouts.call_rank0("release").result(60)
        assert held.result(60)
        assert waiting.result(60)[1] == "rollout"


def test_a_batch_whose_member_dies_is_done_by_others_if_it_may_run_twice(
    rollouts: RoleGroup, job: Coordinator
) -> None:
    alive = job.attempt("rollout", 0), job.attempt("rollout", 1)
    if 1 not in alive:
        pytest.skip("both members were started again by an earlier test")
    found = rollouts.call_batch("double", 20, list(range(20)), die_once=[7], _chunk=1)
    dead = until(lambda: job.dead("rollout"), 60)
    job.lost("rollout", dead[0])
    if job.attempt("rollout", 1 - dead[0]) == 1:
        # The other one, a first attempt too, dies of the same element; a later attempt does it.
        job.lost("rollout", until(lambda: job.dead("rollout"), 60)[0])
        job.again("rollout", 0)
    assert found.result(60) == [2 * n for n in range(20)]


def test_only_the_elements_of_a_dead_member_fail_where_a_method_may_not_run_twice(
    rollouts: RoleGroup, job: Coordinator
) -> None:
    found = rollouts.call_batch("once", 4, [0, 1, 2, 3], index=1, _chunk=2)
    job.lost("rollout", until(lambda: job.dead("rollout"), 60)[0])
    errors = found.errors()
    assert len(errors) == 2
    assert all(isinstance(error, MemberLostError) for error in errors.values())
    assert [found[i] for i in range(4) if i not in errors] in ([0, 1], [2, 3])
    assert str(next(iter(errors.values()))) == (
        "rollout 1 was lost while it ran once: it was killed by SIGKILL. A method that may run twice,"
        " @rpc(idempotent=True), is called again."
    )


def test_a_call_waits_for_the_successor_of_a_member_and_not_for_ever(
    rollouts: RoleGroup, job: Coordinator
) -> None:
    epoch = rollouts.epoch
    job.kill("rollout", 0)
    rollouts.changed(epoch, 60)
    called = rollouts.call("who")
    with pytest.raises(
        MemberLostError,
        match=r"who waited 0 s for rollout 0: rollout 0 has ended: it was killed by SIGKILL",
    ):
        RoleGroup("rollout", wait=0.2).call_rank0("who").result(60)
    assert called[1][2] == 1, "the other one answers meanwhile"
    job.again("rollout", 0)
    assert called[0][:3] == ["test", "rollout", 0]
    with pytest.raises(
        InfrastructureError, match="Waited 0 s for the first member of the role rolout"
    ):
        RoleGroup("rolout", wait=0.1).call("who")


def test_a_role_or_a_member_that_can_never_be_is_refused_at_once(
    rollouts: RoleGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_worker(), "members", {"rollout": 2, "driver": 1})
    for name, why in (
        ("rolout", r"Did you mean rollout\?"),
        ("nope", r"It has rollout, driver\."),
    ):
        refused = rf"^The job has no role {name}\. {why}$"
        with pytest.raises(ConfigurationError, match=refused):
            RoleGroup(name)
        group = RoleGroup(name, optional=True)
        assert not group.call("who").result(1)
        with pytest.raises(ConfigurationError, match=refused):
            group.call_rank0("who")
        with pytest.raises(ConfigurationError, match=refused):
            group.call_batch("double", 1, [1])
        with pytest.raises(ConfigurationError, match=refused):
            group.wait(timeout=60)
    refused = (
        "^The role rollout never has 3 members; its maximum is 2, which is what can be waited for.$"
    )
    for serving in (False, True):
        with pytest.raises(ConfigurationError, match=refused):
            rollouts.wait(3, 60, serving=serving)
    assert len(rollouts.wait(2, 60)) == 2
    for index in (2, 7, -1):
        refused = f"^The role rollout never has a member {index}; its last one is rollout 1.$"
        with pytest.raises(ConfigurationError, match=refused):
            rollouts.call_member(index, "who")
    assert rollouts.call_member(1, "who").result(60)[2] == 1


def test_a_call_that_kills_whoever_takes_it_is_given_up(
    rollouts: RoleGroup, job: Coordinator
) -> None:
    found = rollouts.call_batch("die", 1, [1])
    for _ in range(3):
        index = until(lambda: job.dead("rollout"), 60)[0]
        job.lost("rollout", index)
        job.again("rollout", index)
    assert "3 members were lost in this call, so it is not made again" in str(found.errors()[0])


def test_a_coordinator_that_dies_is_noticed_by_no_call(
    rollouts: RoleGroup, job: Coordinator
) -> None:
    before = rollouts.members()
    job.stop()
    assert [who[2] for who in rollouts.call("who")] == [0, 1]
    job.start()
    job.kill("rollout", 1)
    job.again("rollout", 1)
    until(lambda: rollouts.members()[1:] and rollouts.members()[1].place != before[1].place, 60)
    assert [who[2] for who in rollouts.call("who")] == [0, 1]
    assert rollouts.members()[0] == before[0]


def test_a_process_that_does_not_know_the_secret_is_turned_away(rollouts: RoleGroup) -> None:
    address = rollouts.members()[0].address
    for machine in ("another", current_worker().machine):
        with pytest.raises((OSError, InfrastructureError)):
            wire.connect(address, machine, b"guess")


def test_who_has_another_certificate_or_none_hears_nothing(
    rollouts: RoleGroup, caplog: pytest.LogCaptureFixture
) -> None:
    me = current_worker()
    own, secret = me.listener.address, me.link.secret
    for shown in (certificates.fingerprint(certificates.make()), b""):
        changed = msgspec.structs.replace(own, fingerprint=shown)
        with pytest.raises(ProtocolError, match="no process of this job: It shows another cert"):
            wire.connect(changed, "another machine", secret, tls=True)
    with socket.create_connection((own.host, own.port)) as plain:
        plain.settimeout(60)
        plain.sendall(bytes(64))
        until(lambda: "Closed a connection: It does not speak TLS" in caplog.text, 60)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()

        def answer() -> None:
            with listening.accept()[0] as plain:
                plain.sendall(bytes(64))

        answered = threading.Thread(target=answer)
        answered.start()
        changed = msgspec.structs.replace(own, host=host, port=port, fingerprint=b"")
        with pytest.raises(ProtocolError, match="It does not speak TLS as this job's processes do"):
            wire.connect(changed, "another machine", secret, tls=True)
        answered.join()


def refusal(use: Callable[[], object]) -> str:
    try:
        return f"{use()}"
    except ConfigurationError as error:
        return str(error)


def test_a_fork_takes_no_part(rollouts: RoleGroup) -> None:
    known = rollouts.call_rank0("echo", 0)
    assert known.result(60) == [0, None]
    uses: list[Callable[[], object]] = [
        current_worker,
        lambda: rollouts.call_rank0("echo", "of the fork"),
        lambda: rollouts.call_batch("double", 1, [1]),
        rollouts.members,
        lambda: rollouts.changed(rollouts.epoch, 60),
    ]

    def refused() -> list[str]:
        launched.loaded(7)  # this is no return to a step
        return [refusal(use) for use in uses]

    child = Child(refused, within=60)
    mine = rollouts.call_rank0("echo", "of the process")
    said = child.result()
    assert all(one.startswith("A fork of a process of a role ") for one in said), said
    assert mine.result(60) == ["of the process", None]
    assert threading.active_count() > 1
