"""The actor of a node: runs the node's agent as a process of its own, and ends with it."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import ray

from dlrover import config
from dlrover._util import files, procs, start
from dlrover.ray import cluster, places
from dlrover.ray.machine import job as jobs
from dlrover.spec.jobdir import JobDir, MasterAddress

logger = logging.getLogger(__name__)

RETRY_DELAY = 0.2
"""Seconds between attempts to reach a master that is being restarted."""
DISK_DELAY = 5.0
"""Seconds between attempts to write down where the master is, on a disk that is full."""
MOST_OUTPUT = 4 << 20
"""Bytes of output kept while the master does not take them; older ones are dropped."""
READ = 1 << 16
END_WAIT = 60.0
"""Seconds beyond its workers' and savers' time limits in which an agent ends before it is killed."""
DRAIN_WAIT = 2.0
"""Seconds for the last output of an agent that has ended: its orphans may hold the pipes."""


class Output:
    """Output of an agent and its workers, kept until the master takes it. Readers never wait for the master."""

    def __init__(self) -> None:
        self._chunks: collections.deque[tuple[int, bytes]] = collections.deque()
        self._size = 0
        self._dropped = 0
        self._changed = threading.Condition()
        self._open = 0

    def read(self, fd: int, stream: int) -> None:
        """Start to read a pipe whose content belongs to ``stream``: 1 output, 2 errors."""
        self._open += 1
        threading.Thread(target=self._read, args=(fd, stream), daemon=True).start()

    def _read(self, fd: int, stream: int) -> None:
        with open(fd, "rb", buffering=0) as pipe:
            while data := pipe.read(READ):
                with self._changed:
                    self._add(stream, data)
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def _add(self, stream: int, data: bytes) -> None:
        self._chunks.append((stream, data))
        self._size += len(data)
        while self._size > MOST_OUTPUT:
            lost = len(self._chunks.popleft()[1])
            self._size -= lost
            self._dropped += lost
        self._changed.notify_all()

    def take(self) -> list[tuple[int, bytes]]:
        """Wait for output and return all of it; empty at the end of all pipes."""
        with self._changed:
            while not self._chunks and self._open:
                self._changed.wait()
            taken = list(self._chunks)
            if self._dropped:
                note = f"dlrover: {self._dropped} bytes of output are left out here.\n"
                taken.insert(0, (2, note.encode()))
            self._chunks.clear()
            self._size = self._dropped = 0
            return taken


@ray.remote
class NodeActor:
    """One node of a job. Its agent starts with it; it ends with the job's master."""

    def __init__(self, data: bytes, node_id: int, node_rank: int) -> None:
        self._job = jobs.decode(data)
        self._role = self._job.role(node_rank)
        self._dir = self._prepare(node_rank)
        self._lifeline = procs.Lifeline()
        self._ended = threading.Event()
        self._reason = ""
        self._output = Output()
        self._sent = threading.Event()
        procs.become_subreaper()
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._follow, args=(node_id, node_rank), daemon=True).start()

    # ---- called by the master

    def host(self) -> str:
        """Return once the node runs: the name of its host."""
        return self._host()

    def wait(self) -> str:
        """Return, once the agent has ended and its output is sent, how it ended."""
        self._ended.wait()
        return self._reason

    def finish(self) -> None:
        """Wait until the agent has ended; end it if it does not by itself."""
        if not self._ended.wait(self._patience):
            self._end()

    # ---- the agent

    @property
    def _patience(self) -> float:
        """Seconds in which an agent ends that is asked to."""
        agent = self._role.agent
        return agent.launch.shutdown_timeout + agent.limits.release_grace + END_WAIT

    def _prepare(self, node_rank: int) -> JobDir:
        """Make the role's directory on this machine; all its nodes here share it, as a replacement finds its saver by it."""
        token = {JobDir(Path()).token.name: self._job.token.encode()}
        return places.make(self._job.nodes_place(node_rank), token)

    def _host(self) -> str:
        return jobs.host_name(socket.gethostname(), ray.get_runtime_context().get_node_id())

    def _start(self, node_id: int, node_rank: int) -> None:
        """Start the agent; the master's address is known by now."""
        files.write_atomically(self._dir.agent, msgspec.json.encode(self._role.agent))
        command = [*start.command(start.AGENT), "--job-dir", str(self._dir.path)]
        command += ["--node-id", str(node_id), "--node-rank", str(node_rank)]
        command += ["--lifeline-fd", str(self._lifeline.read_fd)]
        shown = subprocess.PIPE if self._job.foreground else None
        wanted = "" if self._job.working_dir else self._job.directory
        process = subprocess.Popen(
            command,
            env=config.environ() | self._role.env | {"DLROVER_NODE_NAME": self._host()},
            pass_fds=(self._lifeline.read_fd,),
            stdin=subprocess.DEVNULL,
            stdout=shown,
            stderr=shown,
            cwd=wanted if wanted and os.path.isdir(wanted) else None,
            start_new_session=True,
        )
        if process.stdout is not None and process.stderr is not None:
            self._output.read(process.stdout.fileno(), 1)
            self._output.read(process.stderr.fileno(), 2)
            threading.Thread(target=self._send, daemon=True).start()
        else:
            self._sent.set()
        self._process = process
        threading.Thread(target=self._wait, args=(process,), daemon=True).start()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        reason = procs.exit_reason(-code if code < 0 else code << 8)
        # The saver stays: the node's replacement on this machine finds the memory checkpoints there.
        procs.end_orphans(procs.running(start.SAVER), DRAIN_WAIT)
        self._sent.wait(DRAIN_WAIT)
        self._reason = f"its agent ended: {reason}"
        self._ended.set()

    def _end(self) -> None:
        """End the agent in an orderly way, then by force."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        if not self._ended.wait(self._patience):
            self._process.kill()
            self._ended.wait()

    # ---- the master

    def _follow(self, node_id: int, node_rank: int) -> None:
        """Start the agent and tell it where the master is; end it once there is no master any more."""
        address = ""
        while True:
            try:
                master = cluster.actor(jobs.master_name(self._job.name))
                if master is None:
                    break
                moved = ray.get(master.moved.remote(address))
                known = msgspec.json.encode(MasterAddress(moved, 0))
                files.write_atomically(self._dir.master, known)
                address = moved
                if self._process is None and not self._ended.is_set():
                    self._start(node_id, node_rank)
            except ray.exceptions.RayError as error:
                logger.info("The master cannot be reached: %s", error)
                time.sleep(RETRY_DELAY)  # noqa: TID251 - a thread of its own
            except OSError as error:  # a full disk, no more processes: the thread must outlast it
                logger.warning("The node cannot follow its master: %s", error)
                if self._process is None:
                    self._reason = f"its agent could not be started: {error}"
                    self._ended.set()
                time.sleep(DISK_DELAY)  # noqa: TID251 - a thread of its own
        logger.warning("The job's master is gone; so is this node")
        self._end()
        try:
            cluster.remove_groups(ray.get_runtime_context().get_actor_name())
        finally:  # whatever Ray says: a node does not outlive its job
            os._exit(0)

    def _send(self) -> None:
        name = jobs.master_name(self._job.name)
        while taken := self._output.take():
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.get(ray.get_actor(name, jobs.NAMESPACE).show.remote(taken))
        self._sent.set()
