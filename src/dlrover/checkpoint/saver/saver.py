"""The saver: the process of a node that holds its ranks' memory checkpoints and persists them.

The first worker starts it (``python -m dlrover.checkpoint.saver.saver``). It belongs to no worker's process group
and outlives all workers. It exits when no worker has been connected for the linger time and all requested
steps are durable or failed. One thread serves each worker, one computes checksums, one persists.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from dlrover import config
from dlrover._util import procs, sockets, start
from dlrover.checkpoint.machine import policies
from dlrover.checkpoint.machine.policies import Policy
from dlrover.checkpoint.saver import protocol
from dlrover.checkpoint.saver.breakpoint import Breakpoints, remove_votes
from dlrover.checkpoint.saver.protocol import SaverGoneError
from dlrover.checkpoint.saver.ranks import NoMemoryError
from dlrover.checkpoint.saver.replicas import ReplicaExchange
from dlrover.checkpoint.saver.state import SaverState
from dlrover.checkpoint.saver.tasks import Task
from dlrover.checkpoint.storage import first_save, lease, persist, storage
from dlrover.checkpoint.storage.lease import Lease
from dlrover.checkpoint.storage.persist import PEER_PATIENCE
from dlrover.checkpoint.storage.stores import Store, location_of, open_store, reason
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError, ProtocolError

logger = logging.getLogger(__name__)

STARVING_PATIENCE = 30.0
"""Seconds to wait for other nodes' parts of a step if a save needs its memory."""
BREAKPOINT_PATIENCE = 120.0
"""Seconds to wait for other nodes' parts of a step that the savers agreed to persist at the world's end."""

BACKLOG = 1 << 10
"""Maximum number of worker connections that wait to be accepted."""


class Saver:
    """Server for the workers that connect to ``listener``."""

    def __init__(
        self, store: Store, identity: str, keep: Policy, linger: float, listener: socket.socket
    ) -> None:
        self._store = store
        self._identity = identity
        self._keep = keep
        self._linger = linger
        self._listener = listener
        self._state = SaverState()
        self._replicas = ReplicaExchange(self._state.exchange)
        self._lease = Lease(store, lease.job_of(config.environ()))

    def serve(self) -> None:
        """Run until no worker needs this process any more."""
        breakpoints = Breakpoints(self._store, self._state.breaks, self._state.saver)
        targets = (
            self._accept, self._compute_sums, self._persist, self._record, self._beat, breakpoints.run,
        )  # fmt: skip
        for target in targets:
            threading.Thread(target=target, daemon=True, name=target.__name__).start()
        self._state.wait_until_idle(self._linger)
        self._lease.release()
        logger.info("The saver leaves")

    def stop(self) -> None:
        """Exit once all requested steps are durable or failed."""
        self._state.stop()

    # ---- workers

    def _accept(self) -> None:
        sockets.serve_each(self._listener, self._attend, "worker")

    def _attend(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionError, SaverGoneError):
            try:
                pid = protocol.check_peer(sock)
                client = WorkerConnection(self._state, self._replicas, self._lease, sock, pid)
                with self._state.connection():
                    client.attend()
            except ProtocolError as error:
                logger.warning("A connection is closed: %s", error)

    # ---- work

    def _compute_sums(self) -> None:
        while True:
            self._state.sums.compute_next()

    def _record(self) -> None:
        said = False
        while True:
            first, saves = self._state.next_first_saves()
            recorded, problem = False, ""
            try:
                storage.check_identity(self._store, self._identity)
                recorded = first_save.record(
                    self._store, self._identity, self._lease.job, first.joined, saves
                )
            except Exception as error:  # noqa: BLE001 - else the thread ends, and the saver never exits
                problem = (
                    f"It is not recorded in {self._store.location} that steps were saved to memory:"
                    f" {reason(error)}."
                )
            self._state.note_first_saves(first, len(saves), recorded=recorded, problem=problem)
            if problem:
                logger.log(logging.INFO if said else logging.WARNING, "%s", problem)
                said = True
                threading.Event().wait(first_save.RETRY)

    def _beat(self) -> None:
        while True:
            try:
                self._lease.beat()
            except (OSError, DLRoverError) as error:
                logger.warning("The lease of %s cannot be renewed: %s", self._store.location, error)
            threading.Event().wait(lease.BEAT)

    def _persist(self) -> None:
        self._state.wait_for_world()
        while True:
            task = self._state.tasks.next()
            problem = self._store_task(task)
            if problem:
                logger.error("%s", problem)
                self._give_up(task)
                if task.world_size > len(task.ranks):  # another node may have met a full disk
                    self._free_space(task)
            self._state.tasks.finish(task, problem)

    def _store_task(self, task: Task) -> str:
        """Persist a task; return the problem in one sentence, or an empty text."""
        try:
            return persist.retry(
                task.step,
                self._store.location,
                lambda: self._persist_task(task),
                lambda delay: self._state.tasks.pause(task, delay, yielding=True),
                lambda: self._free_space(task),
            )
        except DLRoverError as error:
            return str(error)
        except Exception as error:
            # This thread must not end, whatever the error: all workers would wait forever.
            logger.exception("Step %d was not stored", task.step)
            return f"Step {task.step} was not stored: {error!r}."

    def _persist_task(self, task: Task) -> None:
        began = time.monotonic()
        guard = functools.partial(self._guard, task)
        job = persist.PersistJob(
            store=self._store,
            save=task.save,
            world_size=task.world_size,
            sources=self._state.tasks.sources(task),
            pause=lambda seconds: self._wait_for_peers(task, seconds, began),
            patience=PEER_PATIENCE if task.mark == storage.GIVEN_UP else BREAKPOINT_PATIENCE,
            guard=guard,
            metrics=task.metrics,
            mark=task.mark,
        )
        persist.persist(job)
        if 0 in job.sources:
            try:
                storage.prune(self._store, self._keep, guard)
                if self._state.only(task.session):
                    guard()
                    storage.remove_unfinished(self._store, task.session)
                    remove_votes(self._store, task.session)
            except (OSError, InfrastructureError) as error:
                logger.warning("Old checkpoints in %s stay: %s", self._store.location, error)
        logger.info("Step %d is stored", task.step)

    def _guard(self, task: Task) -> None:
        """Raise if a task must not publish or delete anything in the directory."""
        storage.check_identity(self._store, self._identity)
        if 0 in task.ranks:
            self._lease.check(task.session, lambda seconds: self._pause(task, seconds))

    def _pause(self, task: Task, seconds: float) -> None:
        self._state.tasks.pause(task, seconds, yielding=False)

    def _free_space(self, task: Task) -> None:
        """Delete what savers that died have left: steps that are not kept, and unfinished ones.

        Only unfinished steps of other worlds are deleted that have not changed for `PEER_PATIENCE`.
        """
        if 0 in task.ranks:
            guard = functools.partial(self._guard, task)
            try:
                guard()
                storage.remove_unfinished(self._store, task.session, idle=PEER_PATIENCE)
                storage.prune(self._store, self._keep, guard)
            except (OSError, InfrastructureError) as error:
                logger.warning("What others left in %s stays: %s", self._store.location, error)

    def _give_up(self, task: Task) -> None:
        """Mark a task as given up, so that other nodes stop waiting for it."""
        try:
            storage.give_up(self._store, self._identity, task.save, task.mark)
        except Exception as error:  # noqa: BLE001 - else the thread ends, and all workers wait forever
            logger.warning("Other nodes may wait for step %d in vain: %s", task.step, error)

    def _wait_for_peers(self, task: Task, seconds: float, began: float) -> None:
        """Wait for other nodes; after `STARVING_PATIENCE` give up if a rank of this node needs the memory."""
        late = time.monotonic() - began > STARVING_PATIENCE
        if self._state.tasks.pause(task, seconds, yielding=late):
            raise InfrastructureError(
                f"Step {task.step} was not stored: other nodes did not store their parts within"
                f" {STARVING_PATIENCE:g} s, and its memory is needed."
            )


_WITHOUT_RANK = protocol.Reserve | protocol.SaveNow | protocol.StoreAtEnd | protocol.StoredAtEnd
"""Requests on connections that are attached to no rank."""


class WorkerConnection:
    """Connection of one worker."""

    def __init__(
        self,
        state: SaverState,
        replicas: ReplicaExchange,
        lease: Lease,
        sock: socket.socket,
        pid: int,
    ) -> None:
        self._state = state
        self._replicas = replicas
        self._lease = lease
        self._session = 0
        self._sock = sock
        self._pid = pid
        self._rank = -1
        self._owner = 0
        self._goodbye = False

    def attend(self) -> None:
        """Answer requests until the worker is gone."""
        try:
            while not self._goodbye:
                request = protocol.receive_request(self._sock)
                if request is None:
                    return
                self._answer(request)
        finally:
            if self._rank >= 0:
                self._state.detach(self._rank, self._owner, goodbye=self._goodbye)
                self._lease.leave(self._session)

    def _answer(self, request: protocol.Request) -> None:
        fds: list[int] = []
        reply: protocol.Reply
        try:
            known = self._rank >= 0 or isinstance(request, _WITHOUT_RANK)
            if isinstance(request, protocol.Attach) == known:
                raise ProtocolError("A worker attaches once, before it asks for anything.")
            match request:
                case protocol.Attach():
                    reply, self._owner, fds = self._state.attach(
                        request.rank, self._pid, request.job
                    )
                    self._rank = request.rank
                case protocol.Open():
                    reply, fds = self._state.open(request.rank)
                case _:
                    reply = self._reply(request)
        except (DLRoverError, OSError) as error:
            reply = protocol.Refused(str(error), isinstance(error, ConfigurationError))
        protocol.send(self._sock, reply, fds)

    def _reply(self, request: protocol.Request) -> protocol.Reply:  # noqa: PLR0911 - one per request
        state, rank = self._state, self._rank
        match request:
            case protocol.Look():
                return protocol.ValidGenerations(state.look(), state.unrecorded)
            case protocol.Begin():
                slot = state.begin(rank, request.save, request.ready)
                return protocol.Granted(slot, state.news(rank))
            case protocol.Verify():
                return protocol.Verified(state.verify(request.rank, request.slot))
            case protocol.Wait():
                return protocol.Settled(state.settled(rank))
            case protocol.Stored():
                return protocol.NewestStored(state.stored(rank))
            case protocol.Reserve():
                return self._reserve(request)
            case protocol.SaveNow():
                return state.save_now(request.request)
            case protocol.StoredAtEnd():
                return state.stored_at_end()
            case protocol.Listen():
                pem = self._replicas.certify(tls=request.tls)
                return protocol.Listening(self._replicas.listen(request.host, request.port), pem)
            case _:
                self._do(request)
                return protocol.CarriedOut()

    def _reserve(self, request: protocol.Reserve) -> protocol.Reserved:
        try:
            return protocol.Reserved(
                self._state.reserve(request.rank, request.slot, request.nbytes)
            )
        except NoMemoryError as error:
            return protocol.Reserved(1, str(error))

    def _do(self, request: protocol.Request) -> None:
        match request:
            case protocol.Commit():
                self._state.commit(self._rank, request)
            case protocol.JoinSaver():
                self._state.join(self._rank, request)
                self._replicas.join(request)
                if self._rank == 0:
                    self._session = request.session
                    self._lease.join(request.session)
            case protocol.Keep():
                self._state.keep(self._rank, request.save)
            case protocol.PassOver():
                self._state.pass_over(self._rank, request.save, written=request.written)
            case protocol.StoreAtEnd(stopping, partial):
                self._state.store_at_end(stopping, partial=partial)
            case protocol.Goodbye():
                self._goodbye = True


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a checkpoint directory from a child process; return at once in the process that was started.

    The started process exits when the address is bound. The serving child is an orphan, so it outlives the
    worker that started it. If the address is taken, a saver already runs.
    """
    parser = argparse.ArgumentParser(prog="python -m dlrover.checkpoint.saver.saver")
    parser.add_argument("--directory", required=True)
    parser.add_argument("--identity", required=True)
    parser.add_argument("--node", default="")
    parser.add_argument("--keep", type=policies.decode, required=True)
    parser.add_argument("--linger", type=float, required=True)
    args = parser.parse_args(argv)
    place = sys.stdin.read() or args.directory  # with a password, which no command line should show
    location = location_of(place)
    address = protocol.address(location, args.identity, args.node)
    listener = protocol.new_socket()
    try:
        listener.bind(address)
    except OSError:
        return 0
    listener.listen(BACKLOG)
    sys.stdout.flush()
    gc.freeze()  # what is imported stays, shared by both processes, and their ends need not look at it
    if os.fork():
        return 0
    _log_to(protocol.log_file(location))
    node = f" on node {args.node}" if args.node else ""
    logger.info("Saver %d serves %s%s", os.getpid(), location, node)
    listener.listen(BACKLOG)  # again: peers see the process id of the last caller
    saver = Saver(open_store(place), args.identity, args.keep, args.linger, listener)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # in the threads that follow, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_stop_on_order, args=(saver,), daemon=True).start()
    saver.serve()
    os._exit(0)  # other threads may hang in the storage


def _stop_on_order(saver: Saver) -> None:
    """Stop the saver on SIGTERM.

    A machine that shuts down, and Slurm, send the signal to every process. An agent then orders what is to be stored
    and ends its savers itself: they pass over what others send.
    """
    while True:  # an agent is the parent of its workers' savers
        sender, parent = signal.sigwaitinfo([signal.SIGTERM]).si_pid, os.getppid()
        if sender == parent or not procs.running(start.AGENT, [parent]):
            saver.stop()


def _log_to(path: Path) -> None:
    """Send all logged and printed text to a file, because the process that started this one has exited.

    If the file cannot be written, for example on a read-only disk, nothing is logged.
    """
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
    )


if __name__ == "__main__":
    sys.exit(main())
