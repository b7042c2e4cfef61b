"""Savers that send each other what their ranks have in memory."""

import contextlib
import itertools
import logging
import os
import secrets
import socket
import socketserver
import ssl
import threading
import time
from typing import ClassVar

import msgspec
import pytest
import torch
from hypothesis import given, settings
from random_trees import assert_same, blank, trees

from dlrover.checkpoint.engine import buffers, copying, tree
from dlrover.checkpoint.loading.restore import Restoration
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.layout import TensorSpec
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import certificates, exchange, memory, ranks, replicas, wire
from dlrover.checkpoint.saver.memory import Generation
from dlrover.checkpoint.saver.protocol import Commit, JoinSaver, Peer, Replication
from dlrover.checkpoint.saver.replicas import ReplicaExchange
from dlrover.checkpoint.saver.state import SaverState
from dlrover.checkpoint.storage import faults
from dlrover.checkpoint.storage.formats import FORMAT
from dlrover.errors import ProtocolError
from tests.waiting import until

HOST = "127.0.0.1"
SIZE = 3 * wire.CHUNK + 17
ENTRIES = layouts.place([TensorSpec(("a",), "uint8", (SIZE,), None)], [0])
PACKED = layouts.packed(msgspec.Raw(msgspec.msgpack.encode(ENTRIES)), b"\x80", (SIZE, 1, 0))


@pytest.fixture(autouse=True)
def _ends(monkeypatch):
    """Whatever was started by a test ends with it."""
    monkeypatch.setattr(replicas, "BACK_OFF", (0.02, 0.1))
    Node.all = []
    yield
    faults.hook = None
    for node in Node.all:
        node.end()


class Node:
    """A saver with one rank, without a process; its number is the rank."""

    all: ClassVar[list["Node"]] = []

    def __init__(self, rank: int, port: int = 0, *, tls: bool = False, pem: str = "") -> None:
        self.rank = rank
        self.owner = 0
        self.saver_state = SaverState()
        self.replicas = ReplicaExchange(self.saver_state.exchange)
        self.pem = pem or self.replicas.certify(tls=tls)
        shown = certificates.fingerprint(self.pem) if self.pem else b""
        self.peer = Peer(HOST, self.replicas.listen(HOST, port), shown)
        Node.all.append(self)

    def join(self, *others, session=1, token=b"secret", size=2, bandwidth=None) -> None:
        plan = Replication(
            token, self.peer, tuple(other.peer for other in others), bandwidth, self.pem
        )
        joined = JoinSaver(session, size, (self.rank,), replication=plan)
        _, self.owner, fds = self.saver_state.attach(self.rank, os.getpid())
        self.fds = fds[:2]
        for _ in fds[2:]:
            self.saver_state._ranks.drop_last(self.saver_state._ranks.memories[self.rank])
        self.saver_state.join(self.rank, joined)
        self.replicas.join(joined)

    def save(self, step: int, state: dict | None = None, number: int = 0) -> bytes:
        save = SaveId(0, number or step, step, self.saver_state.exchange.group().joined.session)
        slot = self.saver_state.begin(self.rank, save)
        data = self._write(slot, save) if state is None else self._copy(slot, save, state)
        self.saver_state.commit(self.rank, Commit(slot, save, False))
        self.saver_state.sums.compute_next()
        return data

    def _write(self, slot: int, save: SaveId) -> bytes:
        self.saver_state.reserve(self.rank, slot, memory.capacity_for(PACKED))
        generation = Generation(self.fds[slot])
        data = (secrets.token_bytes(1000) + bytes([save.step])) * (SIZE // 1001 + 1)
        generation.data[:SIZE] = data[:SIZE]
        self._seal(generation, PACKED, save)
        return data[:SIZE]

    def _copy(self, slot: int, save: SaveId, state: dict) -> bytes:
        copier = copying.Copier()
        packed = copier.layout(tree.flatten(state))
        self.saver_state.reserve(self.rank, slot, memory.capacity_for(packed))
        generation = Generation(self.fds[slot])
        copier.copy(torch.frombuffer(generation.data, dtype=torch.uint8))
        self._seal(generation, packed, save)
        return bytes(generation.data[: packed.data_bytes])

    def _seal(self, generation: Generation, packed: layouts.PackedLayout, save: SaveId) -> None:
        world = self.saver_state.exchange.group().joined
        generation.seal(packed, rank=self.rank, world_size=world.world_size, save=save)

    def steps(self, rank: int) -> list[int]:
        return sorted(held.save.step for held in self.saver_state.look() if held.rank == rank)

    def data(self, rank: int, step: int) -> bytes:
        (held,) = [h for h in self.saver_state.look() if (h.rank, h.save.step) == (rank, step)]
        assert self.saver_state.verify(rank, held.slot) == ""
        return bytes(Generation(self.saver_state.open(rank)[1][held.slot]).data[:SIZE])

    def end(self) -> None:
        self.replicas.close()
        if self.owner:
            self.saver_state.detach(self.rank, self.owner)
        _, self.owner, _ = self.saver_state.attach(self.rank, os.getpid())
        self.saver_state.join(self.rank, JoinSaver(99, 9, (self.rank,)))


def pair(*, tls=False, **options):
    nodes = Node(0, tls=tls), Node(1, tls=tls)
    nodes[0].join(nodes[1], **options)
    nodes[1].join(nodes[0], **options)
    return nodes


def test_the_last_two_steps_are_on_the_other_node():
    a, b = pair()
    kept = {}
    for step in (1, 2, 3):
        kept[step] = a.save(step)
        until(lambda step=step: step in b.steps(0))
    assert b.steps(0) == [2, 3]
    assert a.steps(1) == []
    for step in (2, 3):
        assert b.data(0, step) == kept[step]
    for step in (3, 4, 5):
        b.save(step)
        until(lambda step=step: step in a.steps(1))
    assert a.steps(0) == [2, 3]
    assert b.steps(0) == [2, 3], "a save lets go of no replica of its own world"


def test_a_step_that_is_saved_again_reaches_the_other_node_and_so_does_an_older_one():
    a, b = pair()
    a.save(5)
    until(lambda: b.steps(0) == [5])
    for step, number in ((5, 6), (3, 7)):
        kept = a.save(step, number=number)
        until(lambda n=number: n in {held.save.number for held in b.saver_state.look()})
    assert b.steps(0) == [3, 5]
    assert b.data(0, 3) == kept


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_any_tree_is_equal_on_the_other_node():
    a, b = pair()
    steps = itertools.count(1)

    @settings(deadline=None, max_examples=20)
    @given(trees)
    def run(state):
        step = next(steps)
        a.save(step, state)
        until(lambda: step in b.steps(0))
        (held,) = [h for h in b.saver_state.look() if (h.rank, h.save.step) == (0, step)]
        generation = Generation(b.saver_state.open(0)[1][held.slot])
        layout = generation.layout(generation.header())
        buffer = torch.frombuffer(generation.data, dtype=torch.uint8)
        found = blank(state)
        views = buffers.views(buffer, layout.entries)
        Restoration(found, layouts.decode(layout.skeleton), layout.entries).run(views)
        assert_same(found, state)

    run()


def test_bytes_that_change_on_their_way_are_refused(monkeypatch, caplog):
    fill = exchange.Exchange.fill

    def corrupt(self, copy, offset, data):
        if copy.header.save.step == 1 and offset:
            data = bytes([data[0] ^ 1]) + data[1:]
        fill(self, copy, offset, data)

    monkeypatch.setattr(exchange.Exchange, "fill", corrupt)
    a, b = pair()
    a.save(1)
    until(lambda: "The tensor a of step 1 of rank 0 was damaged on its way" in caplog.text)
    assert b.steps(0) == []
    kept = a.save(2)
    until(lambda: b.steps(0) == [2])
    assert b.data(0, 2) == kept


def test_an_index_that_changes_on_its_way_is_refused(monkeypatch, caplog):
    fill = exchange.Exchange.fill
    monkeypatch.setattr(
        exchange.Exchange, "fill",
        lambda self, copy, offset, data: fill(
            self, copy, offset, data[:-20] + bytes(20) if offset + len(data) == copy.nbytes else data
        ),
    )  # fmt: skip
    a, b = pair()
    a.save(1)
    until(lambda: "is damaged" in caplog.text or "are damaged" in caplog.text)
    assert b.steps(0) == []


def test_a_wrong_token_is_refused_and_logged(caplog):
    a, b = Node(0), Node(1)
    a.join(b, token=b"another")
    b.join(token=b"secret")
    a.save(1)
    until(lambda: "does not know the token" in caplog.text)
    time.sleep(0.1)
    assert b.steps(0) == []


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("data", [b"\xff" * 64, b"\0\0\0\4junk", b"\0\0\0\1", b"\x16\x03\x01" * 99])
def test_what_is_no_message_ends_the_connection_only(data, tls):
    a, b = pair(tls=tls)
    with socket.create_connection((b.peer.host, b.peer.port)) as sock:
        sock.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            with contextlib.suppress(OSError):  # it may have ended the connection already
                sock.shutdown(socket.SHUT_WR)
            answer = sock.recv(1000)  # under TLS there may be an alert
            assert tls or answer == b""
    a.save(1)
    until(lambda: b.steps(0) == [1])


def greeted(node):
    sock = socket.create_connection((node.peer.host, node.peer.port))
    wire.send(sock, wire.SaverHello(1, b"secret", FORMAT))
    assert wire.expect(sock, wire.TransferReply).wanted
    return sock


def header(**changed):
    fields = {
        "rank": 0, "world_size": 2, "save": SaveId(0, 1, 1, 1), "layout_hash": 0, "data_bytes": 100,
        "index_bytes": 10, "index_hash": 0, "tensors": 1,
    }  # fmt: skip
    return memory.Header(**{**fields, **changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rank": 1}, "Rank 1 is not one of another node"),
        ({"rank": 2}, "Rank 2 is not"),
        ({"save": SaveId(0, 1, 1, 7)}, "not of this world"),
        ({"world_size": 3}, "not of this world"),
        ({"data_bytes": -1}, "not of this world"),
        ({"data_bytes": 1 << 50}, "MiB are available"),
    ],
)
def test_what_cannot_be_a_replica_is_refused_with_a_sentence(changed, words, caplog, monkeypatch):
    free = itertools.count(20 << 30, 1 << 20)  # another amount each time that it is asked for
    monkeypatch.setattr(ranks, "available_memory", lambda: next(free))
    _, b = pair()
    with greeted(b) as sock:
        for _ in range(2):
            wire.send(sock, wire.GenerationOffer(header(**changed)))
            answer = wire.expect(sock, wire.TransferReply)
            assert not answer.wanted
            assert words in answer.problem
        wire.send(sock, wire.GenerationOffer(header()))
        assert wire.expect(sock, wire.TransferReply).wanted, "the connection is as good as before"
    assert caplog.text.count(words) == 1, "it is logged once"


@pytest.mark.parametrize(("offset", "size"), [(1, 10), (0, 200), (-1, 5), (1 << 60, 5)])
def test_a_part_that_lies_elsewhere_ends_the_connection(offset, size):
    _, b = pair()
    with greeted(b) as sock:
        wire.send(sock, wire.GenerationOffer(header()))
        assert wire.expect(sock, wire.TransferReply).wanted
        wire.send(sock, wire.Chunk(offset, b"x" * size))
        with pytest.raises(ConnectionError):
            wire.receive(sock)


def test_a_message_that_is_too_long_is_not_read():
    one, other = socket.socketpair()
    with one, other:
        one.sendall((wire.MAX_MESSAGE + 1).to_bytes(4, "big"))
        with pytest.raises(ProtocolError, match="exceeds the limit of"):
            wire.receive(other)


def test_a_saver_that_starts_again_at_its_address_gets_the_newest_step():
    a, b = pair()
    a.save(1)
    until(lambda: b.steps(0) == [1])
    b.end()
    a.save(2)
    again = Node(1, b.peer.port)
    again.join(a)
    until(lambda: again.steps(0) == [2])


def test_a_step_whose_memory_is_needed_is_given_up_for_a_newer_one(caplog):
    a, b = pair(bandwidth=wire.CHUNK * 100.0)
    held = threading.Event()
    go_on = threading.Event()

    def stop_at_the_first(label):
        if label == "replicate.begun" and not held.is_set():
            held.set()
            go_on.wait(10)

    faults.hook = stop_at_the_first
    a.save(1)
    assert held.wait(10)
    a.save(2)
    kept = a.save(3)
    go_on.set()
    until(lambda: b.steps(0) == [3])
    assert b.data(0, 3) == kept
    assert "was not sent in time" in caplog.text


def test_a_peer_that_does_not_read_holds_up_no_save():
    a, b = Node(0), Node(1)
    with socket.create_server((HOST, 0)) as deaf:
        b.peer = Peer(HOST, deaf.getsockname()[1])
        a.join(b)
        for step in range(1, 6):
            a.save(step)
    assert a.steps(0) == [4, 5]


@pytest.mark.slow
def test_the_bandwidth_is_limited():
    a, b = pair(bandwidth=wire.CHUNK * 4.0)  # its burst is what it sends in a second
    a.save(1)
    until(lambda: b.steps(0) == [1])
    began = time.monotonic()
    a.save(2)
    until(lambda: b.steps(0) == [1, 2])
    assert time.monotonic() - began > 0.3


@pytest.mark.parametrize(
    ("label", "steps"),
    [
        ("replicate.begun", [1]),
        ("replicate.sent", [1]),
        ("replicate.received", [1]),
        ("replicate.kept", [1, 2]),
    ],
)
def test_a_saver_that_stops_on_the_way_leaves_a_whole_step(label, steps):
    a, b = pair()
    a.save(1)
    until(lambda: b.steps(0) == [1])
    stopped, go_on = threading.Event(), threading.Event()

    def stop(passed):
        if passed == label:
            stopped.set()
            go_on.wait(10)

    faults.hook = stop
    kept = a.save(2)
    assert stopped.wait(10)
    assert b.steps(0) == steps
    assert len(b.data(0, steps[-1])) == SIZE
    go_on.set()
    until(lambda: b.steps(0) == [1, 2])
    assert b.data(0, 2) == kept


def test_a_new_world_continues_from_a_replica_and_then_lets_go_of_it():
    a, b = pair()
    kept = a.save(1)
    b.save(1)
    until(lambda: b.steps(0) == [1])
    b.saver_state.detach(1, b.owner)
    b.join(session=2)
    assert b.saver_state.look()[0].save.session == 1
    b.saver_state.keep(1, SaveId(0, 1, 1, 1))
    assert b.data(0, 1) == kept
    b.save(2)
    assert b.steps(0) == [1]
    steps = itertools.count(
        3
    )  # the first may come while the replica's last message is being answered
    until(lambda: b.save(next(steps)) and b.steps(0) == [])


def test_a_rank_that_comes_to_the_node_takes_its_memory_over():
    a, b = pair()
    kept = a.save(1)
    until(lambda: b.steps(0) == [1])
    b.rank = 0
    b.join(session=2)
    assert b.data(0, 1) == kept
    b.saver_state.keep(0, SaveId(0, 1, 1, 1))
    b.save(2)
    assert b.steps(0) == [1, 2]


def test_a_replica_that_is_superseded_while_it_is_checked_is_no_problem(caplog):
    a, b = pair()

    def change_the_world(passed):
        if passed == "replicate.received":
            b.saver_state.detach(1, b.owner)
            b.join(session=2)
            changed.set()

    changed = threading.Event()
    faults.hook = change_the_world
    a.save(1)
    assert changed.wait(10)
    until(lambda: b.saver_state._ranks.memories[0].receiving == 0)
    assert b.steps(0) == []
    assert "eplica of rank" not in caplog.text


def test_what_comes_from_an_earlier_world_is_not_taken():
    _, b = pair()
    with greeted(b) as sock:
        wire.send(sock, wire.GenerationOffer(header()))
        assert wire.expect(sock, wire.TransferReply).wanted
        b.saver_state.detach(1, b.owner)
        b.join(session=2)
        wire.send(sock, wire.Chunk(0, b"x" * 50))
        with pytest.raises(ConnectionError):
            wire.receive(sock)
    with socket.create_connection((b.peer.host, b.peer.port)) as sock:
        wire.send(sock, wire.SaverHello(1, b"secret", FORMAT))
        assert wire.expect(sock, wire.TransferReply).problem == "There is another world."


def test_nothing_is_logged_when_all_is_well(caplog):
    with caplog.at_level(logging.WARNING):
        a, b = pair()
        a.save(1)
        until(lambda: b.steps(0) == [1])
    assert caplog.text == ""


class Between(socketserver.ThreadingTCPServer):
    """Passes on what goes to a node, and keeps it; or answers itself, with a certificate of its own."""

    daemon_threads = True

    def __init__(self, target: Peer, pem: str = "") -> None:
        super().__init__((HOST, 0), None)
        self.target, self.pem, self.seen = target, pem, bytearray()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def finish_request(self, request, _address) -> None:
        with contextlib.suppress(OSError, ProtocolError):
            if self.pem:
                with certificates.accept(request, self.pem) as sock:
                    self.seen += sock.recv(1 << 16)
                return
            with socket.create_connection((self.target.host, self.target.port)) as there:
                threading.Thread(target=self._pass_on, args=(there, request), daemon=True).start()
                self._pass_on(request, there)

    def _pass_on(self, here, there) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(1 << 16):
                self.seen += data
                there.sendall(data)

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()

    @property
    def peer(self) -> Peer:
        return Peer(HOST, self.server_address[1], self.target.fingerprint)


@pytest.mark.parametrize("tls", [False, True])
def test_with_tls_whoever_passes_replicas_on_reads_nothing_of_them(tls):
    a, b = Node(0, tls=tls), Node(1, tls=tls)
    with Between(b.peer) as between:
        b.join(a)
        a.join(between)
        kept = a.save(1)
        until(lambda: b.steps(0) == [1])
        assert b.data(0, 1) == kept
        for part in (b"secret", kept[:50]):
            assert (part in between.seen) is not tls
        a.end()


def test_a_saver_with_another_certificate_gets_nothing(caplog):
    a, b = Node(0, tls=True), Node(1, tls=True)
    with Between(b.peer, certificates.make()) as between:
        b.join(a)
        a.join(between)
        a.save(1)
        until(lambda: "shows another certificate" in caplog.text)
        a.end()
        assert between.seen == b""
    assert b.steps(0) == []


def test_without_tls_nothing_is_sent_to_a_saver_that_has_it_nor_the_other_way(caplog):
    a, b = Node(0, tls=True), Node(1)
    a.join(b)
    b.join(a)
    a.save(1)
    until(lambda: "No replicas reach" in caplog.text)
    b.save(1)
    until(lambda: caplog.text.count("does not speak TLS") > 1)
    assert (a.steps(1), b.steps(0)) == ([], [])


def test_a_saver_that_starts_again_shows_the_certificate_that_the_others_expect():
    a, b = pair(tls=True)
    a.save(1)
    until(lambda: b.steps(0) == [1])
    b.end()
    a.save(2)
    again = Node(1, b.peer.port, pem=b.pem)
    again.join(a)
    until(lambda: again.steps(0) == [2])


def test_with_tls_a_wrong_token_is_refused_too(caplog):
    _, b = pair(tls=True)
    with socket.create_connection((HOST, b.peer.port)) as plain:
        sock = certificates.connect(plain, b.peer.fingerprint)
        assert sock.version() == "TLSv1.3"
        wire.send(sock, wire.SaverHello(1, b"another", FORMAT))
        with pytest.raises((ConnectionError, ssl.SSLError)):
            wire.receive(sock)
        sock.close()
    until(lambda: "does not know the token" in caplog.text)
