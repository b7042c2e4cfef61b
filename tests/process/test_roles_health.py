"""``dlrover roles`` with limits of phases: an instance that lives but makes no progress is replaced; who follows sees it."""

import subprocess
import sys

import pytest

from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]
ROLES = (sys.executable, "-m", "dlrover.cli.main", "roles")
FILES = {
    "engine.py": """
import threading
from pathlib import Path
from dlrover.roles import rpc

class Engine:
    @rpc(idempotent=True)
    def answer(self, numbers):
        if not Path("hung").exists():
            Path("hung").touch()
            threading.Event().wait()  # pings are answered meanwhile
        return numbers
""",
    "main.py": """
import os
import signal
from pathlib import Path
from dlrover.roles import RoleGroup, current_worker

current_worker()
if not Path("stopped").exists():
    Path("stopped").touch()
    os.kill(os.getpid(), signal.SIGSTOP)
print("answered", RoleGroup("engine").call_batch("answer", 1, [7]).result())
""",
    "deaf.py": """
import time
from pathlib import Path

if not Path("began").exists():
    Path("began").touch()
    time.sleep(1000)  # before it has joined the job
""",
    "job.yaml": """
name: health
roles:
  engine: {entry: "engine:Engine", health: {work: 3}}
  main: {entry: main.py, health: {work: 3}}
  deaf: {entry: deaf.py, health: {start: 8}}
""",
}


def test_instances_that_live_without_progress_are_replaced_each_for_its_reason(run) -> None:
    folder = run.directory / "health"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text.replace('Path("', f'Path("{folder}/'))
    launch = run(folder / "job.yaml", "--job-dir", run.directory / "run" / "job", launcher=ROLES)
    launch.is_ours = True
    launch.until((launch.job_dir / "master.json").exists, 60)
    following = subprocess.Popen(
        [*ROLES[:-1], "events", "--follow", "--job-dir", launch.job_dir],
        env=run.env, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    launch.until(lambda: launch.events_of(events.InstanceStuck), 120, "the first without progress")
    (coordinator,) = [p for p in launch.processes() if "dlrover.roles" in p.cmdline()]
    coordinator.kill()
    output, error = launch.end_with(0, 240)
    followed, _ = following.communicate(timeout=60)
    assert [line[21:] for line in followed.splitlines()] == [
        event.sentence() for event in launch.events
    ], "a follower misses nothing, and ends with the job"
    assert "CancelledError" not in error
    assert "answered [7]" in output
    found = {one.body.role: one.body for one in launch.events_of(events.InstanceStuck)}
    assert {role: one.phase or "work" for role, one in found.items()} == {
        "engine": "work", "main": "work", "deaf": "start",
    }, "or main says nothing after it was idle for an instant"  # fmt: skip
    assert "Instance 0 of engine is ended: it had made no progress for" in error
    assert "threading.Event().wait()" in error, "the stack in which it was stuck"
    roles = {role["name"]: role for role in run.status(launch)["status"]["roles"]}
    assert all(roles[name]["restarts"] >= 1 for name in ("engine", "deaf", "main"))
    ended = {one.body.role: one.body.reason for one in launch.events_of(events.InstanceEnded)}
    assert all(ended[name] == one.why() for name, one in found.items())
