"""``dlrover-run``: torchrun's command line, plus fault tolerance and an explanation of each end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dlrover import config, extras
from dlrover._util import kernel, procs, sockets
from dlrover.agent.ports import PortReservation
from dlrover.cli import jobs
from dlrover.cli.run import arguments, nodes, onray, report
from dlrover.cli.run.launchspec import Endpoint, RunOptions, parse_endpoint
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError, kind_of
from dlrover.master.compose import Request, master_config
from dlrover.ray.machine.job import FILE, encode
from dlrover.spec.job import LaunchSpec
from dlrover.spec.jobdir import AgentConfig, BrainSide, JobDir, MasterConfig
from dlrover.spec.node import NodeLimits
from dlrover.spec.outcome import Outcome
from dlrover.spec.plan import NodeGroup
from dlrover.spec.words import printable_lines

DEFAULT_PORT = 29400
"""Port of a master's address that names none; torchrun's rendezvous port."""
LOOPBACK_TIMEOUT = 5.0
"""Seconds that a connection to this machine itself may take."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dlrover-run``; return its exit code (see ``dlrover.errors.ExitCode``)."""
    gc.freeze()  # what is imported stays, and the process's end need not look at it
    procs.open_standard_streams()
    logging.basicConfig(format="dlrover: %(message)s", level=logging.WARNING)
    env = config.environ()
    try:
        _check_directory()
        options = arguments.parse(sys.argv[1:] if argv is None else argv, env)
        outcome = run(options, env)
    except DLRoverError as error:
        print(f"dlrover-run: {printable_lines(str(error))}", file=sys.stderr)
        return error.exit_code
    if options.lifeline_fd < 0:
        show(outcome, options.output)
    return outcome.exit_code


def _check_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigurationError(
            "The working directory has been deleted: change to one that exists."
        ) from error


def show(outcome: Outcome, output: str) -> None:
    """Print the last screen: JSON to standard output, text to standard error."""
    if output == "json":
        print(report.render_json(outcome))
        return
    terminal = sys.stderr.isatty()
    text = report.render(
        outcome, width=shutil.get_terminal_size((100, 24)).columns, colour=terminal
    )
    if outcome.exit_code or terminal:
        print(text, file=sys.stderr)


def run(options: RunOptions, env: Mapping[str, str]) -> Outcome:
    """Run the job, or this machine's part of it, to its end.

    Raises:
        ConfigurationError: an option or this machine prevents the start.
        InfrastructureError: the job's processes cannot be kept alive.
    """
    settings = config.settings(env, options.config_file, options.rdzv_conf)
    _check_machine(options.launch)
    if options.job.auto_scale:
        extras.require("--auto-scale", "planning", extras.PLANNING)
    if options.dashboard >= 0:
        extras.require("--dashboard", "dashboard", ("starlette", "uvicorn"))
    for notice in options.notices:
        print(f"dlrover-run: {notice}", file=sys.stderr)
    name = jobs.job_name(
        options.launch.run_id if not options.standalone else "", options.launch.target
    )
    job_dir = jobs.create(env, name, options.job_dir)
    with jobs.locked(job_dir, patience=settings.limits.master_timeout):
        plan = _Plan(options, settings, env, job_dir, name)
        if options.ray is not None:
            plan.run_on_ray(options.ray)
        elif env.get("DLROVER_MASTER_ADDR"):
            plan.join(
                parse_endpoint("DLROVER_MASTER_ADDR", env["DLROVER_MASTER_ADDR"], DEFAULT_PORT)
            )
        elif options.standalone or options.local_nodes or options.job.max_nodes == 1:
            plan.run_here()
        elif options.rdzv_endpoint is None:
            raise ConfigurationError(
                f"--nnodes {options.job.max_nodes} needs a rendezvous: give --rdzv-endpoint HOST:PORT, "
                "the same on every node, or --local-nodes to run all nodes on this machine."
            )
        else:
            plan.meet(options.rdzv_endpoint)
        return plan.execute()


def _check_machine(launch: LaunchSpec) -> None:
    """Refuse at once what would make every start of a worker fail on this machine."""
    try:
        os.close(kernel.memfd_create("dlrover"))
    except OSError as error:
        raise kind_of(error)(
            f"The system call memfd_create is refused ({error.strerror}): agent and workers share memory by it; "
            "allow it in the sandbox or container that dlrover-run runs in."
        ) from error
    thread = threading.Thread(target=bool)
    try:
        thread.start()
    except RuntimeError as error:  # in the master, gRPC would crash
        raise InfrastructureError(
            f"No thread can be started here ({error}): raise the limit of processes, which dlrover doctor shows, or let "
            "the sandbox or container answer ENOSYS to clone3, as Docker does from 20.10.10 on."
        ) from error
    thread.join()
    if launch.python and shutil.which(launch.python) is None:
        raise ConfigurationError(
            f"PYTHON_EXEC={launch.python}: must be an interpreter that this user may run."
        )
    if launch.log_dir in ("", os.devnull):
        return
    try:
        Path(launch.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise kind_of(error)(
            f"--log-dir {launch.log_dir} cannot be used: {error.strerror}; it takes a directory to "
            "write to."
        ) from error


class _Plan:
    """Processes to start on this machine, and the files that they start from."""

    def __init__(
        self,
        options: RunOptions,
        settings: config.Settings,
        env: Mapping[str, str],
        job_dir: JobDir,
        name: str,
    ) -> None:
        self._options = options
        self._settings = settings
        self._env = env
        self._job_dir = job_dir
        self._name = name
        self._has_master = False
        self._has_agent = False
        self._on_ray = False

    def run_here(self) -> None:
        """Plan a job of this machine alone: a master that launches one or more local nodes."""
        count = self._options.local_nodes or 1
        address = self._options.local_addr or "127.0.0.1"
        if problem := sockets.loopback_problem(LOOPBACK_TIMEOUT):
            raise ConfigurationError(
                f"127.0.0.1, where master and agents of one machine meet, cannot be reached ({problem}): "
                "bring it up with ip link set lo up and ip address add 127.0.0.1/8 dev lo."
            )
        apart = bool(config.node_command(self._env))  # each node has its own address
        if not apart:
            _check_store_port(self._options.master_port)
        self._write_master(address if apart else "127.0.0.1", 0, managed_nodes=count)
        self._write_agent("", "" if apart else address, self._options.master_port)
        jobs.write_token(self._job_dir, secrets.token_hex(16))

    def run_on_ray(self, ray: onray.RayOptions) -> None:
        """Plan a job whose master and nodes are actors of a Ray cluster.

        Raises:
            ConfigurationError: there is no such cluster, or it can never run the job.
        """
        options = self._options
        given = options.launch.run_id not in ("", "none")
        self._name = name = self._name if given else self._job_dir.path.name
        size = NodeLimits(
            memory=int(ray.resources.get("memory", 0)), cpu=ray.resources.get("CPU", 0.0)
        )
        master = self._master_config("0.0.0.0", 0, options.local_nodes, "ray", size)  # noqa: S104 - the token is a secret
        agent = self._agent_config("", options.local_addr, options.master_port)
        token = secrets.token_hex(16)
        job = onray.ray_job(options, name, master, agent, token)
        onray.check(job)
        self._write(self._job_dir.job, master)
        jobs.write(self._job_dir, self._job_dir.path / FILE, encode(job))
        jobs.write_token(self._job_dir, token)
        self._has_master, self._on_ray = True, True

    def join(self, master: Endpoint) -> None:
        """Plan one node of a job whose master is elsewhere."""
        token = jobs.given_token(self._env)
        if not token:
            raise ConfigurationError(
                f"DLROVER_TOKEN is not set: it must be the token of the master at {master.host}:{master.port}, "
                "which is in the file token of its job directory."
            )
        jobs.write_token(self._job_dir, token)
        self._join(master)

    def meet(self, endpoint: Endpoint) -> None:
        """Plan one node of a job that meets at an endpoint; the machine that owns it runs the master."""
        from dlrover.cli.host import network  # noqa: PLC0415 - only here: psutil is slow to import

        run_id = self._options.launch.run_id
        token = jobs.shared_token(self._env, run_id, endpoint.host, endpoint.port)
        jobs.write_token(self._job_dir, token)
        self._join(endpoint)
        if not jobs.given_token(self._env) and not network.loopback_of(endpoint.host):
            print(
                f"dlrover-run: DLROVER_TOKEN is not set: only nodes of this machine can meet at {endpoint.host}.",
                file=sys.stderr,
                flush=True,
            )
        if not (self._is_static_host() or network.is_this_machine(endpoint.host)):
            return
        self._host_lock = network.HostLock(endpoint.port)
        if self._host_lock.held:
            # Other machines may resolve the name differently, but can join only with a token.
            here = network.is_loopback(endpoint.host) or not jobs.given_token(self._env)
            host = network.loopback_of(endpoint.host) if here else ""
            self._write_master(host or "0.0.0.0", endpoint.port, managed_nodes=0)  # noqa: S104 - the token is a secret

    def _is_static_host(self) -> bool:
        """Return True if this is node 0 of torchrun's static rendezvous, whatever its address."""
        options = self._options
        named = options.rdzv_backend == "static" and options.node_rank_given
        return named and options.node_rank == 0

    def execute(self) -> Outcome:
        """Start the processes and wait for the job's end."""
        from dlrover.cli.run.supervisor import Supervisor  # noqa: PLC0415 - loads grpc
        from dlrover.master.files import read_outcome  # noqa: PLC0415

        env = dict(self._env)
        if self._options.omp_num_threads:
            env["OMP_NUM_THREADS"] = self._options.omp_num_threads
        supervisor = Supervisor(self._job_dir, env, self._options.lifeline_fd)
        if self._has_master and self._on_ray:
            supervisor.add_link_to_ray()
        elif self._has_master:
            supervisor.add_master()
        if self._has_agent:
            node_id, node_rank = config.node_place(env)
            given = self._options.node_rank_given
            supervisor.add_agent(self._options.node_rank if given else node_rank, node_id)
        if self._options.dashboard >= 0:
            supervisor.add_dashboard(self._options.dashboard)
        launch = self._options.launch
        signals = [signal.Signals[name] for name in launch.signals_to_handle.split(",")]
        storing = self._settings.limits.release_grace
        outcome = asyncio.run(supervisor.run(signals, launch.shutdown_timeout, storing))
        whole = read_outcome(self._job_dir.outcome)  # a node's outcome lacks the master's sums
        if whole is not None:
            known = {"goodput": whole.goodput, "skipped": whole.skipped}
            outcome = msgspec.structs.replace(outcome, **known)
        return msgspec.structs.replace(outcome, job_dir=str(self._job_dir.path))

    def _join(self, master: Endpoint) -> None:
        from dlrover.cli.host import network  # noqa: PLC0415

        network.wait_for_name(master.host, self._settings.limits.connect_timeout)
        address = self._options.local_addr or network.address_towards(master.host, master.port)
        host = f"[{master.host}]" if ":" in master.host else master.host
        self._write_agent(f"{host}:{master.port}", address, 0)
        self._has_agent = True

    def _write_master(self, host: str, port: int, managed_nodes: int) -> None:
        platform, size = "local" if managed_nodes else "", self._options.node_size
        content = self._master_config(host, port, managed_nodes, platform, size)
        self._write(self._job_dir.job, content)
        self._has_master = True

    def _master_config(
        self, host: str, port: int, managed_nodes: int, platform: str, size: NodeLimits
    ) -> MasterConfig:
        options = self._options
        request = Request(
            job=msgspec.structs.replace(
                options.job,
                name=self._name,
                managed_nodes=managed_nodes,
                auto_scale=options.job.auto_scale and managed_nodes > 0,
                spares=options.job.spares
                if managed_nodes
                else 0,  # others are those that come beyond --nnodes
                auto_spares=options.job.auto_spares and managed_nodes > 0,
            ),
            platform=platform,
            brain=BrainSide(
                program=Path(options.launch.target).name,
                node=NodeGroup(count=1, cpu=size.cpu, memory=size.memory),
            ),
            node_size=size,
            most_memory_factor=nodes.most_memory_factor(size, managed_nodes + options.job.spares)
            if platform == "local"
            else 0.0,
        )
        return master_config(request, self._settings, host, port)

    def _write_agent(self, master: str, address: str, store_port: int) -> None:
        self._write(self._job_dir.agent, self._agent_config(master, address, store_port))

    def _agent_config(self, master: str, address: str, store_port: int) -> AgentConfig:
        return AgentConfig(
            launch=self._options.launch,
            limits=self._settings.limits,
            master_address=master,
            address=address,
            store_port=store_port,
            accelerator=self._options.accelerator,
            tls=self._settings.tls,
        )

    def _write(self, path: Path, content: msgspec.Struct) -> None:
        try:
            data = msgspec.json.encode(content)
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"{error.object!r} is not UTF-8, which arguments and names of files must be."
            ) from error
        jobs.write(self._job_dir, path, data)


def _check_store_port(port: int) -> None:
    """Refuse a port that rank 0 could not listen on; 0 is any free one."""
    reservation = PortReservation(port)
    if not reservation.held:
        raise ConfigurationError(
            f"--master-port {port}: the port is taken by another process of this machine; name another "
            "port, or leave the option out to get a free one."
        )
    reservation.release()


if __name__ == "__main__":
    sys.exit(main())
