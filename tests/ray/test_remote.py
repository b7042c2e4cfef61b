"""A job of a Ray cluster as commands see it, without a cluster."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrover.errors import ConfigurationError
from dlrover.ray import cluster, remote


@pytest.fixture
def ended(monkeypatch):
    """A cluster in which one job has ended."""
    monkeypatch.setattr(cluster, "connect", lambda address: None)
    monkeypatch.setattr(cluster, "names", list)
    monkeypatch.setattr(cluster, "records", lambda: ["job"])
    monkeypatch.setattr(cluster, "record", lambda name: {"events": b"new", "outcome": b"{}"})


def test_two_commands_that_copy_a_job_at_once_leave_each_other_what_they_need(
    ended, tmp_path, monkeypatch
) -> None:
    env = {"DLROVER_STATE_DIR": str(tmp_path)}
    place = remote.copy(env, "job", "").path
    for name in ("master", ".outcome.1.ab"):  # of an earlier life, and what the other writes now
        (place / name).write_text("old")
    unlink = Path.unlink

    def by_the_other_too(path: Path, **options: bool) -> None:
        unlink(path, missing_ok=True)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", by_the_other_too)
    remote.copy(env, "job", "")
    assert sorted(one.name for one in place.iterdir()) == [".outcome.1.ab", "events", "outcome"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed; scripts/test-engines installs it")  # fmt: skip
def test_a_name_that_another_command_takes_meanwhile_is_refused_in_one_sentence(monkeypatch):
    from dlrover.ray import master

    def taken(data: bytes) -> None:
        raise ValueError("The name job/master is already taken")  # as Ray says it

    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=taken))
    monkeypatch.setattr(master, "MasterActor", options)
    monkeypatch.setattr(cluster, "actor", lambda name: None)
    for name in ("check_room", "forget_record"):
        monkeypatch.setattr(cluster, name, lambda job: None)
    monkeypatch.setattr(remote.jobs, "encode", lambda job: b"")
    with pytest.raises(ConfigurationError, match="already runs a job named job; --rdzv-id"):
        remote.start(SimpleNamespace(name="job"))
