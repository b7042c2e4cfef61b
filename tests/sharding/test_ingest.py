"""The endpoint for records: what is answered for is on the disk, once; a full one makes producers wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.sharding.ingest import client, log, server as endpoint
from dlrover.sharding.ingest.client import Endpoint, Producer, Reader
from dlrover.sharding.ingest.log import Appended, PartitionLog, Refused
from dlrover.sharding.ingest.streams import Streams


def everything(found: PartitionLog) -> list[bytes]:
    records: list[bytes] = []
    start = found.first
    while start < found.end:
        first, more = found.read(start, found.end, 1000)
        assert first == start
        records += more
        start += len(more)
    return records


# ---- the log


def test_a_batch_is_kept_once(tmp_path) -> None:
    found = PartitionLog(tmp_path)
    assert found.append("a", 0, [b"1", b"2"]) == Appended(0, 2, repeated=False)
    assert found.append("b", 0, [b"3"]) == Appended(2, 3, repeated=False)
    for repeated in (found, PartitionLog(tmp_path)):
        assert repeated.append("a", 0, [b"1", b"2"]) == Appended(0, 2, repeated=True)
        assert everything(repeated) == [b"1", b"2", b"3"]
    refused = found.append("a", 0, [b"1", b"other"])
    assert refused == Refused(409, "batch 0 of a came before, with other records")
    assert found.append("a", 2, [b"5"]) == Refused(409, "sequence is 2; the next batch of a is 1")
    assert found.append("new", 1, [b"6"]) == Refused(
        409, "sequence is 1; the next batch of new is 0"
    )


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=5), min_size=1, max_size=12),
    st.integers(0, 100),
    st.integers(40, 400),
)
def test_a_crash_takes_only_what_was_not_answered_for(
    tmp_path_factory, batches, cut, segment
) -> None:
    folder = tmp_path_factory.mktemp("log")
    before, log.SEGMENT = log.SEGMENT, segment
    try:
        found = PartitionLog(folder)
        for number, batch in enumerate(batches):
            assert isinstance(found.append("a", number, batch), Appended)
        kept = [record for batch in batches for record in batch]
        assert everything(found) == kept
        last = max(folder.glob("*.log"))
        whole = last.stat().st_size
        with last.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(b"\0\0torn" * cut)  # a frame that a crash has left
        again = PartitionLog(folder)
        assert everything(again) == kept
        assert last.stat().st_size == whole
        assert again.append("a", len(batches), [b"next"]) == Appended(
            len(kept), len(kept) + 1, repeated=False
        )
        assert again.append("a", len(batches) - 1, batches[-1]).repeated
    finally:
        log.SEGMENT = before


def test_damage_elsewhere_is_an_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(log, "SEGMENT", 100)
    found = PartitionLog(tmp_path)
    for number in range(5):
        found.append("a", number, [bytes(80)])
    first = min(tmp_path.glob("*.log"))
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(InfrastructureError, match=r"0\.log: the frame at byte \d+ is damaged"):
        PartitionLog(tmp_path)


def test_segments_go_and_producers_stay_known(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(log, "SEGMENT", 100)
    found = PartitionLog(tmp_path)
    for number in range(10):
        found.append("a", number, [b"%d" % number + bytes(60)])
    found.drop(7)
    assert 0 < found.first <= 7
    assert found.read(0, 10, 100)[0] == found.first
    assert len(everything(found)) == 10 - found.first
    for path in sorted(tmp_path.glob("*.log"))[:-1]:
        path.unlink()
    again = PartitionLog(tmp_path)
    assert again.append("a", 9, [b"9" + bytes(60)]).repeated
    again.drop(0, older_than=-1)
    assert again.end == 10


def test_a_full_disk_takes_nothing_and_breaks_nothing(tmp_path, monkeypatch) -> None:
    found = PartitionLog(tmp_path)
    found.append("a", 0, [b"1"])
    written = os.pwrite

    def full(fd: int, data: bytes, at: int) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return written(fd, data[:10], at)

    monkeypatch.setattr(os, "pwrite", full)
    assert found.append("a", 1, [b"2"]) == Refused(507, "the disk is full")
    monkeypatch.undo()
    assert found.append("a", 1, [b"2"]) == Appended(1, 2, repeated=False)
    assert everything(PartitionLog(tmp_path)) == [b"1", b"2"]


def test_a_disk_that_has_lost_data_takes_no_more(tmp_path, monkeypatch) -> None:
    found = PartitionLog(tmp_path)

    def lost(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", lost)
    refused = Refused(503, "the disk has lost data: Input/output error")
    assert found.append("a", 0, [b"1"]) == refused
    monkeypatch.undo()
    assert found.append("a", 1, [b"2"]) == refused
    assert found.end == 0


@pytest.mark.slow
def test_many_threads(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(log, "SEGMENT", 2000)
    found = PartitionLog(tmp_path)

    def push(name: int) -> None:
        for number in range(30):
            place = found.append(f"p{name}", number, [b"%d %d" % (name, number)])
            assert found.read(place.first, place.end, 10)[1] == [b"%d %d" % (name, number)]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(push, range(8)))
    kept = [record.split() for record in everything(PartitionLog(tmp_path))]
    for name in range(8):
        assert [int(n) for who, n in kept if int(who) == name] == list(range(30))


# ---- HTTP


class Served:
    def __init__(self, directory: Path, most: int = 1 << 30) -> None:
        self.endpoints: list[Endpoint] = []
        self.streams = Streams(directory, {"clicks": 3}, most)
        self.server = endpoint.Server(("127.0.0.1", 0), self.streams, "secret")
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self._thread.start()

    def endpoint(self, token: str = "secret") -> Endpoint:
        self.endpoints.append(Endpoint(self.url, token))
        return self.endpoints[-1]

    def close(self) -> None:
        for there in self.endpoints:
            there.close()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()
        while self.server._open:
            time.sleep(0.01)
        self.streams.close()


@pytest.fixture
def served(tmp_path) -> Iterator[Served]:
    found = Served(tmp_path / "streams")
    yield found
    found.close()


def test_pushing_and_reading(served) -> None:
    producer = Producer(served.endpoint(), "clicks", "spark-1", partition=1)
    assert producer.push({"n": n} for n in range(2500)) == 2500
    reader = Reader(served.endpoint(), "clicks")
    assert reader.bounds() == [(0, 0), (0, 2500), (0, 0)]
    found = reader.read(1, 1200, 2000, 3)
    assert (found.first, found.records) == (1200, [b'{"n":1200}', b'{"n":1201}', b'{"n":1202}'])
    # The same work, done again: nothing is kept twice.
    again = Producer(served.endpoint(), "clicks", "spark-1", partition=1)
    again.push({"n": n} for n in range(2500))
    assert reader.bounds()[1] == (0, 2500)
    Producer(served.endpoint(), "clicks", "other").push([b"raw"])
    assert sum(end for _, end in reader.bounds()) == 2501


def request(served, method: str, path: str, body: bytes | None = None, **headers: str):
    status, answer = served.endpoint(headers.pop("token", "secret")).ask(
        method, path, body, **headers
    )
    return status, json.loads(answer)


HEADERS = {
    "Content-Type": "application/x-ndjson",
    "Dlrover-Producer": "p",
    "Dlrover-Sequence": "0",
}
RECORDS = "/v1/streams/clicks/records"


def test_lines_of_json(served) -> None:
    status, answer = request(served, "POST", RECORDS, b'{"a":1}\n\n[2]\n', **HEADERS)
    assert (status, answer) == (
        200,
        {"partition": answer["partition"], "first": 0, "end": 2, "repeated": False},
    )
    found = Reader(served.endpoint(), "clicks").read(answer["partition"], 0, 10, 10)
    assert found.records == [b'{"a":1}', b"[2]"]


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "reason"),
    [
        ("GET", RECORDS, None, {"token": "wrong"}, 401, "the token is missing or wrong"),
        ("POST", RECORDS, b"1", {**HEADERS, "token": ""}, 401, "the token is missing"),
        ("GET", "/v1/streams/others", None, {}, 404, "there is no stream others"),
        ("GET", "/metrics", None, {}, 404, "there is nothing here"),
        ("GET", f"{RECORDS}?partition=3&start=0", None, {}, 404, "has 3 partitions"),
        (
            "GET",
            f"{RECORDS}?partition=0",
            None,
            {},
            400,
            "start is None; it must be a whole number",
        ),
        ("POST", RECORDS, b"1\n{", HEADERS, 400, "the batch cannot be read"),
        ("POST", RECORDS, b"", HEADERS, 400, "a batch must have a record"),
        (
            "POST",
            RECORDS,
            b"1",
            {**HEADERS, "Dlrover-Sequence": "-1"},
            400,
            "Dlrover-Sequence is '-1'",
        ),
        (
            "POST",
            RECORDS,
            b"1",
            {**HEADERS, "Dlrover-Sequence": "1"},
            409,
            "the next batch of p is 0",
        ),
        ("POST", RECORDS, b"1", {**HEADERS, "Dlrover-Producer": ""}, 400, "must have 1 to 200"),
        (
            "POST",
            RECORDS,
            b"1",
            {**HEADERS, "Content-Type": "text/csv"},
            415,
            "text/csv; application/x-nd",
        ),
        ("POST", "/v1/streams/clicks", b"1", HEADERS, 405, "push to .../records"),
        ("POST", RECORDS, bytes(endpoint.MAX_BODY + 1), HEADERS, 413, "8388608 bytes at most"),
    ],
)
def test_what_is_refused(served, method, path, body, headers, status, reason) -> None:
    try:
        found, answer = request(served, method, path, body, **headers)
    except (BrokenPipeError, ConnectionResetError):
        assert status == 413  # it was refused before all of it was sent
        return
    assert found == status
    assert reason in answer["error"]


def test_a_full_endpoint_makes_producers_wait_until_readers_drop(served, monkeypatch) -> None:
    monkeypatch.setattr(log, "SEGMENT", 1000)
    served.streams._most = 20_000
    records = [bytes(500)] * 3
    body = msgspec.msgpack.encode(records)
    headers = {**HEADERS, "Content-Type": "application/msgpack"}
    for sequence in range(50):
        status, answer = request(
            served,
            "POST",
            f"{RECORDS}?partition=0",
            body,
            **{**headers, "Dlrover-Sequence": str(sequence)},
        )
        if status == 429:
            break
    assert 5 < sequence < 20
    assert "20000 are the most" in answer["error"]
    with ThreadPoolExecutor(1) as thread:
        producer = Producer(served.endpoint(), "clicks", "q", partition=0)
        pushed = thread.submit(producer.push, records)
        time.sleep(0.2)
        assert not pushed.done()
        status, _ = request(served, "DELETE", f"{RECORDS}?partition=0&before=20")
        assert status == 200
        assert pushed.result(10) == 3


def test_too_many_at_once_are_told_to_come_again(served) -> None:
    for _ in range(endpoint.IN_FLIGHT):
        served.server.in_flight.acquire()
    assert request(served, "POST", RECORDS, b"1", **HEADERS)[0] == 429
    served.server.in_flight.release(endpoint.IN_FLIGHT)
    assert request(served, "POST", RECORDS, b"1", **HEADERS)[0] == 200


def test_an_endpoint_that_refuses_or_is_away_is_told(served, monkeypatch) -> None:
    with pytest.raises(ConfigurationError, match=r"refuses the records: 401, the token is missing"):
        Producer(served.endpoint("wrong"), "clicks", "p").push([1])
    with pytest.raises(ConfigurationError, match=r"refuses \(404\): there is no stream others"):
        Reader(served.endpoint(), "others").bounds()
    with pytest.raises(ConfigurationError, match="ftp://host is no endpoint"):
        Endpoint("ftp://host", "")
    monkeypatch.setattr(client, "PATIENCE", 0.2)
    with pytest.raises(InfrastructureError, match=r"does not take the records: .*refused"):
        Producer(Endpoint("http://127.0.0.1:1", ""), "clicks", "p").push([1])


def test_streams_are_what_they_were(tmp_path) -> None:
    first = Streams(tmp_path, {"a": 2}, 1)
    with pytest.raises(ConfigurationError, match="Another process has the streams"):
        Streams(tmp_path, {"a": 2}, 1)
    first.close()
    with pytest.raises(ConfigurationError, match="it has 2 partitions in"):
        Streams(tmp_path, {"a": 3}, 1)
    for name, count in (("../a", 1), ("b", 0)):
        with pytest.raises(ConfigurationError, match=f"--stream {name}:{count}"):
            Streams(tmp_path, {name: count}, 1)


# ---- the process


@pytest.mark.slow
def test_nothing_that_was_answered_for_is_lost_with_the_process(tmp_path) -> None:
    """Killed again and again while a producer pushes: each record is there once, in order."""
    command = [
        sys.executable,
        "-m",
        "dlrover.cli.main",
        "ingest",
        str(tmp_path / "d"),
        "--stream",
        "s",
    ]

    def start(port: int) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=subprocess.PIPE, text=True
        )
        line = process.stdout.readline()
        assert "Taking in records at http://127.0.0.1:" in line
        return process, int(line.split("127.0.0.1:")[1].split(";")[0])

    process, port = start(0)
    try:
        token = (tmp_path / "d" / "token").read_text()
        assert (tmp_path / "d" / "token").stat().st_mode & 0o77 == 0
        there = Endpoint(f"http://127.0.0.1:{port}", token)

        def push() -> None:
            producer = Producer(there, "s", "p")
            for number in range(60):
                producer.push([number])
                time.sleep(0.01)

        with ThreadPoolExecutor(1) as thread:
            pushed = thread.submit(push)
            for _ in range(2):
                time.sleep(0.15)
                process.send_signal(signal.SIGKILL)
                process.communicate()
                process, _ = start(port)
            pushed.result(20)
        found = Reader(there, "s").read(0, 0, 1000, 1000)
        there.close()
        assert [json.loads(record) for record in found.records] == list(range(60))
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()
