"""The command line of the agent process: ``python -m dlrover.agent --job-dir DIR``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dlrover import config
from dlrover._util import decoding, files, logs, procs
from dlrover._util.sockets import address_towards
from dlrover.agent.checking import Checker
from dlrover.agent.ports import StorePort
from dlrover.agent.shell import Agent, NodeControls
from dlrover.agent.usage import UsageMeter
from dlrover.agent.workers.logs import RunLogs
from dlrover.agent.workers.membership import MembersSocket
from dlrover.agent.workers.workers import WorkerGroup
from dlrover.errors import DLRoverError, ExitCode, InfrastructureError, kind_of
from dlrover.rpc.batches import RequestRelay
from dlrover.rpc.client import MasterClient
from dlrover.spec.job import Entry
from dlrover.spec.jobdir import AgentConfig, JobDir, MasterAddress, decode
from dlrover.spec.node import SERVER, is_server
from dlrover.spec.outcome import Outcome

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent of one node until the job is over for that node; exit with the code of its outcome."""
    parser = argparse.ArgumentParser(prog="python -m dlrover.agent", description=main.__doc__)
    parser.add_argument("--job-dir", type=Path, required=True)
    parser.add_argument("--lifeline-fd", type=int, default=-1, help="Leave when it closes.")
    parser.add_argument("--node-id", type=int, default=-1)
    parser.add_argument("--node-rank", type=int, default=-1)
    parser.add_argument("--outcome", type=Path, help="Where to write the outcome (JSON).")
    args = parser.parse_args(argv)
    gc.freeze()  # what is imported stays, and the process's end need not look at it
    job_dir = JobDir(args.job_dir)
    env = config.environ()
    name = str(args.node_id) if args.node_id >= 0 else "joined"
    logs.log_to(job_dir.agent_log(name))
    procs.become_subreaper()
    try:
        outcome = asyncio.run(_serve(job_dir, env, args))
    except DLRoverError as error:
        logger.exception("The agent ends")
        outcome = Outcome(exit_code=error.exit_code, reason=str(error))
    if args.outcome is not None:
        files.write_atomically(args.outcome, msgspec.json.encode(outcome))
    return outcome.exit_code


async def _serve(job_dir: JobDir, env: dict[str, str], args: argparse.Namespace) -> Outcome:
    try:
        settings = decode(job_dir.agent, job_dir.agent.read_bytes(), AgentConfig)
        token = job_dir.token.read_text().strip()
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise kind_of(error)(f"{job_dir.path} is not a job directory: {error}.") from error
    if args.node_id >= 0 and is_server(args.node_rank):  # without an id, any rank may be wanted
        launch = msgspec.structs.replace(settings.launch, nproc_per_node=1, role=SERVER)
        if launch.server_module:
            launch = msgspec.structs.replace(
                launch, entry=Entry.MODULE, target=launch.server_module, args=()
            )
        settings = msgspec.structs.replace(settings, launch=launch)
    launch = settings.launch
    base = Path(launch.log_dir) if launch.log_dir not in ("", "/dev/null") else job_dir.logs
    hostname = env.get("DLROVER_NODE_NAME") or socket.gethostname()
    workers = WorkerGroup(launch, env, RunLogs(launch, base), hostname, config.cache_dir(env))
    # Not the node's id: a replacement of a dead agent must find its saver, as on the same machine.
    workers.orders.place = f"{args.node_rank} of {job_dir.path}"
    workers.orders.checkpoints = str(job_dir.checkpoints.absolute())
    checker = Checker(job_dir.path, settings.accelerator, env)
    workers.others = lambda: checker.pids
    tls = settings.tls
    address = settings.master_address or _master_address(job_dir)
    if not settings.address:
        settings = msgspec.structs.replace(settings, address=_own_address(address))
    locate = (
        None if settings.master_address else functools.partial(_master_address, job_dir, address)
    )
    async with (
        MasterClient(address, token, tls) as client,
        RequestRelay(client.requests()) as relay,
        MembersSocket() as members,
    ):
        workers.members = members
        workers.orders.members = members.address
        workers.orders.relay = relay.address
        workers.orders.token = token if tls.ca else ""
        usage = UsageMeter(settings.limits.usage_interval, alone=bool(settings.master_address))
        port = StorePort(settings.store_port)
        agent = Agent(
            client,
            NodeControls(hostname, workers, checker, usage, port),
            settings,
            node_id=args.node_id,
            node_rank=args.node_rank,
            locate=locate,
            notify=_notify,
            shows_waits=not job_dir.master.exists(),
        )
        _handle_ends(agent, launch.signals_to_handle, args.lifeline_fd)
        with contextlib.closing(port):
            return await agent.run()


def _notify(line: str) -> None:
    """Show a line to the user of this machine."""
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed
        sys.stderr.write(f"dlrover: {line}\n")
        sys.stderr.flush()


def _handle_ends(agent: Agent, signals: str, lifeline_fd: int) -> None:
    loop = asyncio.get_running_loop()
    for name in signals.split(","):
        number = signal.Signals[name]
        if procs.survives_hangup(number):
            continue
        loop.add_signal_handler(
            number,
            agent.abandon,
            ExitCode.SIGNAL_BASE + number,
            f"The agent was stopped by {name}.",
        )
    if lifeline_fd >= 0:
        procs.Lifeline.watch(
            lifeline_fd,
            lambda: agent.abandon(ExitCode.INFRASTRUCTURE, "The launcher of this node died."),
        )


def _own_address(master: str) -> str:
    host, _, port = master.rpartition(":")
    try:
        return address_towards(host.strip("[]"), int(port))
    except OSError as error:
        raise InfrastructureError(
            f"No way leads to the master at {master}: {error.strerror}."
        ) from error


def _master_address(job_dir: JobDir, last: str = "") -> str:
    """Return the address of the job's master; ``last`` if it can no longer be read from the directory."""
    try:
        return decoding.json(job_dir.master.read_bytes(), MasterAddress).address
    except (OSError, msgspec.DecodeError) as error:
        if last:
            return last
        raise kind_of(error)(f"{job_dir.master} cannot be read: {error}.") from error
