"""Foreground of ``dlrover-run``: starts the master and the agent, keeps them alive, cleans up.

It makes no decisions about the job. When it dies, everything that it started dies too: each process
holds the other end of its lifeline.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlrover._util import procs, start, tasks
from dlrover.agent import savers
from dlrover.cli.run import progress
from dlrover.errors import ConfigurationError, ExitCode, InfrastructureError
from dlrover.master.files import read_outcome
from dlrover.rpc.client import MasterClient, connect
from dlrover.spec.jobdir import JobDir
from dlrover.spec.outcome import Outcome

if TYPE_CHECKING:
    from dlrover.roles.client import RolesClient

logger = logging.getLogger(__name__)

RESTART_LIMIT = 10
"""Restarts of one child within `RESTART_WINDOW` after which the supervisor gives up."""
RESTART_WINDOW = 60.0
"""Seconds."""
REAP_INTERVAL = 1.0
"""Seconds between two checks for orphans to reap."""
END_WAIT = 60.0
"""Seconds beyond its shutdown time-out, and the time to store what is in memory, after which a stopped job is killed."""

STOP_RETRY = 0.1
"""Seconds between attempts to ask the master to stop the job."""
KILL_WAIT = 10.0
"""Seconds to wait for processes after SIGKILL."""
CLEANUP_WAIT = 5.0
"""Seconds that processes which clean up after a program have to end; PyTorch's takes 2 s."""
LEAVE_WAIT = 10.0
"""Seconds that an agent has to exit after its master has exited."""
RELAY_WAIT = 5.0
"""Seconds that a terminal has to take the last output."""


class Child:
    """Process that is restarted when it dies, until it leaves its outcome in a file."""

    def __init__(
        self, name: str, command: Sequence[str], outcome: Path, env: Mapping[str, str], fd: int
    ) -> None:
        self.name = name
        self._command = [*command, "--lifeline-fd", str(fd)]
        self._outcome = outcome
        self._env = dict(env)
        self._fd = fd
        self.stdout: int | None = None
        """File descriptor of the process's output, as `stderr`; None: inherited from this process."""
        self.stderr: int | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.last_resort: Outcome | None = None
        """Once set, the process is not restarted; this is its outcome if it leaves none."""
        self._starts: list[float] = []

    async def run(self) -> Outcome:
        """Keep the process alive until it leaves its outcome; return the outcome.

        Raises:
            InfrastructureError: the process dies again and again.
        """
        while True:
            self._check_restarts()
            process = self._start()
            await procs.ended(process.pid)
            code = process.wait()
            outcome = read_outcome(self._outcome)
            if outcome is not None:
                return outcome
            if self.last_resort is not None:
                return self.last_resort
            logger.warning("The %s ended with exit code %d and is started again", self.name, code)

    def _start(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(
            self._command,
            env=self._env,
            pass_fds=(self._fd,),
            start_new_session=True,
            stdout=self.stdout,
            stderr=self.stderr,
        )
        return self.process

    def _check_restarts(self) -> None:
        now = time.monotonic()
        self._starts = [t for t in self._starts if now - t < RESTART_WINDOW]
        if len(self._starts) >= RESTART_LIMIT:
            raise InfrastructureError(
                f"The {self.name} ended {RESTART_LIMIT} times within {RESTART_WINDOW:g} s; "
                f"see its log in {self._outcome.parent}."
            )
        self._starts.append(now)

    def signal(self, number: int) -> None:
        """Send a signal to the process if it runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


class Supervisor:
    """Processes of one ``dlrover-run``. Use it on one event loop, once.

    If it has a lifeline itself, it leaves its notices to the process at the other end. ``connect`` returns a client
    of the master, or of what is in its place.
    """

    def __init__(
        self,
        job_dir: JobDir,
        env: Mapping[str, str],
        lifeline_fd: int = -1,
        connect: Callable[[JobDir], MasterClient | RolesClient] = connect,
    ) -> None:
        self._connect = connect
        self._job_dir = job_dir
        self._env = env
        self._lifeline_fd = lifeline_fd
        self._shows = lifeline_fd < 0
        self._lifeline = procs.Lifeline()
        self.master: Child | None = None
        self.agent: Child | None = None
        self._dashboard: list[str] = []
        self._showing: subprocess.Popen[bytes] | None = None
        self.stopped_by: signal.Signals | None = None
        self._relay: Relay | None = None
        self._screen: progress.Screen | None = None
        self._viewer: progress.Viewer | None = None
        procs.become_subreaper()

    def add_master(self) -> None:
        """Run the job's master here."""
        self.master = self._child("master", start.MASTER, self._job_dir.outcome, [])

    def add_link_to_ray(self) -> None:
        """Run the process that stands for the master, which runs in a Ray cluster."""
        name = "link to the Ray cluster"
        self.master = self._child(name, "dlrover.ray", self._job_dir.outcome, [])

    def add_dashboard(self, port: int) -> None:
        """Show the job in a browser at a port of this machine; the job does not depend on it."""
        command = [*start.command("dlrover.cli.main"), "dashboard", "--port", str(port)]
        command += ["--job-dir", str(self._job_dir.path), "--lifeline-fd"]
        self._dashboard = [*command, str(self._lifeline.read_fd)]

    def add_coordinator(self) -> None:
        """Run the coordinator of a job of several roles in place of a master; it shows its progress itself."""
        self.master = self._child("coordinator", "dlrover.roles", self._job_dir.outcome, [])
        self._shows = False

    def add_agent(self, node_rank: int, node_id: int = -1) -> None:
        """Run one node here, of a job whose master is here or elsewhere.

        A node that a platform started (``node_id``) ends with its agent: the master replaces the whole node.
        """
        arguments = ["--node-rank", str(node_rank), "--node-id", str(node_id)]
        arguments += ["--outcome", str(self._job_dir.left)]
        self.agent = self._child("agent", start.AGENT, self._job_dir.left, arguments)
        if node_id >= 0:
            reason = f"The agent of node {node_id} died."
            self.agent.last_resort = Outcome(exit_code=ExitCode.INFRASTRUCTURE, reason=reason)

    def _child(self, name: str, module: str, outcome: Path, arguments: Sequence[str]) -> Child:
        command = [*start.command(module), "--job-dir", str(self._job_dir.path), *arguments]
        return Child(name, command, outcome, self._env, self._lifeline.read_fd)

    async def run(
        self, signals: Sequence[signal.Signals], patience: float, storing: float = 0.0
    ) -> Outcome:
        """Run this machine's part of the job to the job's end.

        A signal asks the job to stop: the workers have ``patience`` seconds to end, and their checkpoint savers
        ``storing`` seconds after them. `END_WAIT` seconds later, or at a second signal, everything is killed.

        Raises:
            InfrastructureError: a child cannot be kept alive.
        """
        loop = asyncio.get_running_loop()
        interrupted = asyncio.Event()
        impatient = asyncio.Event()

        def on_signal(number: signal.Signals) -> None:
            if self._lifeline_fd < 0 and not impatient.is_set():
                second = f"{number.name}: everything is killed now."
                first = stopping_line(number, self.master is not None, patience, storing)
                progress.say(second if interrupted.is_set() else first, self._screen)
            (impatient if interrupted.is_set() else interrupted).set()
            self.stopped_by = self.stopped_by or number

        def alone() -> None:
            interrupted.set()
            impatient.set()

        for number in itertools.filterfalse(procs.survives_hangup, signals):
            loop.add_signal_handler(number, on_signal, number)
        if self._lifeline_fd >= 0:
            procs.Lifeline.watch(self._lifeline_fd, alone)
        showing = self._show()
        self._start_dashboard()
        reaping = asyncio.create_task(self._reap())
        work = asyncio.create_task(self._children())
        stopping = asyncio.create_task(
            self._stop_when(interrupted, impatient, patience + storing, work.cancel)
        )
        try:
            return await work
        except asyncio.CancelledError:
            return self._killed()
        finally:
            for task in (reaping, stopping, showing):
                task.cancel()
            self._end()
            if self._viewer is not None and self.master is not None:
                # A short job can end before its master is reached.
                self._viewer.catch_up(self._job_dir)
            if self._relay is not None:
                self._relay.close()

    def _show(self) -> asyncio.Task[None]:
        """Start to show progress; on a terminal, below the job's output, which then passes through here."""
        if not self._shows:
            return asyncio.create_task(asyncio.sleep(0))
        if sys.stderr.isatty():
            width = functools.partial(progress.columns, sys.stderr.fileno())
            self._screen = progress.Screen(sys.stderr.buffer, width=width)
            self._relay = Relay(self._screen)
            for child in (self.master, self.agent):
                if child is not None:
                    child.stderr = self._relay.write_fd
                    child.stdout = self._relay.write_fd if sys.stdout.isatty() else None
        if self.master is None and self._screen is None:
            return asyncio.create_task(asyncio.sleep(0))  # the machine with the master shows it
        self._viewer = progress.Viewer(self._screen)
        return asyncio.create_task(self._viewer.follow(self._job_dir))

    def _start_dashboard(self) -> None:
        if self._dashboard:
            out = self._relay.write_fd if self._relay is not None else sys.stderr.fileno()
            self._showing = subprocess.Popen(
                self._dashboard,
                env=self._env,
                pass_fds=(self._lifeline.read_fd,),
                start_new_session=True,
                stdout=out,
                stderr=out,
            )

    async def _children(self) -> Outcome:
        """Return the agent's outcome; the master's without an agent, or if it does not exit in time."""
        if self.agent is None:
            assert self.master is not None
            return await self.master.run()
        agent = asyncio.ensure_future(self.agent.run())
        if self.master is None:
            return await agent
        master = asyncio.ensure_future(self.master.run())
        await asyncio.wait({agent, master}, return_when=asyncio.FIRST_COMPLETED)
        if not agent.done():
            # The master dismissed its nodes before it exited, unless it never served one.
            await asyncio.wait({agent}, timeout=LEAVE_WAIT if self._job_dir.master.exists() else 0)
        if not agent.done():
            agent.cancel()
            return await master
        await master
        return await agent

    async def _stop_when(
        self,
        interrupted: asyncio.Event,
        impatient: asyncio.Event,
        patience: float,
        kill: Callable[[], object],
    ) -> None:
        await interrupted.wait()
        stopping = asyncio.create_task(self._stop())
        await tasks.signalled(impatient, patience + END_WAIT)
        stopping.cancel()
        kill()

    async def _stop(self) -> None:
        """Pass the signal on: to the job's master if it is here, else to this machine's node."""
        number = self.stopped_by or signal.SIGTERM
        reason = f"The job was stopped by {number.name}."
        if self.master is None:
            assert self.agent is not None
            self.agent.last_resort = Outcome(exit_code=ExitCode.SIGNAL_BASE + number, reason=reason)
            self.agent.signal(number)
            return
        code = ExitCode.SIGNAL_BASE + number
        while not await self._ask_to_stop(reason, code):  # noqa: ASYNC110 - another process
            await asyncio.sleep(STOP_RETRY)

    async def _ask_to_stop(self, reason: str, exit_code: int) -> bool:
        """Return True if the master got the request; it may have just been started."""
        try:
            async with self._connect(self._job_dir) as client:
                await client.stop(reason, exit_code)
        except (InfrastructureError, ConfigurationError):
            return False
        return True

    def _killed(self) -> Outcome:
        number = self.stopped_by or signal.SIGTERM
        known = None if self._viewer is None else self._viewer.status
        return Outcome(
            exit_code=ExitCode.SIGNAL_BASE + number,
            reason=f"The job was killed after {number.name}.",
            steps=0 if known is None else known.total_steps,
            restarts=0 if known is None else known.restarts,
            seconds=0.0 if known is None else known.seconds,
            job_dir=str(self._job_dir.path),
        )

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_INTERVAL)
            procs.reap_orphans(self._own_pids())

    def _own_pids(self) -> set[int]:
        children = [c.process for c in (self.master, self.agent) if c is not None]
        children.append(self._showing)
        return {p.pid for p in children if p is not None}

    def _end(self) -> None:
        """Kill the children and everything orphaned meanwhile."""
        for child in (self.master, self.agent):
            if child is not None:
                child.signal(signal.SIGKILL)
                if child.process is not None:
                    child.process.wait()
        if self._showing is not None:
            self._showing.kill()
            self._showing.wait()
        procs.end_in_order(procs.running(start.SAVER), savers.WAIT)  # savers of a killed agent
        for pid in procs.end_orphans((), KILL_WAIT):
            logger.error("Process %d hangs in the kernel and could not be ended", pid)
        procs.kill(procs.wait_for_cleaners(CLEANUP_WAIT))


def stopping_line(number: signal.Signals, whole: bool, patience: float, storing: float) -> str:
    """Return what a first signal does, its time limit, and what a second signal does."""
    what = "the job is being stopped" if whole else "this node leaves the job"
    again = "press Ctrl-C again" if number is signal.SIGINT else f"send {number.name} again"
    return (
        f"{number.name}: {what}. Its workers have {patience:g} s to end (--shutdown-timeout), and "
        f"any checkpoint that is in memory only is stored; after {patience + storing + END_WAIT:g} s everything is killed. "
        f"To kill it now, {again}."
    )


class Relay:
    """Thread that passes the children's output on to the screen: a terminal may block."""

    def __init__(self, screen: progress.Screen) -> None:
        self._screen = screen
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show the remaining output and remove the status line. All writers must have ended."""
        os.close(self.write_fd)
        self._thread.join(RELAY_WAIT)
        self._screen.close()

    def _run(self) -> None:
        while data := os.read(self._read_fd, 1 << 16):
            self._screen.write(data)
