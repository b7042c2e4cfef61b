"""How savers find each other: what they say of themselves is believed only if it is sealed, where the job uses TLS."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from dlrover import config
from dlrover.checkpoint.engine import joining
from dlrover.checkpoint.engine.joining import Wishes
from dlrover.checkpoint.engine.world import TorchWorld
from dlrover.checkpoint.machine.saves import Newest
from dlrover.checkpoint.saver import certificates
from dlrover.checkpoint.saver.protocol import Attached, EndedWorker, Listening
from dlrover.checkpoint.saver.replicas import ReplicaExchange
from dlrover.checkpoint.saver.state import SaverState
from dlrover.errors import ConfigurationError, InfrastructureError

SECRET = "5" * 64


class Ranks:
    """The ranks of a world, as threads; what they exchange passes through ``change``."""

    def __init__(self, size: int, change=lambda data: data) -> None:
        self.size, self.change = size, change
        self._said: dict[int, bytes] = {}
        self._all = threading.Barrier(size)

    def of(self, rank: int) -> "Rank":
        return Rank(self, rank)

    def gather(self, rank: int, data: bytes) -> list[bytes]:
        self._said[rank] = data
        self._all.wait(10)
        said = self.change([self._said[rank] for rank in range(self.size)])
        self._all.wait(10)
        return said


class Rank(TorchWorld):
    def __init__(self, ranks: Ranks, rank: int) -> None:
        super().__init__()
        self._ranks, self.rank, self.size = ranks, rank, ranks.size

    def gather(self, data: bytes) -> list[bytes]:
        return self._ranks.gather(self.rank, data)

    def exchange(self, values) -> list[list[int]]:
        return [list(said) for said in self.gather(bytes(values))]


class Client:
    """The connection of a rank, with its saver in this process."""

    def __init__(self) -> None:
        self.replicas = ReplicaExchange(SaverState().exchange)
        self.joined = None

    def listen(self, host: str, *, tls: bool) -> Listening:
        pem = self.replicas.certify(tls=tls)
        return Listening(self.replicas.listen(host, 0), pem)

    def join(self, joined) -> None:
        self.joined = joined


def met(*secrets: str, change=lambda data: data, ended=(None, None)):
    """Ranks on a node each, which join; what each of them has joined, or the error."""
    ranks, clients = Ranks(len(secrets), change), [Client() for _ in secrets]

    def one(rank: int):
        env = {"MASTER_ADDR": "127.0.0.1", config.REPLICA_SECRET: secrets[rank]}
        try:
            attached = Attached(rank, ended=ended[rank])
            joining.join(ranks.of(rank), clients[rank], attached, Newest(), Wishes(replicas=1), env)
        except (ConfigurationError, InfrastructureError) as error:
            return error
        return clients[rank].joined if any(ended) else clients[rank].joined.replication

    try:
        with ThreadPoolExecutor(len(secrets)) as pool:
            return list(pool.map(one, range(len(secrets))))
    finally:
        for client in clients:
            client.replicas.close()


def test_savers_of_a_job_with_tls_know_each_other_by_their_certificates():
    a, b = met(SECRET, SECRET)
    assert a.token == b.token == SECRET.encode()
    assert a.pem != b.pem
    assert a.peers == (b.own,)
    assert b.peers == (a.own,)
    assert a.own.fingerprint == certificates.fingerprint(a.pem)


def test_without_tls_there_are_no_certificates():
    a, b = met("", "")
    assert a.token == b.token
    assert (a.pem, a.own.fingerprint, b.own.fingerprint) == ("", b"", b"")


@pytest.mark.parametrize("secrets", [(SECRET, ""), ("", SECRET), (SECRET, "6" * 64)])
def test_one_that_does_not_prove_that_it_belongs_to_the_job_is_refused_by_all(secrets):
    for error in met(*secrets):
        assert isinstance(error, InfrastructureError)
        assert "cannot be shown to belong to this job" in str(error)


def test_each_saver_learns_which_worker_has_made_the_fewest_saves_of_an_earlier_world():
    ended = EndedWorker(7, 0, 12), EndedWorker(7, 1, 11)
    assert [joined.ended for joined in met("", "", ended=ended)] == [(ended[1],)] * 2
    others = EndedWorker(7, 0, 12), EndedWorker(6, 1, 11)
    assert [set(joined.ended) for joined in met("", "", ended=others)] == [{*others}] * 2


def test_a_certificate_that_is_exchanged_on_the_way_is_refused():
    other = certificates.fingerprint(certificates.make())

    def change(said):
        try:
            facts = msgspec.msgpack.decode(said[1], type=joining._Facts)
        except msgspec.DecodeError:  # it is something else
            return said
        peer = msgspec.structs.replace(facts.peer, fingerprint=other)
        return [said[0], msgspec.msgpack.encode(msgspec.structs.replace(facts, peer=peer))]

    for error in met(SECRET, SECRET, change=change):
        assert "the saver of rank 1 cannot be shown to belong" in str(error)


def test_what_makes_certificates_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for error in met(SECRET, SECRET):
        assert isinstance(error, ConfigurationError)
        assert "Each node of a job that uses TLS needs the package cryptography" in str(error)
