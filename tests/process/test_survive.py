"""A lost replica stops nobody: the others go on in their own processes, and it joins them again."""

from __future__ import annotations

import functools
import itertools
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from dlrover.spec import events
from dlrover.spec.failure import Rung
from tests.process.conftest import Launch

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).parent / "scripts" / "replicas.py"


class Line(NamedTuple):
    step: int
    loss: float
    pid: int
    members: int


class Training:
    """A job of replicas, seen by what each rank writes after each step."""

    def __init__(self, run, replicas: int, pause: float, *options: str) -> None:
        self.out = run.directory
        self.alone = subprocess.Popen(
            [sys.executable, SCRIPT.with_name("replicas_alone.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        """The same training in one process, without any replica."""
        shape = options or (f"--nproc-per-node={replicas}",)
        self.replicas = replicas
        self.launch: Launch = run("--survive", *shape, SCRIPT, self.out, pause)

    def lines(self, rank: int) -> list[Line]:
        path = self.out / f"rank{rank}.txt"
        rows = path.read_text().split("\n")[:-1] if path.exists() else []
        fields = [row.split() for row in rows if not row.startswith("end")]
        return [Line(int(f[0]), float(f[1]), int(f[2]), int(f[3])) for f in fields]

    def wait_until_all_train(self, after: int = 0) -> None:
        """Wait until all ranks have trained together in a step, in the processes that now live."""

        def together() -> bool:
            last = [self.lines(rank)[-1:] for rank in range(self.replicas)]
            return all(
                one
                and one[0].members == self.replicas
                and psutil.pid_exists(one[0].pid)
                and one[0].step > after
                for one in last
            )

        self.launch.until(together, 60)

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            return any(
                self.lines(r) and self.lines(r)[-1].step >= step for r in range(self.replicas)
            )

        self.launch.until(reached, 60, f"step {step}")

    def pid(self, rank: int) -> int:
        return self.lines(rank)[-1].pid

    def latest(self) -> int:
        return max(self.lines(rank)[-1].step for rank in range(self.replicas))

    def check(self) -> None:
        """End the training: no process lost or repeated a step, and each has the loss of a training in one process."""
        last = self.latest() + 20
        (self.out / "new").write_text(str(last))
        (self.out / "new").rename(self.out / "last")
        self.launch.succeed(90)
        shown, _ = self.alone.communicate(f"{last + 1}\n", timeout=60)
        expected = [float(line) for line in shown.split()]
        for rank in range(self.replicas):
            by_pid: dict[int, list[Line]] = {}
            for line in self.lines(rank):
                by_pid.setdefault(line.pid, []).append(line)
            for lines in by_pid.values():
                steps = [line.step for line in lines]
                assert steps == list(range(steps[0], steps[0] + len(steps)))
                assert all(math.isclose(x.loss, expected[x.step], rel_tol=1e-4) for x in lines)
        assert {self.lines(rank)[-1].step for rank in range(self.replicas)} == {last}


@pytest.fixture
def train(run):
    """Start a job of replicas."""
    trainings: list[Training] = []

    def start(*args, **options) -> Training:
        trainings.append(Training(run, *args, **options))
        return trainings[-1]

    yield start
    for training in trainings:
        training.alone.kill()
        training.alone.communicate()


def test_survivors_keep_their_processes(train) -> None:
    """Killed in the middle of a step, then the lowest rank, then a stopped one."""
    training = train(3, 0.1)
    survivors: dict[int, int] = {}
    for victim, number in ((2, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)):
        training.wait_until_all_train()
        survivors = {rank: training.pid(rank) for rank in range(3) if rank != victim}
        killed = psutil.Process(training.pid(victim))
        killed.send_signal(number)
        step = training.latest()
        training.launch.until(lambda killed=killed: not killed.is_running(), 60)
        training.wait_for_step(step + 2)
        assert {rank: training.pid(rank) for rank in survivors} == survivors
        training.wait_until_all_train(step)
    training.check()
    decided = training.launch.events_of(events.RestartDecided)
    assert [event.body.rung for event in decided] == [Rung.IN_PROCESS] * 3
    assert len(training.launch.events_of(events.RoundOpened)) == 1
    assert len(training.launch.events_of(events.ReplicaJoined)) == 3


def test_lost_nodes_and_a_lost_master(train) -> None:
    """Two nodes at once while the master is away; then a replica while another one heals."""
    training = train(3, 0.1, "--local-nodes=3")
    launch = training.launch
    training.wait_until_all_train()
    survivor = training.pid(0)
    lost = [psutil.Process(training.pid(rank)) for rank in (1, 2)]
    agents = [worker.parent().parent() for worker in lost]
    launch.of_kind("master")[0].kill()
    for agent in agents:
        agent.kill()
    psutil.wait_procs(lost, timeout=30)
    step = training.latest()
    training.wait_for_step(step + 2)
    launch.until(lambda: launch.events_of(events.ReplicaJoined), 120, "a node that returns")
    returned = {e.body.rank for e in launch.events_of(events.ReplicaJoined)}
    launch.until(lambda: training.lines(min(returned))[-1].step > step, 60, "its step")
    psutil.Process(training.pid(min(returned))).kill()
    training.wait_until_all_train(training.latest())
    assert training.pid(0) == survivor
    training.check()
    assert len(launch.events_of(events.RoundOpened)) == 1


def written(directory: Path, rank: int) -> list[list[str]]:
    """Return the whole lines that a rank has written, as words."""
    path = directory / f"rank{rank}.txt"
    return [row.split() for row in path.read_text().split("\n")[:-1]] if path.exists() else []


def end_at(directory: Path, step: int) -> None:
    """Let a program end with a step."""
    (directory / "new").write_text(str(step))
    (directory / "new").rename(directory / "last")


def lose(launch: Launch, pid: str) -> None:
    """Kill the first rank that is lost, and wait until it trains again."""
    psutil.Process(int(pid)).kill()
    launch.until(lambda: launch.events_of(events.ReplicaJoined), 90, "a rank that returns")


def test_a_program_for_ddp_that_knows_nothing_of_losses(run) -> None:
    """The others go on; the lost rank comes to their place in the program, with their weights and learning rate."""
    script = SCRIPT.with_name("unchanged.py")
    env = {
        "TORCH_DIST_INIT_BARRIER": "1"
    }  # torch's barrier has no store in which the ranks could meet
    launch = run("--survive", "--nproc-per-node=3", script, run.directory, env=env)
    rows = functools.partial(written, run.directory)
    launch.until(lambda: all(len(rows(rank)) > 10 for rank in range(3)), 60, "ten steps")
    pids = [rows(rank)[-1][2] for rank in range(3)]
    joined = functools.partial(launch.events_of, events.ReplicaJoined)
    for lost in (0, 2):  # the second loss finds a rank that has returned
        before = len(joined())
        psutil.Process(int(pids[lost])).kill()
        launch.until(lambda n=before: len(joined()) > n, 90, "a rank that returns")
        step = int(rows(1)[-1][0])
        launch.until(lambda r=lost, s=step: int(rows(r)[-1][0]) > s + 5, 60, "its steps")
        pids = [rows(rank)[-1][2] for rank in range(3)] if lost == 0 else pids
    end_at(run.directory, int(rows(1)[-1][0]) + 50)
    launch.succeed(90)
    assert [rows(rank)[-1][2] for rank in (0, 1)] == pids[:2]
    found = [[(row[0], row[1], row[3]) for row in rows(rank)[-20:]] for rank in range(3)]
    assert found[0] == found[1] == found[2]
    steps = [int(row[0]) for row in rows(1)]
    assert steps == list(range(len(steps)))
    assert len(launch.events_of(events.RoundOpened)) == 1


def test_a_rank_returns_to_a_model_that_is_compiled_around_ddp(run) -> None:
    """Its weights are those of a run without a loss: what the launcher adds to a pass is not compiled."""
    rows = functools.partial(written, run.directory)
    script = SCRIPT.with_name("compiled.py")
    launch = run("--survive", "--nproc-per-node=2", script, run.directory)
    launch.until(lambda: all(len(rows(rank)) > 20 for rank in range(2)), 90, "twenty steps")
    pids = [rows(rank)[-1][2] for rank in range(2)]
    lose(launch, pids[1])
    end_at(run.directory, int(rows(0)[-1][0]) + 40)
    launch.succeed(120)
    assert {row[2] for row in rows(0)} == {pids[0]}
    assert [row[:2] for row in rows(0)[-20:]] == [row[:2] for row in rows(1)[-20:]]
    alone = run.directory / "alone"
    alone.mkdir()
    end_at(alone, int(rows(0)[-1][0]))
    run("--nproc-per-node=1", script, alone, name="undisturbed").succeed(120)
    assert written(alone, 0)[-1][:2] == rows(0)[-1][:2]


def test_a_rank_returns_to_a_program_with_two_optimizers_as_the_others_are(run) -> None:
    """It joins where no pass waits for its backward pass, with kept gradients, and with what is beside the models."""
    script = SCRIPT.with_name("two_optimizers.py")
    launch = run("--survive", "--nproc-per-node=3", script, run.directory)
    rows = functools.partial(written, run.directory)
    launch.until(lambda: all(len(rows(rank)) > 20 for rank in range(3)), 60, "twenty steps")
    pids = [rows(rank)[-1][2] for rank in range(3)]
    lose(launch, pids[0])
    end_at(run.directory, int(rows(1)[-1][0]) + 40)
    launch.succeed(90)
    assert [rows(rank)[-1][2] for rank in (1, 2)] == pids[1:]
    found = [[(row[:2], row[3:]) for row in rows(rank)[-20:]] for rank in range(3)]
    assert found[0] == found[1] == found[2]
    expected = [1000.0 - (int(row[0]) + 1) // 16 for row in rows(1)]
    assert [float(row[3]) for row in rows(1)] == expected
    assert len(launch.events_of(events.RoundOpened)) == 1


def test_a_lost_rank_goes_on_from_the_newest_checkpoint_in_memory(run) -> None:
    """After its return, all save again, and the next one that is lost begins with what they have saved."""
    script = SCRIPT.with_name("unchanged_checkpoints.py")
    rows = functools.partial(written, run.directory)

    def begins(rank: int) -> list[int]:
        return [int(row[1]) for row in rows(rank) if row[0] == "begin"]

    def reached() -> int:
        return max(_count(rows(rank)[-1]) for rank in (0, 1))

    def end(launch: Launch) -> None:
        end_at(run.directory, reached() + 30)
        launch.succeed(90)
        assert rows(0)[-10:] == [[*row[:2], rows(0)[-1][2]] for row in rows(1)[-10:]]
        assert len(launch.events_of(events.RoundOpened)) == 1
        (run.directory / "last").unlink()

    first = run("--survive", "--nproc-per-node=2", script, run.directory)
    for joined, victim in enumerate((0, 1), 1):
        here = reached() if joined > 1 else 0
        first.until(
            lambda h=here: all(rows(r) and _count(rows(r)[-1]) > h + 20 for r in (0, 1)),
            60,
            "steps",
        )
        pid = rows(victim)[-1][2]
        psutil.Process(int(pid)).kill()
        first.until(
            lambda j=joined: len(first.events_of(events.ReplicaJoined)) == j, 90, "its return"
        )
        last = max(_count(row) for row in rows(victim) if row[2] == pid)
        assert last - 5 <= begins(victim)[-1] <= last + 1
    end(first)
    again = run("--survive", "--nproc-per-node=2", script, run.directory)  # from storage
    again.until(lambda: len(begins(0)) == 3 and _count(rows(0)[-1]), 60, "steps of the second job")
    psutil.Process(int(rows(1)[-1][2])).kill()
    again.until(lambda: again.events_of(events.ReplicaJoined), 90, "its return")
    assert begins(1)[-1] >= begins(0)[-1] >= 50
    end(again)


def test_a_rank_that_is_lost_before_its_part_of_a_save_ends_no_other(run) -> None:
    """The others wait for the save, and learn from the saver that it is not whole before they know of the loss."""
    late, other, lost = (run.directory / name for name in ("late", "rank0.txt", "rank1.txt"))
    late.touch()
    script = SCRIPT.with_name("unchanged_checkpoints.py")
    launch = run("--survive", "--nproc-per-node=2", script, run.directory)
    launch.until(lambda: not late.exists(), 60, "the step before the save")
    psutil.Process(int(lost.read_text().split()[-1])).kill()
    launch.until(lambda: launch.events_of(events.ReplicaJoined), 90, "its return")
    end_at(run.directory, int(other.read_text().split("\n")[-2].split()[0]) + 60)
    launch.succeed(90)
    assert len(launch.events_of(events.RoundOpened)) == 1


def _count(row: list[str]) -> int:
    return 0 if row[0] == "begin" else int(row[0])


def test_a_program_that_fails_on_its_way_to_the_others_ends_no_job(run) -> None:
    """It may be due to the replay, in which a rank has no model: all start again, and the program's mistakes still count."""
    launch = run("--survive", "--nproc-per-node=2", SCRIPT.with_name("reads_gradients.py"), run.directory)  # fmt: skip
    rows = functools.partial(written, run.directory)
    launch.until(lambda: all(len(rows(rank)) > 5 for rank in (0, 1)), 60, "five steps")
    pids = {rank: rows(rank)[-1][1] for rank in (0, 1)}
    psutil.Process(int(pids[1])).kill()
    opened = functools.partial(launch.events_of, events.RoundOpened)
    launch.until(lambda: len(opened()) == 2, 60, "another round")
    assert "failed while this rank replayed it" in opened()[-1].body.reason
    launch.until(lambda: rows(0)[-1][1] != pids[0], 60, "its first step")
    end_at(run.directory, int(rows(0)[-1][0]) + 50)
    launch.succeed(60)


def test_a_training_function_is_called_again_in_its_living_process(run) -> None:
    script = SCRIPT.with_name("restartable.py")
    launch = run("--survive", "--nproc-per-node=2", script, run.directory)
    rows = functools.partial(written, run.directory)
    launch.until(lambda: all(len(rows(rank)) > 5 for rank in range(2)), 60, "five steps")
    (_, first, _), (_, second, _) = rows(0)[-1], rows(1)[-1]
    psutil.Process(int(first)).kill()
    launch.until(lambda: rows(1)[-1][2] == "2" and rows(0)[-1][1] != first, 90, "another call")
    end_at(run.directory, int(rows(1)[-1][0]) + 20)
    launch.succeed(60)
    assert rows(1)[-1][1:] == [second, "2"]
    assert rows(0)[-1][2] == "1"
    assert len(launch.events_of(events.RoundOpened)) == 1


def test_a_program_for_hsdp_that_knows_nothing_of_losses(run) -> None:
    """A row is lost with one of its ranks and returns as a whole; the other row keeps its processes."""
    launch = run("--survive", "--nproc-per-node=4", SCRIPT.with_name("hsdp.py"), run.directory)
    rows = functools.partial(written, run.directory)

    def pids() -> list[str]:
        return [rows(rank)[-1][2] for rank in range(4)]

    launch.until(lambda: all(len(rows(rank)) > 10 for rank in range(4)), 90, "ten steps")
    before = pids()
    psutil.Process(int(before[3])).kill()
    launch.until(lambda: len(launch.events_of(events.ReplicaJoined)) == 2, 90)
    step = int(rows(0)[-1][0])
    launch.until(lambda: all(int(rows(r)[-1][0]) > step + 5 for r in range(4)), 60)
    after = pids()
    assert after[:2] == before[:2]
    assert not set(after[2:]) & set(before)
    end_at(run.directory, int(rows(0)[-1][0]) + 5)
    launch.succeed(90)
    found = [[(row[0], row[1], *row[3:]) for row in rows(rank)[-5:]] for rank in range(4)]
    assert found[0] == found[1] == found[2] == found[3]
    assert len(launch.events_of(events.RoundOpened)) == 1
    given = "".join(f"{row[0]} {row[1]} {row[4]}\n" for row in rows(0))
    alone = [sys.executable, SCRIPT.with_name("hsdp_alone.py")]
    by_step = subprocess.run(
        alone, input=given, text=True, check=True, stdout=subprocess.PIPE
    ).stdout.split()
    assert len(by_step) == len(rows(0))
    assert [rows for rows, _ in itertools.groupby(by_step)] == ["01", "0", "01"]
