"""What a rank does that asks to train when there is nothing to join."""

import contextlib
import gc
import math
import os
import socket
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator
from concurrent import futures
from datetime import timedelta

import msgspec
import pytest

from dlrover import launched
from dlrover._util import framing
from dlrover.errors import ConfigurationError, InfrastructureError, UserCodeError
from dlrover.launched import Given
from dlrover.master.machine.membership import Membership
from dlrover.master.meeting import Meeting
from dlrover.spec.job import JobSpec
from dlrover.spec.requests import WorkerRequest
from dlrover.spec.requests.membership import (
    LookMembers,
    Meet,
    Members,
    MembersNow,
    Met,
    checksum,
)

torch = pytest.importorskip("torch")

from dlrover.training.machine.places import Place  # noqa: E402
from dlrover.training.replicas import (  # noqa: E402
    functions,
    groups,
    hooks,
    restarts,
    rows,
    sent,
    survivors,
)
from dlrover.training.replicas.groups import Changed, MeetingStore  # noqa: E402
from dlrover.training.replicas.link import Link  # noqa: E402
from dlrover.training.replicas.replicas import Replicas  # noqa: E402
from dlrover.training.replicas.sent import Sent  # noqa: E402
from tests.waiting import until  # noqa: E402

pytestmark = [pytest.mark.torch]


@contextlib.contextmanager
def listening(*pushed: bytes, answer: bytes | Callable[[bytes], bytes] = b"") -> Iterator[str]:
    """An agent's socket, which pushes one message to each that connects, or answers alike; yields its address."""
    reply = answer if callable(answer) else lambda _request: answer
    address = f"dlrover-test-{os.getpid()}-{uuid.uuid4().hex}"
    left = list(pushed)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    if left:
                        connection.sendall(framing.pack(left.pop(0)))
                    while answer and (request := framing.receive(connection.recv_into)):
                        connection.sendall(framing.pack(reply(request)))

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{address}")
        server.listen()
        threading.Thread(target=serve, daemon=True).start()
        yield address
        server.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def told(members: Members | None) -> Iterator[survivors.Survivors]:
    """Rank 1, started again, whose master answers with a membership."""
    with listening(answer=msgspec.msgpack.encode(MembersNow(members))) as relay:
        given = Given(round=3, relay=relay, members="nobody listens here")
        yield survivors.Survivors(Link(given), 3, 1, 1, None)


def test_a_rank_whose_round_is_over_does_not_take_the_training_for_finished(monkeypatch):
    monkeypatch.setattr(survivors, "EXCLUDED_LIMIT", 0.01)
    with told(None) as rank, pytest.raises(InfrastructureError, match="Round 3 is over"):
        rank.join(torch.zeros(1))
    with told(Members(3, 5, {0: 0}, over=True)) as rank:
        assert rank.join(torch.zeros(1)) is None


def test_a_rank_at_an_edge_lacks_nothing_of_the_step_that_others_are_within(monkeypatch):
    """If a rank is lost then, those within the step meet this one, which is a position behind them."""
    at_edge, within = Place(7, True, True, True), Place(8, True, False, True)
    others, sent = [torch.tensor(within), torch.zeros(1)], []

    def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
        sent.append(tensor)
        return [others.pop(0), tensor]

    group = types.SimpleNamespace(
        number=5, ranks=[0, 1], attempts={0: 0, 1: 1}, row=1, gather=gather, close=lambda: None
    )
    monkeypatch.setattr(survivors, "MembershipGroup", lambda *_: group)
    with told(Members(3, 5, {0: 0, 1: 1})) as rank:
        rank._ask(LookMembers(3))
        rank._group, rank._agreed = types.SimpleNamespace(number=4, close=lambda: None), 5
        rank.usable, rank._settled, rank.position = True, True, at_edge.position
        regrouped = rank.edge(torch.zeros(1))
    assert Place(*sent[0].tolist()) == at_edge
    assert (regrouped.complete, list(regrouped.payloads)) == (True, [0])


def test_a_collective_after_another_rank_has_ended_the_training_is_a_mistake_of_the_program():
    with told(Members(3, 5, {1: 1}, over=True)) as rank:
        rank._ask(LookMembers(3))
        rank.usable = True
        with pytest.raises(ConfigurationError, match="another rank has ended the training"):
            rank.run(lambda _group: None, torch.zeros(1))


def test_a_rank_may_still_evaluate_when_another_one_ends_the_training(monkeypatch):
    with told(Members(3, 5, {0: 0, 1: 1})) as rank:
        rank._ask(LookMembers(3))
        rank._group, rank._agreed = types.SimpleNamespace(number=4, close=lambda: None), 5
        monkeypatch.setattr(rank, "_next_members", lambda: Members(3, 6, {1: 1}, over=True))
        assert rank.edge(torch.zeros(1)) is None


def test_what_the_agent_pushes_is_read_after_garbage_too():
    members = Members(3, 1, {0: 0, 1: 1})
    with listening(b"\xc1", msgspec.msgpack.encode(members)) as address:
        link = Link(Given(round=3, members=address))
        assert link.wait(lambda m: m.number == 1, 30.0) == members


def test_what_another_user_pushes_is_not_read(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    with listening(*4 * [msgspec.msgpack.encode(Members(3, 1))]) as address:
        link = Link(Given(round=3, members=address))
        assert link.wait(lambda _members: True, 0.3) is None


class DirectLink:
    """A way to the keys of a master in this process."""

    def __init__(self) -> None:
        job = JobSpec(name="job", min_nodes=1, max_nodes=1, survive=True)
        self.membership = Membership(job, round=3, attempts={0: 0, 1: 0}, latest={0: 0, 1: 0})
        self.start_master(1)

    def start_master(self, epoch: int) -> None:
        self.meeting, self.epoch = Meeting(), epoch

    def ask(self, request: Meet) -> Met:
        return self.meeting.handle(request, self.epoch, self.membership)


def test_ranks_meet_although_the_master_that_had_their_keys_is_lost():
    link = DirectLink()
    one, two = (MeetingStore(link, 3, 0, {0: 0, 1: 0}) for _ in range(2))
    one.set("one", b"1")
    two.set("two", b"2")
    assert (one.get("two"), two.get("one")) == (b"2", b"1")
    link.start_master(2)
    two.set("later", b"3")
    assert one.get("later") == b"3"
    assert sorted(link.ask(Meet(3, 0, checksum({0: 0, 1: 0}))).values) == ["later", "one", "two"]
    link.membership.number += 1
    with pytest.raises(Changed, match="is over"):
        one.get("never")


def test_a_rank_that_has_read_all_keys_sets_its_own_again_for_another_master():
    """Before, it asked for nothing more, and the others waited for its keys for ever."""
    link = DirectLink()
    first, other = (MeetingStore(link, 3, 0, {0: 0, 1: 0}) for _ in range(2))
    other.set("other", b"2")
    first.set("first", b"1")
    assert first.get("other") == b"2"
    link.start_master(2)
    with first.kept(), futures.ThreadPoolExecutor() as pool:
        found = pool.submit(other.get, "first")
        try:
            assert found.result(timeout=10) == b"1"
        finally:
            link.membership.number += 1  # nobody waits any longer


def test_a_rank_that_is_connected_to_some_of_its_groups_keeps_nobody_waiting(monkeypatch):
    """Its row would wait for a rank that waits for it in the other group, and nobody is lost: for ever."""
    members, ends = Members(3, 0, dict.fromkeys(range(4), 0), row=2), []

    def connect(self: groups.Peers, _store: torch.distributed.Store) -> None:
        if self.ranks == [0, 2]:
            raise RuntimeError("a peer is not there in time")
        ends.append(socket.create_connection(server.getsockname()))

    monkeypatch.setattr(groups.Peers, "_connect", connect)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(Changed, match="not there in time"):
            groups.MembershipGroup(DirectLink(), 3, members, 0)
        peer, _ = server.accept()
        with peer, ends[0]:
            peer.settimeout(5)
            assert peer.recv(1) == b""  # it is not kept waiting


def test_a_rank_that_returns_gets_what_the_others_have_sent_each_other_before_their_first_step():
    """Before, it had its own objects, for example another seed than theirs."""
    link, given = DirectLink(), Given(round=3)
    objects = [[torch.tensor([1, 2], dtype=torch.uint8)], [torch.ones(200_000, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)]]  # fmt: skip
    others = Sent(link, given)
    for one in objects:
        others.add(one, sends=True)
    assert torch.equal(Sent(link, given).take()[0], objects[0][0])
    link.membership.number += 1
    link.start_master(2)  # it has none of the keys
    others.send()
    returns = Sent(link, given)
    for one in objects:
        assert all(map(torch.equal, returns.take(), one))
    returns.send()  # it may be the lowest one from now on
    third = Sent(link, given)
    assert torch.equal(third.take()[0], objects[0][0])


def test_a_rank_that_cannot_get_them_lets_all_start_again(monkeypatch):
    monkeypatch.setattr(sent, "EXCLUDED_LIMIT", 0.01)
    link, given = DirectLink(), Given(round=3)
    with pytest.raises(
        InfrastructureError, match=r"does not know it within 0.01 s.*all ranks start again"
    ):
        Sent(link, given).take()
    monkeypatch.setattr(sent, "MOST_PARTS", 1)
    others = Sent(link, given)
    others.add([torch.ones(100_000, dtype=torch.uint8)], sends=True)
    with pytest.raises(
        InfrastructureError, match=r"of more than 65536 bytes.*all ranks start again"
    ):
        Sent(link, given).take()
    link.membership.round += 1
    with pytest.raises(InfrastructureError, match=r"is over.*all ranks start again"):
        Sent(link, given).take()


class Endless:
    """gloo's operation that does not notice that its peers are gone; ``ends`` says after how many looks it ends."""

    def __init__(self, ends: float = math.inf) -> None:
        self._left = ends

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is None:
            assert self.is_completed(), "it would wait for ever"
            return
        self._left -= 1
        # As one that ends just after the time was up.
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return self._left <= 0


def test_a_collective_that_does_not_end_with_its_group_is_left():
    abandoned: list[bool] = []
    peers = groups.Peers([0, 1], 0, lambda: abandoned.append(True), lambda: bool(abandoned))
    peers._backend = object()
    peers._wait([Endless(3)])  # slow, as a step may be
    abandoned.append(True)
    count = sys.getrefcount(peers._backend)
    peers._wait([Endless(0), Endless(1)])
    with pytest.raises(Changed, match="timed out"):
        peers._wait([Endless(), Endless(1)])
    kept = sys.getrefcount(peers._backend) - count
    assert kept == 1  # its end would wait for the operation


def test_a_group_whose_peer_is_lost_leaves_no_thread_and_no_file():
    """An error kept its frame, and so the group, until a full collection: 4 files and a thread for each loss."""

    def opened() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    store, ready = torch.distributed.HashStore(), threading.Barrier(2)

    def lose() -> None:
        other = groups.Peers([0, 1], 1, lambda: None, lambda: True)
        other._connect(store)
        ready.wait(30)

    lost = threading.Thread(target=lose)
    peers = groups.Peers([0, 1], 0, lambda: None, lambda: False)
    gc.collect()
    gc.disable()
    try:
        before = opened()
        lost.start()
        peers._connect(store)
        ready.wait(30)
        with pytest.raises(Changed):
            peers.sum([torch.ones(1)])
        lost.join()
        peers._backend = None
        # Threads of links of earlier tests may end meanwhile.
        until(lambda: all(now <= then for now, then in zip(opened(), before, strict=True)), 5)
    finally:
        gc.enable()


def other_files() -> list[str]:
    """Return what the descriptors of this process that are no sockets refer to."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the directory itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(what for what in found if not what.startswith("socket:"))


def test_a_look_at_the_connections_opens_no_file():
    """Each look used to copy all files that are no sockets: after six losses, a process had 1,024 of them."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        one = stack.enter_context(socket.create_connection(listener.getsockname()))
        other = stack.enter_context(listener.accept()[0])
        local = socket.socketpair()
        for sock in local:
            stack.enter_context(sock)
        stack.enter_context(open(os.devnull))
        files = other_files()
        known = {descriptor.number for descriptor in groups.connections()}
        assert known >= {one.fileno(), other.fileno()}
        assert known.isdisjoint({listener.fileno(), *(sock.fileno() for sock in local)})
        ended = [found for found in groups.connections() if found.number == one.fileno()]
        reused = groups.Descriptor(os.open(os.devnull, os.O_RDONLY), ended[0].what)
        stack.callback(os.close, reused.number)
        closed = groups.Descriptor(1 << 20, ended[0].what)
        files = sorted([*files, os.devnull])
        groups.shut_down({*ended, reused, closed})
        assert other.recv(1) == b""
        assert other_files() == files


def test_gloo_waits_a_multiple_of_its_limit_for_a_peer_that_is_lost_before_it_is_connected():
    """With a limit of 3 s, the others stood for 15 s. Where its port is closed already, they wait for nothing."""
    limit = timedelta(seconds=0.05)

    def waited() -> timedelta:
        store = torch.distributed.HashStore()
        with pytest.raises(RuntimeError):  # it has said where it is, and leaves
            torch.distributed.ProcessGroupGloo(store, 1, 2, limit)
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            torch.distributed.ProcessGroupGloo(store, 0, 2, limit)
        return timedelta(seconds=time.monotonic() - began)

    assert any(waited() > 0.9 * groups.PATIENCE * limit for _ in range(10))
    assert timedelta(seconds=2) >= groups.PATIENCE * groups.CONNECT_TIMEOUT


@pytest.mark.parametrize("lasts", [groups._lasts(), False])
def test_an_operation_is_complete_for_those_that_ask_in_cpp(monkeypatch, lasts):
    """torch 2.6 forgets what Python has made of it, and would wait for ever."""
    monkeypatch.setattr(groups, "_lasts", lambda: lasts)

    class Called(groups.Group):
        def allreduce(self, tensors, opts=None):
            return groups.done(tensors)

    work = torch.distributed.ProcessGroup.allreduce(Called(0, 1), [torch.ones(2)])
    assert work.get_future().value()[0].tolist() == [1, 1]
    assert work.wait()


def in_a_row(work: Callable[[rows.RowGroup], object], *, replays: bool = False) -> list[object]:
    """Return what both ranks of a row return, each in a thread of its own."""
    link = DirectLink()

    def one(rank: int) -> object:
        given = Given(round=3, rank=rank, world_size=2)
        row = rows.Row(link, given, 2, check=lambda: None, leave=lambda: None)
        return work(rows.RowGroup(row, lambda: replays))

    with futures.ThreadPoolExecutor(2) as threads:
        return list(threads.map(one, range(2)))


def mean(name: str, op: object = torch.distributed.ReduceOp.AVG) -> object:
    options = getattr(torch.distributed, f"{name}Options")()
    options.reduceOp = op
    return options


def test_a_row_computes_means_as_sums_since_gloo_knows_none_in_each_version():
    def work(group: rows.RowGroup) -> list[float]:
        part, every = torch.zeros(1), torch.tensor([2.0, 4.0]) * (1 + group.rank())
        group._reduce_scatter_base(part, every, mean("ReduceScatter"))
        both, count = torch.tensor([float(group.rank())]), torch.tensor([2 * group.rank()])
        options = mean("Allreduce")
        group.allreduce([both], options)
        group.allreduce([count], options)  # the options of a caller are as they were
        return [float(part), float(both), int(count)]

    assert in_a_row(work) == [[3.0, 0.5, 1], [6.0, 0.5, 1]]


def test_a_row_refuses_sums_with_a_factor_and_gathers_numbers_of_8_bits():
    def work(group: rows.RowGroup) -> list[float]:
        factor = torch.distributed._make_nccl_premul_sum(0.5)
        with pytest.raises(ConfigurationError, match="a sum with a factor"):
            group.allreduce([torch.ones(1)], mean("Allreduce", factor))
        own, every = torch.tensor([0.5 + group.rank()]), torch.zeros(2)
        every = every.to(torch.float8_e4m3fn)
        group._allgather_base(every, own.to(torch.float8_e4m3fn))
        return every.float().tolist()

    assert in_a_row(work) == 2 * [[0.5, 1.5]]


def test_a_row_that_replays_still_carries_out_what_it_must():
    def work(group: rows.RowGroup) -> list[float]:
        own, other = torch.tensor([float(group.rank())]), torch.tensor([float(group.rank())])
        group.broadcast([own])
        with group.carried_out():
            group.broadcast([other])
        return [float(own), float(other)]

    assert in_a_row(work, replays=True) == [[0.0, 0.0], [1.0, 0.0]]


def called_again(monkeypatch: pytest.MonkeyPatch, told: Members, membership: Membership) -> int:
    """Rank 0, started again, whose return a master knew that was lost; return how often it is called."""
    calls, meeting, first = [], Meeting(), [told]

    def answer(data: bytes) -> bytes:
        request = msgspec.msgpack.decode(data, type=WorkerRequest)
        if isinstance(request, Meet):
            return msgspec.msgpack.encode(meeting.handle(request, 2, membership))
        if first:
            return msgspec.msgpack.encode(MembersNow(first.pop()))
        membership.report(request)
        return msgspec.msgpack.encode(MembersNow(membership.members()))

    def train() -> None:
        calls.append(None)
        if given.world_size == 1:
            torch.distributed.init_process_group("gloo", **hooks.plain_group)

    with listening(answer=answer) as relay:
        size = len(membership.latest)
        given = Given(
            round=3, attempt=1, world_size=size, relay=relay, members="nobody", survive=True
        )
        monkeypatch.setattr(launched, "given", given)
        restarts.restartable(train)()
    assert membership.over
    return len(calls)


def test_a_training_function_whose_rank_only_a_lost_journal_knew_to_be_back_is_called_again(
    monkeypatch,
):
    job = JobSpec(name="job", min_nodes=1, max_nodes=1, survive=True)
    known = Membership(job, round=3, number=1, latest={0: 1}, ranks={0: range(1)})
    monkeypatch.setattr(restarts, "NEWS_LIMIT", 0.1)
    assert called_again(monkeypatch, Members(3, 2, {0: 1}), known) == 2
    assert (known.number, known.attempts) == (4, {0: 1})
    monkeypatch.setattr(restarts, "AGAIN", 0.1)
    ranks = {0: range(2)}
    known = Membership(job, round=3, number=3, attempts={1: 1}, latest={0: 1, 1: 1}, ranks=ranks)
    assert called_again(monkeypatch, Members(3, 3, {0: 1}), known) == 1


def test_a_function_that_others_have_returned_from_without_this_rank_waits_for_nobody(monkeypatch):
    job = JobSpec(name="job", min_nodes=1, max_nodes=1, survive=True)
    known = Membership(job, 3, 5, {0: 0}, latest={0: 0, 1: 1}, ranks={0: range(2)}, over=True)
    began = time.monotonic()
    with pytest.raises(InfrastructureError, match=r"has returned from .*; all ranks start again"):
        called_again(monkeypatch, Members(3, 5, {0: 0}, over=True), known)
    assert time.monotonic() - began < restarts.AGAIN


def test_a_function_that_returns_after_a_loss_is_called_again():
    """It handles the error of a collective, such as in a loop over attempts of its own."""
    given = Given(round=3, rank=0, world_size=2, survive=True)
    link = types.SimpleNamespace(members=Members(3, 0, {0: 0, 1: 0}), over=False)
    link.wait = lambda holds, _seconds: link.members if holds(link.members) else None
    asked: list[object] = []
    link.ask = asked.append
    returned = []

    def train() -> int:
        if not returned:
            link.members = Members(3, 2, {0: 0, 1: 1})  # rank 1 is another process
        returned.append(None)
        return len(returned)

    assert restarts._Restarts(link, given).call(train) == 2
    assert [type(request).__name__ for request in asked] == ["LookMembers", "FinishMembers"]


def test_a_rank_that_is_back_before_its_loss_is_known_ends_the_call():
    given = Given(round=3, rank=0, world_size=2, survive=True)
    link = types.SimpleNamespace(members=Members(3, 0, {0: 0, 1: 0}), over=False)
    link.wait = lambda holds, _seconds: link.members if holds(link.members) else None
    link.ask = lambda _request: None
    received = []

    def train() -> None:
        if received:
            return
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), timeout=10) as own,
            listener.accept()[0] as peer,
        ):
            link.on_change(Members(3, 1, {0: 0, 1: 0}))  # nothing was lost
            peer.sendall(b"sum")
            received.append(own.recv(3))
            link.members = Members(3, 3, {0: 0, 1: 1})
            link.on_change(link.members)
            received.append(own.recv(3))

    restarts._Restarts(link, given).call(train)
    assert received == [b"sum", b""]


def test_ranks_meet_under_the_same_names_after_one_has_failed_to_connect():
    """The one that had failed would look for the others at another place, for ever."""
    given = Given(round=3, rank=0, world_size=2, survive=True)
    link = types.SimpleNamespace(members=Members(3, 0, {0: 0, 1: 0}), over=False)
    link.wait = lambda holds, _seconds: link.members if holds(link.members) else None
    puts: list[list[str]] = []

    def ask(request: object) -> Met:
        if isinstance(request, Meet) and request.put:
            puts.append(list(request.put))
        return Met(1, refused="Membership 0 of round 3 is over.")

    def train() -> None:
        with pytest.raises(Exception, match="is over") as failed:
            torch.distributed.init_process_group("gloo", **hooks.plain_group)
        if len(puts) == 1:
            link.members = Members(3, 2, {0: 0, 1: 1})
            raise failed.value

    link.ask = ask
    restarts._Restarts(link, given).call(train)
    assert len(puts) == 2
    assert puts[0] == puts[1]


def test_a_function_whose_call_does_not_train_is_refused():
    def generates():
        yield 1

    async def waits() -> None:
        pass

    for function in (generates, waits):
        with pytest.raises(UserCodeError, match=f"call of {function.__name__} does not train"):
            restarts.restartable(function)


def replicas(
    relay: str,
    monkeypatch: pytest.MonkeyPatch,
    model: torch.nn.Module | None = None,
    **given: int,
) -> Replicas:
    """Return a model's replicas, whose optimizer has the first of its parameters."""
    settings = Given(round=3, relay=relay, members="nobody listens here", survive=True, **given)
    monkeypatch.setattr(launched, "given", settings)
    model = model if model is not None else torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD([next(model.parameters())])
    return Replicas(model, optimizer, global_batch_size=2, micro_batch_size=2)


def test_a_replica_that_comes_after_the_end_runs_nothing_of_what_follows_the_loop(monkeypatch):
    over = msgspec.msgpack.encode(MembersNow(Members(3, 5, {2: 0}, over=True)))
    with listening(answer=over) as relay, pytest.raises(SystemExit) as left:
        list(replicas(relay, monkeypatch, rank=1, attempt=1).steps(4))
    assert left.value.code == 0
    with listening(answer=over) as relay, pytest.raises(InfrastructureError, match="rank 0"):
        list(replicas(relay, monkeypatch, rank=0, attempt=1).steps(4))


def test_a_second_loop_is_refused_as_it_would_have_no_steps(monkeypatch):
    alone = msgspec.msgpack.encode(MembersNow(Members(3, 0, {0: 0})))
    with listening(answer=alone) as relay:
        trained = replicas(relay, monkeypatch)
        for step in trained.steps(2):
            for samples in step:
                step.backward(
                    next(iter(trained.optimizer.param_groups[0]["params"])).sum() * len(samples)
                )
        with pytest.raises(UserCodeError, match="called again"):
            next(trained.steps(4))


def test_no_gradient_is_kept_from_the_step_before(monkeypatch):
    """It would be added up again: also that of a parameter that another optimizer steps less often."""
    alone = msgspec.msgpack.encode(MembersNow(Members(3, 0, {0: 0})))
    model = torch.nn.Linear(1, 1)
    with listening(answer=alone) as relay:
        trained = replicas(relay, monkeypatch, model)
        for step in trained.steps(3):
            for samples in step:
                step.backward(model(torch.ones(len(samples), 1)).mean())
            assert model.bias.grad.item() == 1.0


def test_a_file_is_noted_however_it_is_named_unless_it_was_fetched(tmp_path, monkeypatch):
    module = types.ModuleType("safetensors_like")

    def load_file(filename, device="cpu"):
        return filename, device

    module.load_file = load_file
    monkeypatch.setattr(hooks, "_loaded", {})
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    files = [tmp_path / "a.pt", tmp_path / "b.pt", tmp_path / "cache" / "c.pt"]
    for file in files:
        file.touch()
    hooks._note(module, "load_file")
    assert module.load_file(filename=files[0], device="meta") == (files[0], "meta")
    assert module.load_file(files[1]) == (files[1], "cpu")
    module.load_file(files[2])
    assert hooks._loaded.keys() == {str(files[0]), str(files[1])}


@pytest.mark.parametrize("found", [(None,), (["a", "b"],), None])
def test_objects_of_a_lost_rank_cannot_be_scattered(found):
    """``found`` is what the group exchanges: of a rank without objects, of one that has them, on a rank that replays."""
    group = types.SimpleNamespace(exchange=lambda objects, root: found, rank=lambda: 1)
    given = {"scatter_object_input_list": None, "scatter_object_output_list": [None], "src": 0, "group_src": None}  # fmt: skip
    lost = found == (None,)
    with pytest.raises(InfrastructureError, match=r"rank 0, .* all ranks start again") if lost else contextlib.nullcontext():  # fmt: skip
        functions._scatter_objects(group, given)
    assert given["scatter_object_output_list"] == ["b" if found == (["a", "b"],) else None]
