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


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed; scripts/test-engines installs it")  # fmt: skip
@pytest.mark.parametrize(
    ("resources", "why"),
    [
        ({"CPU": 1e-5}, "precision .* num_cpus cannot go"),
        ({"CPU": 1.0, "TPU": 3.0}, "requested 'TPU' was set to 3.0"),
    ],
)
def test_amounts_that_ray_gives_to_no_actor_are_refused_at_once(monkeypatch, resources, why):
    """Otherwise no node could be made, and the job would wait for ever."""
    monkeypatch.setattr(cluster, "machines", lambda: {"node": {"CPU": 8.0, "TPU": 8.0}})
    monkeypatch.setattr(cluster, "most", lambda: None)
    spec = SimpleNamespace(min_nodes=1)
    role = SimpleNamespace(resources=resources)
    job = SimpleNamespace(roles={"": role}, role=lambda _: role, master=SimpleNamespace(job=spec))
    with pytest.raises(ConfigurationError, match=rf"^--ray-resources: .*{why}.*[^.]\.$"):
        cluster.check_room(job)
    with pytest.raises(ConfigurationError, match=rf"^role a: resources: .*{why}"):
        cluster.check_roles([("a", 1, resources)])
    cluster.check_roles([("a", 1, {"CPU": 0.5, "TPU": 4.0})])
