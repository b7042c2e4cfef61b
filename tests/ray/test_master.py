"""The master's actor without a cluster: what it answers, when it gives its command up, and what ends it."""

from __future__ import annotations

import asyncio
import collections
import errno
import importlib.util
import itertools
import os
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from dlrover.errors import ConfigurationError
from dlrover.spec.job import JobSpec
from dlrover.spec.jobdir import JobDir, MasterConfig
from dlrover.spec.outcome import Outcome

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # Ray's own
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed; scripts/test-engines installs it"),
]  # fmt: skip


class Left(BaseException):
    """The process of the actor has ended."""


@pytest.fixture
def actor(tmp_path: Path, monkeypatch):
    """An actor in whose process nothing runs yet."""
    from dlrover.ray import master as module

    made = object.__new__(module.MasterActor.__ray_metadata__.modified_class)
    made._job, made._dir = SimpleNamespace(name="job", foreground=True), JobDir(tmp_path)
    made._output, made._size, made._over, made._taken = collections.deque(), 0, True, False
    made._heard, made._abandoned, made.module, made.codes = True, False, module, []

    def leave(code: int) -> None:
        made.codes.append(code)
        raise Left

    monkeypatch.setattr(module.os, "_exit", leave)
    monkeypatch.setattr(module.platform, "request_no_more", lambda: None)
    monkeypatch.setattr(made, "_reap", lambda: None)
    monkeypatch.setattr(made, "_leave", lambda: None)
    return made


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_a_master_that_was_stopped_does_not_take_its_own_pause_for_the_commands_silence(
    actor, monkeypatch, is_abandoned
) -> None:
    """The clock goes on by 1000 s with each look, as when the process is stopped again and again."""
    looks = itertools.count(1)

    def sleep(_: float) -> None:
        number = next(looks)
        if number <= 500:
            asyncio.run(actor.news(b"", 0))
        elif is_abandoned:
            asyncio.run(actor.abandon())

    clock = itertools.count(0, 1000)
    time = SimpleNamespace(sleep=sleep, monotonic=lambda: float(next(clock)))
    monkeypatch.setattr(actor.module, "time", time)
    actor._guard()
    silent = 1 if is_abandoned else int(actor.module.SILENCE / actor.module.POLL)
    assert next(looks) == 500 + silent + 1


def test_a_master_that_fails_in_any_way_is_started_again(actor, monkeypatch) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    actor._job.foreground = False
    monkeypatch.setattr(actor.module.app, "main", full)
    with pytest.raises(Left):
        actor._or_again(actor._run)
    assert actor.codes == [1]


def test_a_journal_that_finds_no_room_is_left_out_of_the_files(actor, monkeypatch) -> None:
    def full(_: Path) -> bytes:
        raise sqlite3.OperationalError("database or disk is full")

    config = MasterConfig(job=JobSpec(name="job"))
    for path, data in ((actor._dir.outcome, b"{}"), (actor._dir.journal, b"journal")):
        path.write_bytes(data)
    monkeypatch.setattr(actor.module, "load_config", lambda _: config)
    monkeypatch.setattr(actor.module, "_copy_of", full)
    assert sorted(actor.module._collect(actor._dir)) == ["job.json", "outcome.json"]


def test_news_are_those_of_the_history_that_the_caller_knows(actor) -> None:
    lines = [b"first\n", b"x" * (actor.module.READ + 1) + b"\n", b"torn"]
    actor._dir.events.write_bytes(b"".join(lines))

    def news(of: bytes, position: int) -> bytes:
        _, first, happened, _ = asyncio.run(actor.news(of, position))
        assert first == lines[0]
        return happened

    assert news(b"another\n", 6) == news(b"", 0) == lines[0]
    assert news(lines[0], 6) == lines[1], "a line that is longer than what is read at once"
    assert news(lines[0], 6 + len(lines[1])) == b"", "a line that is being written"


def test_a_node_that_was_lost_while_no_master_looked_is_no_failed_start(monkeypatch) -> None:
    """Before, three of them ended the job."""
    from dlrover.ray import platform as module

    ends = []
    job = SimpleNamespace(name="job")
    master = SimpleNamespace(on_node_exit=lambda node, why, *, removed: ends.append((why, removed)))
    monkeypatch.setattr(module.jobs, "encode", lambda job: b"")
    monkeypatch.setattr(module.cluster, "actor", lambda name: None)
    monkeypatch.setattr(module, "_remove", lambda name: None)
    asyncio.run(module.RayPlatform(job, master, [])._watch(3, "job/node/3/0/1.0/1.0", {}))
    assert ends == [("its actor is gone", True)]


@pytest.fixture
def command(tmp_path: Path, monkeypatch):
    """The foreground's end of a job whose master has left for good, and what its cluster keeps."""
    from dlrover.ray import __main__ as module, tunnel

    known: dict[str, dict[str, bytes]] = {}
    job = SimpleNamespace(name="job", token="ours", address="", working_dir="")
    monkeypatch.setattr(tunnel, "Tunnel", lambda name: SimpleNamespace(address="h:1"))
    monkeypatch.setattr(module.cluster, "actor", lambda name: None)
    monkeypatch.setattr(module.cluster, "record", known.get)
    return SimpleNamespace(module=module, known=known, dir=JobDir(tmp_path), job=job)


def test_a_command_that_was_stopped_at_the_jobs_end_has_its_outcome(command) -> None:
    outcome = msgspec.json.encode(Outcome(exit_code=0, reason="All is done."))
    ended = {"outcome.json": outcome, "events.jsonl": b"of one of its masters"}
    command.known["job"] = {**ended, "token": b"of a later job of this name"}
    assert command.module._follow(command.dir, command.job, {}) == 3
    command.known["job"] = {**ended, "token": b"ours"}
    command.dir.outcome.unlink()
    assert command.module._follow(command.dir, command.job, {}) == 0
    assert command.dir.outcome.read_bytes() == outcome
    assert command.dir.events.read_bytes() == b""


def test_a_master_that_left_without_an_outcome_is_the_clusters_fault(command) -> None:
    assert command.module._follow(command.dir, command.job, {}) == 3
    assert b"gone for good" in command.dir.outcome.read_bytes()


def test_a_job_that_was_started_is_not_started_again_by_the_next_process_of_its_command(
    command, monkeypatch
) -> None:
    module, started = command.module, []
    monkeypatch.setattr(module.logs, "log_to", lambda path: None)
    monkeypatch.setattr(module, "_keep_streams", lambda log: {})
    monkeypatch.setattr(module.cluster, "connect", lambda *_: None)
    monkeypatch.setattr(module.remote, "start", started.append)
    monkeypatch.setattr(module.jobs, "decode", lambda data: command.job)
    (command.dir.path / module.jobs.FILE).touch()
    for _ in range(2):
        assert module.main(["--job-dir", str(command.dir.path)]) == 3
    assert started == [command.job]

    def refuse(*_: object) -> None:
        raise ConfigurationError("nothing listens at h:1.")

    monkeypatch.setattr(module.cluster, "connect", refuse)
    for code, said in ((3, b"Ray cluster is gone: nothing listens"), (2, b'"nothing listens')):
        assert module.main(["--job-dir", str(command.dir.path)]) == code
        assert said in command.dir.outcome.read_bytes()
        command.dir.master.unlink(missing_ok=True)


def test_a_command_follows_and_ends_no_other_job_of_the_same_name(command, monkeypatch) -> None:
    """Its own was ended while the command was stopped, and another command has started the next one."""
    module, read_end = command.module, os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setattr(module.cluster, "actor", lambda name: SimpleNamespace(token=token))
    monkeypatch.setattr(module.cluster, "answer", lambda call, _: call())

    def leave(code: int) -> None:
        raise Left

    token = SimpleNamespace(remote=lambda: "another")
    monkeypatch.setattr(module.os, "_exit", leave)
    with pytest.raises(Left):
        module._guard(read_end, command.job)
    os.close(read_end)
    assert module._follow(command.dir, command.job, {}) == 3
