"""``dlrover roles``: whoever dies, each number is learned once, and nobody works with old weights."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from dlrover.errors import InfrastructureError
from dlrover.roles.client import RolesClient
from dlrover.spec import events
from dlrover.spec.jobdir import JobDir, TlsFiles
from tests.support import certificates

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(500)]
ROLES = (sys.executable, "-m", "dlrover.cli.main", "roles")
JOB = Path(__file__).parent / "scripts" / "roles" / "job.py"
"""The job that runs unchanged on each platform."""


def learned(out: Path) -> list[int]:
    """The batches that the trainer of the job has learned."""
    state = out / "state.json"
    return list(json.loads(state.read_text())[2]) if state.exists() else []


def each_batch_was_learned_once(out: Path) -> int:
    """Check what the job has left; return the number of batches."""
    count, total = (out / "result").read_text().split()
    number = int(count)
    assert sorted(learned(out)) == list(range(number))
    assert float(total) == sum(n * n for n in range(4 * number))
    return number


class Numbers:
    """The job, started with these options."""

    def __init__(self, run, *options: str, name: str = "run", env=None) -> None:
        self.run, self.out = run, run.directory / f"{name}-out"
        self.out.mkdir()
        self.launch = run(
            JOB, *options, "--job-dir", run.directory / name / "job",
            launcher=ROLES, name=name, env={"OUT": str(self.out), **(env or {})},
        )  # fmt: skip
        self.launch.is_ours = True

    def lines(self, name: str) -> list[str]:
        path = self.out / name
        return path.read_text().split("\n")[:-1] if path.exists() else []

    @property
    def served(self) -> list[list]:
        return [json.loads(line) for line in self.lines("served.jsonl")]

    def pids(self, role: str) -> list[int]:
        """Pids of all processes of a role so far, those of rank 0 for the trainer."""
        if role == "rollout":
            return [int(line.split()[1]) for line in self.lines("rollouts")]
        name = {"trainer": "trainer-0-*", "main": "main-*"}[role]
        found = sorted(self.out.glob(name), key=lambda path: path.stat().st_mtime_ns)
        return [int(path.name.rpartition("-")[2]) for path in found]

    def living(self, role: str) -> list[int]:
        return [pid for pid in self.pids(role) if psutil.pid_exists(pid)]

    def more(self, what: str, count: int = 3) -> None:
        """Wait until so many more batches are served."""
        before = len(self.served)
        self.launch.until(lambda: len(self.served) >= before + count, 150, f"more batches {what}")

    def kill(self, role: str) -> None:
        """Kill a process of a role; wait for the one that takes its place, and for more batches."""
        before = len(self.pids(role))
        os.kill(self.living(role)[-1], signal.SIGKILL)
        self.launch.until(lambda: len(self.pids(role)) > before, 150, f"another process of {role}")
        self.more(f"after the death of {role}")

    def status(self) -> dict:
        return {role["name"]: role for role in self.run.status(self.launch)["status"]["roles"]}


def coordinator(launch) -> psutil.Process:
    (found,) = [p for p in launch.processes() if "dlrover.roles" in p.cmdline()]
    return found


async def status_at(address: str, token: str, tls: TlsFiles | None) -> None:
    async with RolesClient(address, token, tls) as client:
        await client.status()


def test_whoever_dies_each_batch_is_learned_once_and_the_others_go_on(run) -> None:
    """All that goes over a network does so by TLS."""
    tls = certificates.made(run.directory)
    job = Numbers(run, env=certificates.settings(tls))
    job.more("at the start")
    first = {role: job.living(role) for role in ("trainer", "rollout", "main")}
    for _ in range(2):  # the second death of the same role is handled as the first
        job.kill("rollout")
        job.kill("trainer")
    assert job.living("main") == first["main"], "only rollouts and trainers died"
    coordinator(job.launch).kill()
    job.more("after the death of the coordinator")
    job.launch.until(lambda: job.launch.events_of(events.CoordinatorRecovered), 60)
    kept = {role: job.living(role) for role in ("trainer", "rollout", "main")}
    job.kill("main")
    assert {role: job.living(role) for role in ("trainer", "rollout")} == {
        role: kept[role] for role in ("trainer", "rollout")
    }, "the death of the driver stops nobody else"

    where = JobDir(job.launch.job_dir)
    token, address = where.token.read_text(), json.loads(where.master.read_text())["address"]
    for given in (None, TlsFiles(ca=certificates.made(job.out).ca)):
        with pytest.raises(InfrastructureError, match=r"The coordinator at .* cannot be reached"):
            asyncio.run(status_at(address, token, given))
    status = job.status()
    restarts = {role: status[role]["restarts"] for role in first}
    assert restarts == {"trainer": 2, "rollout": 2, "main": 1}
    (out := job.out / "enough").touch()
    job.launch.end_with(0, 180)
    assert out.exists()

    number = each_batch_was_learned_once(job.out)
    born = {int(pid): int(step) for _, pid, step in map(str.split, job.lines("rollouts"))}
    assert max(born.values()) > 0
    for _, epoch, _, found in job.served:
        for _, used, pid in found:
            assert used >= born[pid] or epoch, "a newcomer served with old weights"

    shown = run.dlrover("status", "--job-dir", job.launch.job_dir).stdout
    assert f"Queue samples: 0 waiting, 0 leased of 3; {number} of {number} items done" in shown
    assert run.dlrover("goodput", "--job-dir", job.launch.job_dir).stdout.count("\n") == 4


def test_the_root_cause_of_a_roles_failure_is_on_the_last_screen(run) -> None:
    folder = run.directory / "bad"
    folder.mkdir()
    (folder / "wait.py").write_text("import time\ntime.sleep(1000)\n")
    (folder / "bad.py").write_text(
        "def learn():\n    raise KeyError('no such tensor')\n\nlearn()\n"
    )
    (folder / "job.yaml").write_text(
        "name: bad\nroles:\n  waits: {entry: wait.py}\n  trainer: {entry: bad.py, kind: elastic, max_restarts: 1}\n"
    )
    launch = run(folder / "job.yaml", "--job-dir", run.directory / "run" / "job", launcher=ROLES)
    launch.is_ours = True
    _, error = launch.end_with(1, 180)
    assert "KeyError: 'no such tensor'" in error
    assert "bad.py" in error
    assert "role trainer" in error


def test_a_program_that_calls_a_role_or_a_member_that_can_never_be_hears_it_at_once(run) -> None:
    folder = run.directory / "misspelt"
    folder.mkdir()
    (folder / "wait.py").write_text("import time\ntime.sleep(1000)\n")
    (folder / "main.py").write_text(
        "from dlrover.roles import RoleGroup\n"
        "for call in (lambda: RoleGroup('wiats'), lambda: RoleGroup('waits').call_member(7, 'f')):\n"
        "    try:\n        call()\n    except Exception as error:\n        print(error)\n"
    )
    (folder / "job.yaml").write_text(
        "name: misspelt\nroles:\n  waits: {entry: wait.py, instances: 2}\n  main: {entry: main.py, kind: driver}\n"
    )
    launch = run(folder / "job.yaml", "--job-dir", run.directory / "run" / "job", launcher=ROLES)
    launch.is_ours = True
    output, _ = launch.end_with(0, 180)
    assert "The job has no role wiats. Did you mean waits?" in output
    assert "The role waits never has a member 7; its last one is waits 1." in output


def test_a_user_stops_all_roles_and_the_death_of_the_command_ends_them(run) -> None:
    folder = run.directory / "waits"
    folder.mkdir()
    (folder / "wait.py").write_text("import time\ntime.sleep(1000)\n")
    (folder / "job.yaml").write_text(
        "name: waits\nroles:\n  one: {entry: wait.py, instances: 2}\n  two: {entry: wait.py, depends_on: one}\n"
    )
    for name in ("stopped", "killed"):
        where = run.directory / name / "job"
        launch = run(folder / "job.yaml", "--job-dir", where, launcher=ROLES, name=name)
        launch.is_ours = True
        launch.until(lambda at=launch: len(at.of_kind("worker")) == 3, 150, "all roles")
        if name == "killed":
            launch.process.kill()
            continue  # the fixture sees that nothing stays
        assert "is being stopped" in run.dlrover("stop", "--job-dir", where).stdout
        launch.end_with(5, 120)
