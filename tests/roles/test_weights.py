"""Weights between processes of roles: publishers and readers that are killed, other layouts, other machines."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from dlrover import config
from dlrover._util import procs
from dlrover.errors import (
    ConfigurationError,
    InfrastructureError,
    MemberLostError,
    ProtocolError,
)
from dlrover.roles import Queue, RoleGroup, current_worker, weights
from dlrover.roles.coordinator import health
from dlrover.roles.messages import (
    HOLDER,
    JobView,
    MemberPlace,
    MemberView,
    PartView,
    PublishPart,
    RoleView,
    Version,
)
from dlrover.roles.runtime import holder, memory
from dlrover.roles.runtime.weights import following, publishing
from tests.roles.coordinators import Coordinator, coordinator, joined
from tests.support.children import Child
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAM = """
import os, signal
import numpy as np
from dlrover.roles import current_worker, rpc, weights
from dlrover.roles.runtime.weights import publishing

def state(step):
    return {"w": np.full(100_000, step, np.float32), "step": step}

class Trainer:
    @rpc
    def publish(self, step):
        weights.publish(state(step), step)

    @rpc
    def die_while_it_publishes(self, step):
        me = current_worker()
        place, address = publishing._holder(me)
        memory = publishing.holders.connection(me, place, address).writable("half", 400_000)
        memory[:100] = bytes(100)
        os.kill(os.getpid(), signal.SIGKILL)

    @rpc
    def resume(self, step):
        current_worker().resumed(step)

class Rollout:
    def __init__(self):
        self.weights = weights.latest(wait=False)

    @rpc
    def load(self, newer_than=None):
        than = weights.Version(*newer_than) if newer_than else None
        self.weights = weights.latest(newer_than=than, timeout=60)
        target = {"w": np.zeros(100_000, np.float32)}
        self.weights.load_into(target)
        assert (target["w"] == self.weights["step"]).all()
        return list(self.version())

    def version(self):
        return [self.weights.version.epoch, self.weights.version.step]

    @rpc(idempotent=True)
    def generate(self, prompts):
        return [[prompt, current_worker().index, *self.version()] for prompt in prompts]
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Coordinator]:
    with coordinator(tmp_path) as made:
        made.write("programs.py", PROGRAM)
        yield made


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Coordinator]:
    """A job with a process that keeps weights."""
    with coordinator(tmp_path, keeps=True) as made:
        made.write("programs.py", PROGRAM)
        until(lambda: made.keeper, 60)
        yield made


def test_a_state_comes_back_as_it_was_and_its_memory_is_used_again(job: Coordinator) -> None:
    with joined(job, "trainer"):
        assert weights.latest(wait=False) is None
        with pytest.raises(
            InfrastructureError, match="a version of the weights: no role has published any"
        ):
            weights.latest(timeout=0.1)
        first = None
        for step in range(1, 9):
            state = {
                "a": np.full((300, 7), step, np.int64),
                "empty": np.empty(0),
                "n": step,
                "text": ["x", {"y": 1}],
            }
            assert weights.publish(state, step) == Version(0, step)
            found = weights.latest()
            assert found is not None
            found.load_into(copied := {"a": np.zeros((300, 7), np.int64)})
            assert (copied["a"] == step).all()
            back = found.state_dict()
            assert back.keys() == state.keys() == set(found)
            assert (back["a"] == step).all()
            assert (back["n"], back["text"]) == (step, ["x", {"y": 1}])
            assert (found.read("a", (10, 2), (5, 3)) == np.full((5, 3), step)).all()
            first = first if first is not None else back["a"]
        assert (first == 1).all(), "memory that is read stays"
        assert weights.versions() == [Version(0, 7), Version(0, 8)]
        assert current_worker().holding.memory <= 6 * (300 * 7 * 8 + 3 * 4096)
        with pytest.raises(
            ConfigurationError, match="Version 8 of the weights was published before"
        ):
            weights.publish({"a": np.zeros(3)}, 8)
        with pytest.raises(
            ConfigurationError, match="The value f of the weights is of type function"
        ):
            weights.publish({"f": until}, 9)
        with pytest.raises(
            ConfigurationError,
            match=r"a has shape \(300, 7\) in version 8 of weights, and \(7,\) here",
        ):
            weights.latest().load_into({"a": np.zeros(7, np.int64)})


def test_damage_is_found_and_another_machine_reads_over_its_connection(job: Coordinator) -> None:
    with joined(job, "trainer") as me:
        large = np.arange(20_000_000, dtype=np.int32)
        weights.publish({"w": large, "v": np.arange(5)}, 1)
        me.machine = "another one"
        publishing.holders.drop(me.place)
        found = weights.latest()
        assert found is not None
        assert not publishing.holders.connection(me, me.place, me.listener.address).local
        np.testing.assert_array_equal(found["w"], large)
        (part,) = me.holding._parts.values()
        os.pwrite(part.buffer.fd, b"x", 40)
        found = weights.latest()
        assert found is not None
        np.testing.assert_array_equal(found["v"], np.arange(5))
        with pytest.raises(
            InfrastructureError, match="The tensor w of version 1 of weights is damaged in memory"
        ):
            found.state_dict()
        with pytest.raises(
            InfrastructureError, match="The tensor w of version 1 of weights is damaged in memory"
        ):
            found.load_into({"w": np.zeros_like(large)})


def published(step: int, since: int = 0) -> Any:
    """Publish versions and return the last one as it was read: memory of an earlier one is used again by then."""
    for version in range(since or step, step + 1):
        weights.publish({"w": np.full(100_000, version)}, version)
    found = weights.latest()
    assert found is not None
    return found["w"]


def test_a_fork_reads_weights_as_they_were_and_disturbs_none_of_its_parent(
    job: Coordinator,
) -> None:
    with joined(job, "trainer") as me:
        read = [published(1)]
        me.machine = "another one"
        publishing.holders.drop(me.place)
        away = weights.latest()
        me.machine = me.listener.address.machine
        publishing.holders.drop(me.place)
        read.append(published(2))
        (told, say), (heard, tell) = os.pipe(), os.pipe()

        def look() -> None:
            with pytest.raises(ConfigurationError):
                away["w"]
            os.write(tell, b"x")
            os.read(told, 1)
            assert all((array == step).all() for step, array in enumerate(read, 1))

        child = Child(look, within=60)
        os.close(tell)
        os.read(heard, 1)
        read.clear()
        last = published(12, 3)
        os.write(say, b"x")
        child.result()
        assert (last == 12).all()
        for fd in (told, say, heard):
            os.close(fd)


def test_a_keeper_ends_with_the_job_while_it_waits_for_a_coordinator_that_has_ended(
    job: Coordinator,
) -> None:
    read, write = os.pipe()
    variables = job.variables(HOLDER, 0, 1, 1)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # and answers nothing
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        os.set_inheritable(read, True)
        pid = holder._start(
            {**variables, config.ROLE_VARIABLES["address"]: address}, lifeline_fd=read
        )
        listening.settimeout(60)
        with listening.accept()[0]:
            os.close(write)
            poll = select.poll()
            poll.register(pidfd := os.pidfd_open(pid), select.POLLIN)
            ended = poll.poll(10_000)
            procs.kill([pid])
            os.waitpid(pid, 0)
            assert ended
    os.close(read)
    os.close(pidfd)


class Interrupts:
    """A KeyboardInterrupt in the next answer of whoever keeps weights: before it is read, or after its head."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def __call__(self, what: Callable[[], object], function: str, *, after: bool) -> None:
        original = getattr(memory.wire, function)

        def interrupted(*args: Any) -> NoReturn:
            if after:
                original(*args)
            raise KeyboardInterrupt

        with self._patch.context() as patch:
            patch.setattr(memory.wire, function, interrupted)
            with pytest.raises(KeyboardInterrupt):
                what()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("function", ["send", "receive"])
def test_after_an_interrupt_no_answer_is_taken_for_another_one(
    kept: Coordinator, monkeypatch: pytest.MonkeyPatch, function: str, after: bool
) -> None:
    interrupt = Interrupts(monkeypatch)
    with joined(kept, "trainer"):
        for name in ("a", "b"):
            weights.publish({"w": np.full(10, ord(name))}, 1, name=name)
        interrupt(lambda: weights.latest(name="a"), function, after=after)
        found = weights.latest(name="b", timeout=10)
        assert found is not None
        assert (found["w"] == ord("b")).all()
        interrupt(lambda: weights.publish({"w": np.zeros(20)}, 2, name="a"), function, after=after)
        weights.publish({"w": np.zeros(30)}, 2, name="a")
        found = weights.latest(name="a", timeout=10)
        assert found is not None
        assert found["w"].shape == (30,)


def test_a_publication_that_was_interrupted_leaves_a_version_that_can_be_read_or_none(
    job: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(job, "trainer") as me:
        ask = me.link.ask

        def interrupted(request: Any) -> Any:
            if isinstance(request, PublishPart):
                if request.step == 2:
                    ask(request)
                raise KeyboardInterrupt
            return ask(request)

        def fails(*_: object) -> NoReturn:
            raise KeyboardInterrupt

        published(1)
        with monkeypatch.context() as patch:
            patch.setattr(me.link, "ask", interrupted)
            for step in (2, 3):
                with pytest.raises(KeyboardInterrupt):
                    published(step)
        until(lambda: weights.versions()[-1:] == [Version(0, 2)], 60)
        found = weights.latest(timeout=10)
        assert found is not None
        assert (found["w"] == 2).all()
        with monkeypatch.context() as patch:
            patch.setattr(publishing, "_copied", fails)
            for step in range(3, 23):
                with pytest.raises(KeyboardInterrupt):
                    published(step)
        assert (published(23) == 23).all()
        until(lambda: me.holding.memory < 10 * 100_000 * 8, 60)


def test_weights_stay_as_they_were_read_though_the_connection_to_who_keeps_them_ended(
    kept: Coordinator,
) -> None:
    with joined(kept, "trainer") as me:
        first = published(1)
        publishing.holders.drop(publishing._holder(me)[0])
        assert (published(12, 2) == 12).all()
        assert (first == 1).all()


@pytest.mark.torch
def test_each_rank_publishes_its_parts_and_each_reader_takes_what_it_needs(
    kept: Coordinator,
) -> None:
    torch = pytest.importorskip("torch")
    from dlrover.checkpoint import Shard

    whole = torch.arange(48, dtype=torch.bfloat16).reshape(8, 6)
    for rank, at in enumerate((0, 3)):  # one process is both, one after the other
        rows = whole[at : at + (3, 5)[rank]]
        with joined(kept, "trainer", rank, instances=2):
            state = {"spread": Shard(rows, (8, 6), (at, 0)), "plain": torch.ones(3), "step": 1}
            weights.publish(state, 1)
            assert bool(weights.versions()) == (rank == 1)
    with joined(kept, "rollout"):
        found = weights.latest()
        assert found is not None
        back = found.state_dict()
        assert torch.equal(back["spread"], whole)
        assert (back["plain"].tolist(), back["step"]) == ([1, 1, 1], 1)
        mine = {
            "spread": Shard(torch.zeros(4, 2, dtype=torch.bfloat16), (8, 6), (2, 4)),
            "plain": torch.zeros(3),
        }
        found.load_into(mine)
        assert torch.equal(mine["spread"].tensor, whole[2:6, 4:])
        model = torch.nn.Linear(6, 8, bias=False, dtype=torch.bfloat16)
        with pytest.raises(ConfigurationError, match="Version 1 of weights has no tensor weight"):
            found.load_into(model)


def test_weights_outlive_trainer_and_coordinator_and_a_half_published_version_is_never_seen(
    kept: Coordinator,
) -> None:
    kept.launch("trainer", 0, "programs:Trainer")
    kept.launch("rollout", 0, "programs:Rollout")
    with joined(kept, "driver"):
        trainer, rollouts = RoleGroup("trainer"), RoleGroup("rollout")
        trainer.call_rank0("publish", 1).result(60)
        assert rollouts.call_rank0("load").result(60) == [0, 1]
        half = trainer.call_rank0("die_while_it_publishes", 2)
        until(lambda: kept.dead("trainer"), 60)
        kept.lost("trainer", 0)
        with pytest.raises(MemberLostError, match="killed by SIGKILL"):
            half.result(60)
        assert rollouts.call_batch("generate", 2, ["a", "b"]).result(60) == [
            ["a", 0, 0, 1],
            ["b", 0, 0, 1],
        ]
        kept.launch("rollout", 1, "programs:Rollout", instances=2)
        rollouts.wait(2, 60)
        assert rollouts.call("load")[1] == [0, 1], "the trainer is dead, and its weights are not"
        pid = kept.keeper
        kept.restart()
        assert rollouts.call("load").result(60) == [[0, 1], [0, 1]]
        assert kept.keeper == pid
        kept.again("trainer", 0)
        trainer.wait(1, 60)
        trainer.call_rank0("publish", 2).result(60)
        assert rollouts.call("load", [0, 1]).result(60) == [[0, 2], [0, 2]]


def test_a_recovered_rollout_serves_once_it_has_the_current_weights_and_none_that_were_rolled_back(
    job: Coordinator,
) -> None:
    job.launch("trainer", 0, "programs:Trainer")
    for index in range(2):
        job.launch("rollout", index, "programs:Rollout", instances=2)
    with joined(job, "driver"):
        trainer, rollouts = RoleGroup("trainer"), RoleGroup("rollout")
        rollouts.wait(2, 60)
        for step in (1, 2):
            trainer.call_rank0("publish", step).result(60)
        rollouts.call("load").result(60)
        for _ in range(2):  # the second death is handled as the first
            job.kill("rollout", 0)
            job.again("rollout", 0)
            rollouts.wait(2, 60)
            until(lambda: [m.place.index for m in rollouts.members(serving=True)] == [1], 60)
            got = rollouts.call_batch("generate", 4, list("abcd"), _chunk=1).result(60)
            assert {sample[1] for sample in got} == {1}, "the stale one gets no prompts"
            assert rollouts.call("load")[0] == [0, 2]
            rollouts.wait(2, 60, serving=True)
        job.kill("trainer", 0)
        got = rollouts.call_batch("generate", 4, list("abcd"), _chunk=1).result(60)
        assert {tuple(sample[2:]) for sample in got} <= {(0, 2)} or not got
        job.again("trainer", 0)
        trainer.call_rank0("resume", 1).result(60)
        until(lambda: not rollouts.members(serving=True), 60, "both have a version that never was")
        assert not weights.is_valid(Version(0, 2))
        with pytest.raises(
            MemberLostError, match=r"a member of rollout that serves: rollout 0 has not the current"
        ):
            RoleGroup("rollout", wait=0.2).call_batch("generate", 1, ["a"]).result(60)
        trainer.call_rank0("publish", 2).result(60)
        assert rollouts.call("load", [0, 2]).result(60) == [[1, 2], [1, 2]]
        rollouts.wait(2, 60, serving=True)


def test_a_version_that_went_through_a_queue_and_the_cursor_is_one_still(job: Coordinator) -> None:
    with joined(job, "trainer") as me:
        samples = Queue("samples", size=4)
        for step in (1, 2):
            version = weights.publish({"w": np.zeros(3)}, step)
            samples.put({"version": version}, cursor=version)
        first, second = (one["version"] for one in samples.get(2))
        assert weights.latest(newer_than=second, wait=False) is None
        found = weights.latest(newer_than=first, wait=False)
        assert found is not None
        assert found.version == Version(0, 2)
        me.resumed(1)
        assert [weights.is_valid(one) for one in (first, second, me.cursor)] == [True, False, False]
        for wrong in (2, [0], "2"):
            with pytest.raises(ConfigurationError, match="must be a Version, or its epoch"):
                weights.is_valid(wrong)  # type: ignore[arg-type]


def test_steps_of_numpy_and_pytorch_are_steps_and_others_are_refused(job: Coordinator) -> None:
    torch = pytest.importorskip("torch")
    with joined(job, "trainer") as me:
        samples = Queue("samples", size=4)
        samples.put("a")
        assert weights.publish({"w": np.zeros(3)}, np.int64(3)) == Version(0, 3)
        samples.ack(samples.get(), step=torch.tensor(3))
        me.resumed(np.int32(2))
        assert samples.get(wait=False), "it was learned after the step"
        for wrong in (-5, 1.5, "3", True, 1 << 63, None):
            says = "it must be a whole number, 0 or above"
            with pytest.raises(ConfigurationError, match=says):
                weights.publish({}, wrong)  # type: ignore[arg-type]
            with pytest.raises(ConfigurationError, match=says):
                me.resumed(wrong)  # type: ignore[arg-type]
            with pytest.raises(ConfigurationError, match=says):
                samples.ack(step=wrong)  # type: ignore[arg-type]


def test_without_a_keeper_weights_die_with_their_publisher_and_readers_are_told(
    job: Coordinator,
) -> None:
    job.launch("trainer", 0, "programs:Trainer")
    with joined(job, "rollout"):
        RoleGroup("trainer").call_rank0("publish", 3).result(60)
        held = weights.latest()
        assert held is not None
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(weights.latest, newer_than=held.version, timeout=10)
            job.kill("trainer", 0)
            until(lambda: not weights.versions(), 60)
            assert (held["w"] == 3).all(), "who holds it keeps it"
            lost = "there is none now; version 3 was lost with the process that kept it, and trainer may publish it again"
            with pytest.raises(InfrastructureError, match=lost):
                waiting.result(60)
        del held
        gc.collect()


def test_the_process_that_keeps_weights_is_started_again_and_ends_with_the_job(
    tmp_path: Path,
) -> None:
    with coordinator(tmp_path, keeps=True) as made:
        first = until(lambda: made.keeper, 60)
        with joined(made, "trainer"):
            os.kill(first, signal.SIGKILL)
            until(lambda: not holder._runs(first), 60)
            weights.publish({"a": np.zeros(3)}, 1)  # before anyone knows
        second = until(lambda: made.keeper not in (0, first) and made.keeper, 60)
        assert [one.reason for one in made.losses] == ["it was killed by SIGKILL"]
    until(lambda: not holder._runs(second), 60)
    assert len(made.losses) == 1, "the end of the job is no death"


@pytest.mark.parametrize("known", [True, False], ids=["now", "from_the_journal"])
def test_a_keeper_that_reports_nothing_is_replaced_and_that_is_said_once(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "KEEPER_SILENCE", 3.0)
    monkeypatch.setattr(publishing, "HOLDER_LIMIT", 1.0)  # it begins with the first failure
    with coordinator(tmp_path, keeps=True) as made:
        first = until(lambda: made.keeper, 60)
        with joined(made, "trainer"):
            weights.publish({"a": np.zeros(3)}, 1)
            os.kill(first, signal.SIGSTOP)
            if not known:
                made.restart()
            weights.publish({"a": np.zeros(3)}, 2)  # waits for the next one
        until(lambda: made.keeper not in (0, first), 60)
        assert [(one.reason, one.lost) for one in made.losses] == [
            ("it is silent", {"weights": "1"})
        ]


def test_a_keeper_that_comes_too_late_leaves_without_a_word(kept: Coordinator) -> None:
    """Its coordinator died before it had joined, and the next one has made another."""
    until(lambda: kept.keeper, 60)
    words = [sys.executable, "-m", holder.MODULE, "--lifeline-fd", "0"]
    env = {**os.environ, **kept.variables(HOLDER, 0, 0, 1)}
    late = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert late.stderr == ""


def test_who_keeps_weights_takes_them_along_and_that_is_said_once(kept: Coordinator) -> None:
    """Also by the next coordinator, of a process that died while there was none."""
    for step in (1, 2):
        with joined(kept, "trainer", attempt=step):
            weights.publish({"a": np.zeros(3)}, step)
        first = kept.keeper
        if step == 1:
            os.kill(first, signal.SIGKILL)
        else:
            kept.stop()
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
            kept.start()
        until(lambda first=first: kept.keeper not in (0, first), 60)
        assert [(one.keepers[0].role, one.lost, one.left) for one in kept.losses] == [
            (".holder", {"weights": f"{n}"}, {}) for n in range(1, step + 1)
        ]


def test_a_part_of_weights_at_whose_address_another_process_answers_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one whose keeper does not answer, and no error in the program that asks for weights."""

    def another(*_: object) -> NoReturn:
        raise ProtocolError("It shows another certificate.")

    keeper = MemberPlace(".holder", 0, 1, 1)
    view = JobView(roles={".holder": RoleView(1, (MemberView(keeper, "live"),))})
    none: Any = None
    monkeypatch.setattr(following.holders, "connection", another)
    assert following._reader(none, view, PartView(0, keeper, "k", 0)) is None
