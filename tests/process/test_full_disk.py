"""A job whose directory is on a disk that gets full goes on, and ends as it would have otherwise."""

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.errors import ExitCode
from dlrover.spec.job import JobSpec
from tests.support.masters import MasterProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where the job's directory is to be."""
    disk = tmp_path / "run"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture
def full(run, small_disk: Path):
    """Starts a job that fills the disk of its directory; its console is elsewhere."""

    def start(end: str):
        script = run.scripts / "fills_disk.py"
        job = ["--job-dir", small_disk / "job"]
        launch = run(*job, script, small_disk, end, name="console")
        launch.job_dir = small_disk / "job"
        return launch

    return start


LINES = [f"line {number}" for number in range(2000)]


def check_console(stdout: str, stderr: str) -> None:
    assert stdout.splitlines() == LINES
    assert "Logging error" not in stderr
    assert "last words" in stderr


def test_a_job_succeeds_on_a_full_disk(full) -> None:
    launch = full("well")
    check_console(*launch.end_with(0, 30))


def test_a_bug_is_named_on_a_full_disk(run, full) -> None:
    launch = full("badly")
    stdout, stderr = launch.end_with(ExitCode.USER_CODE, 30)
    check_console(stdout, stderr)
    assert "rank 0 raised ValueError on node 0" in stderr
    status = run.dlrover("status", "--job-dir", launch.job_dir)
    assert status.returncode == 0, status.stderr
    assert "a bug of the program" in status.stdout


def test_the_first_signal_ends_a_job_on_a_full_disk(run, full) -> None:
    launch = full("never")
    run.until(lambda: "last words" in launch.stderr, 30, "a full disk")
    launch.process.send_signal(signal.SIGTERM)
    stdout, stderr = launch.end_with(ExitCode.SIGNAL_BASE + signal.SIGTERM, 40)
    check_console(stdout, stderr)
    assert "The job was stopped by SIGTERM." in stderr


def test_a_disk_that_is_full_from_the_start_is_named(run, small_disk: Path) -> None:
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    launch = run("--job-dir", small_disk / "job", run.scripts / "hello.py", name="console")
    _, stderr = launch.end_with(ExitCode.USAGE, 20)
    assert stderr.startswith("dlrover-run: --job-dir ")
    assert "No space left on device" in stderr
    assert "Traceback" not in stderr


def test_a_master_that_takes_over_waits_for_room_for_its_journal(
    small_disk: Path, tmp_path: Path
) -> None:
    """One that ended would soon have ended too often, and the job with it."""
    (tmp_path / "job").mkdir()
    journal = f"file:{small_disk}/journal.sqlite"
    master = MasterProcess(tmp_path / "job", JobSpec(name="job"), journal=journal)
    log = tmp_path / "job" / "master.log"

    async def main() -> None:
        async with master:
            with (
                (small_disk / "filler").open("wb", buffering=0) as filler,
                contextlib.suppress(OSError),
            ):
                while True:
                    filler.write(bytes(4096))
            master.kill()
            starting = asyncio.create_task(master.start())
            while not (starting.done() or "is tried again each" in log.read_text()):
                await asyncio.sleep(0.01)
            (small_disk / "filler").unlink()
            await starting
            async with master.client() as client:
                assert (await client.status()).phase == "waiting for nodes"

    asyncio.run(asyncio.wait_for(main(), 100.0))
