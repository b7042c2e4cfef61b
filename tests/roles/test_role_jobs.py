"""The command line of a role's own job says what the role asks for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlrover._util import procs
from dlrover.cli.run.arguments import parse
from dlrover.cli.run.launchspec import RunOptions
from dlrover.errors import InfrastructureError
from dlrover.roles.coordinator.jobs import RoleJobs, arguments, directory_of, on_ray, program
from dlrover.roles.spec import (
    EntryForm,
    EntryPoint,
    Failover,
    RoleKind,
    RolesConfig,
    RolesJob,
    RoleSpec,
)
from dlrover.spec.node import NodeLimits
from tests.waiting import until


def options(tmp_path: Path, **spec: Any) -> RunOptions:
    script = tmp_path / "work.py"
    script.touch()
    role = RoleSpec(
        name="a", entry=EntryPoint(EntryForm.SCRIPT, str(script), ("--lr", "1")), **spec
    )
    return parse(arguments(role, RolesConfig(job=RolesJob(name="job", roles=(role,)))), {})


def test_instances_of_a_simple_role(tmp_path: Path) -> None:
    found = options(tmp_path, most=3, max_restarts=7, window=60.0, shutdown_timeout=5)
    assert (found.local_nodes, found.job.instances, found.launch.args) == (3, "a", ("--lr", "1"))
    assert (found.job.max_restarts, found.job.shutdown_timeout) == (7, 5.0)
    assert found.rdzv_conf == {
        "max_infrastructure_restarts": "7", "no_progress_restarts": "8", "restart_window": "60",
    }  # fmt: skip


def test_a_world_of_an_elastic_role(tmp_path: Path) -> None:
    found = options(tmp_path, kind=RoleKind.ELASTIC, least=1, most=2, processes=4, spares=1)
    assert (found.job.min_nodes, found.job.max_nodes, found.launch.nproc_per_node) == (1, 2, 4)
    assert (found.job.instances, found.job.spares, found.launch.role) == ("", 1, "a")


@pytest.mark.parametrize(
    ("failover", "kind", "restarts"),
    [
        (Failover.INSTANCE, RoleKind.SIMPLE, 10),
        (Failover.ROLE, RoleKind.SIMPLE, 0),
        (Failover.JOB, RoleKind.SIMPLE, 0),
        (Failover.ROLE, RoleKind.ELASTIC, 10),
        (Failover.JOB, RoleKind.ELASTIC, 0),
    ],
)
def test_the_coordinator_decides_where_more_than_an_instance_restarts(
    tmp_path: Path, failover: Failover, kind: RoleKind, restarts: int
) -> None:
    assert options(tmp_path, failover=failover, kind=kind).job.max_restarts == restarts


def test_objects_run_in_the_process_that_serves_them() -> None:
    entry = EntryPoint(EntryForm.OBJECT, "serving:Rollout")
    assert program(entry) == ["--module", "dlrover.roles.runtime.serve", "serving:Rollout"]


def test_a_role_takes_its_part_of_a_ray_cluster(tmp_path: Path) -> None:
    (tmp_path / "work.py").touch()
    entry = EntryPoint(EntryForm.SCRIPT, str(tmp_path / "work.py"))
    one = RoleSpec(name="a", entry=entry, most=3, size=NodeLimits(memory=1 << 40), gpus=0.5)
    two = RoleSpec(name="b", entry=entry, kind=RoleKind.ELASTIC, least=1, most=2, processes=4)
    config = RolesConfig(
        job=RolesJob(name="j", roles=(one, two)),
        platform="ray",
        ray_address="h:1",
        ray_working_dir=str(tmp_path),
    )

    def found(role: RoleSpec) -> RunOptions:
        where = on_ray(role, config, f"j-{role.name}", ["TOKEN", "PATH"])
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            return parse(arguments(role, config, where), {"TOKEN": "t", "PATH": "p"})

    simple, elastic = found(one), found(two)
    assert simple.ray is not None
    assert elastic.ray is not None
    assert (simple.local_nodes, simple.job.instances, simple.launch.run_id) == (3, "a", "j-a")
    assert simple.ray.resources == {"CPU": 1, "memory": 1 << 40, "GPU": 0.5}
    assert (simple.ray.env, simple.ray.address) == ({"TOKEN": "t", "PATH": "p"}, "h:1")
    assert (simple.ray.working_dir, simple.launch.target) == (str(tmp_path), "work.py")
    assert (elastic.job.min_nodes, elastic.job.max_nodes, elastic.job.instances) == (1, 2, "")
    assert elastic.ray.resources == {"CPU": 4}


@pytest.mark.slow
@pytest.mark.parametrize("ignores", [False, True])
def test_a_launcher_that_is_stopped_ends_all_the_same(tmp_path: Path, *, ignores: bool) -> None:
    """One that was stopped by SIGSTOP takes the request; one that ignores it is killed after a while."""
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" if ignores else ""
    program = f"{ignore}\nprint(flush=True)\nwhile True: __import__('time').sleep(9)"
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    launcher.stdout.readline()
    launcher.send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(launcher.pid).status() == psutil.STATUS_STOPPED)
    config = RolesConfig(job=RolesJob(name="job", roles=()))

    async def stop() -> None:
        jobs = RoleJobs(tmp_path, config, {}, -1, lambda *_: None)
        jobs.stop(f"{launcher.pid}:{procs.start_time(launcher.pid)}", 0.1 if ignores else 600)
        await procs.ended(launcher.pid)

    with launcher:
        asyncio.run(asyncio.wait_for(stop(), 60))
    assert launcher.returncode == -(signal.SIGKILL if ignores else signal.SIGTERM)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (
            ("a" * 200_000,),
            "its config, env and arguments are more than a process can be given; put",
        ),
        (("a\0b",), "embedded null byte"),
    ],
)
def test_what_no_process_can_be_given_ends_the_role_with_a_sentence(
    args: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    role = RoleSpec(name="a", entry=EntryPoint(EntryForm.SCRIPT, "/work.py", args))
    config = RolesConfig(job=RolesJob(name="job", roles=(role,)))
    jobs = RoleJobs(tmp_path, config, {}, -1, lambda *_: None)
    with pytest.raises(InfrastructureError, match=f"^Role a cannot be started: {why}"):
        jobs.start("a", 1, {})


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["local", "ray"])
def test_the_master_of_the_last_attempt_is_no_longer_asked_for_events(
    tmp_path: Path, platform: str
) -> None:
    """Its launcher was killed, and it may end more slowly than the next attempt starts."""
    role = RoleSpec(name="a", entry=EntryPoint(EntryForm.SCRIPT, "/nowhere.py"))
    config = RolesConfig(job=RolesJob(name="job", roles=(role,)), platform=platform)
    (tmp_path / "token").write_text("t")
    directory = directory_of(tmp_path, "a")
    directory.path.mkdir(parents=True)
    followed = directory.master if platform == "local" else directory.events
    followed.write_text("of the last attempt")

    async def start() -> None:
        jobs = RoleJobs(tmp_path, config, {"PATH": os.environ["PATH"]}, -1, lambda *_: None)
        jobs.start("a", 2, {})
        assert not followed.exists()
        jobs.close()
        for launcher in jobs._children.values():
            launcher.kill()
            launcher.wait()

    asyncio.run(start())
