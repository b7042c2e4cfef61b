"""``dlrover-run --servers``: parameter servers beside workers, lost, scaled, and gone in the end."""

import signal

import pytest

from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


class Served:
    """A job of `scripts/served.py`, and what it has written."""

    def __init__(self, run, *options: str) -> None:
        self.out = run.directory / "out"
        self.out.mkdir()
        self.launch = run(*options, run.scripts / "served.py", self.out)

    def steps(self) -> list[int]:
        """How many servers each step of worker 0 had."""
        return [int(line) for line in self._lines("steps")]

    def starts(self) -> list[tuple[str, ...]]:
        return [tuple(line.split()) for line in self._lines("starts")]

    def _lines(self, name: str) -> list[str]:
        path = self.out / name
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def rounds(self) -> list[tuple[int, int]]:
        """Processes of each world so far: workers, servers."""
        worlds = [event.body for event in self.launch.events_of(events.RoundCompleted)]
        return [(world.world_size - world.servers, world.servers) for world in worlds]

    def wait_for_world(self, workers: int, servers: int, rounds: int) -> None:
        def there() -> bool:
            formed = self.rounds()
            return len(formed) >= rounds and formed[-1] == (workers, servers)

        self.launch.until(there, 30, f"a world of {workers} workers and {servers} servers")
        done = len(self.steps())
        self.launch.until(
            lambda: self.steps()[done:].count(servers) >= 2, 20, f"steps with {servers} servers"
        )


def test_a_job_with_servers_loses_one_gets_one_more_and_ends_with_its_workers(run) -> None:
    job = Served(run, "--local-nodes=2", "--nproc-per-node=2", "--servers=2")
    launch = job.launch
    job.wait_for_world(4, 2, rounds=1)
    launch.until(lambda: len(job.starts()) == 6, 20, "the start of all processes")
    assert sorted(job.starts()) == [
        *[("ps", str(n), "2", str(4 + n), "6", "1") for n in range(2)],
        *[("worker", str(n), "4", str(n), "6", "2") for n in range(4)],
    ]
    status = run.status(launch)
    assert [node["role"] for node in status["status"]["nodes"]] == ["worker"] * 2 + ["ps"] * 2

    server = next(p for p in launch.of_kind("agent") if p.cmdline()[-1] == "1048577")
    server.send_signal(signal.SIGKILL)
    job.wait_for_world(4, 2, rounds=2)
    lost = [event.sentence() for event in launch.events_of(events.NodeLost)]
    assert len(lost) == 1
    assert lost[0].startswith("Node 3 (ps) is lost: ")

    asked = run.dlrover("scale", "--job-dir", launch.job_dir, "--role", "ps", "--nodes", 3)
    assert asked.stdout.strip() == (
        "The job will have 3 ps nodes instead of 2: 1 is being started, and training goes on until "
        "they are there."
    )
    job.wait_for_world(4, 3, rounds=3)
    (job.out / "go").touch()
    launch.succeed()
    assert len(launch.events_of(events.RestartDecided)) == 1
    succeeded = [event.body.node for event in launch.events_of(events.NodeSucceeded)]
    assert sorted(succeeded) == [0, 1], "servers are dismissed"


def test_a_master_that_dies_keeps_the_servers_that_the_job_was_scaled_to(run) -> None:
    job = Served(run, "--local-nodes=1", "--servers=1:2", "--rdzv-conf=scale_up_delay=0.1")
    launch = job.launch
    job.wait_for_world(1, 2, rounds=1)
    asked = run.dlrover("scale", "--job-dir", launch.job_dir, "--role", "ps", "--nodes", 1)
    assert asked.stdout.startswith("The job will have 1 ps node instead of 2: the last one leaves")
    job.wait_for_world(1, 1, rounds=2)
    (master,) = launch.of_kind("master")
    master.kill()
    launch.until(lambda: launch.events_of(events.MasterRecovered), 20, "another master")
    server = next(p for p in launch.of_kind("agent") if p.cmdline()[-1] == "1048576")
    server.send_signal(signal.SIGKILL)
    job.wait_for_world(1, 1, rounds=3)
    (job.out / "go").touch()
    launch.succeed()
