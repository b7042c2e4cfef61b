"""Meaning of a parsed ``dlrover-run`` command line: `run_options`, and the values it reads.

Every function turns text into a value, or raises a `ConfigurationError` that names the option.
Only `run_options` looks beyond its arguments: it checks that the training program exists, and draws
a run id.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import uuid
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import msgspec

from dlrover import accelerators
from dlrover._util import modules
from dlrover.cli.run import nodes, onray
from dlrover.cli.run.nproc import resolve_nproc
from dlrover.errors import ConfigurationError
from dlrover.spec.job import Entry, JobSpec, LaunchSpec, StdMap
from dlrover.spec.node import CHIEF, SERVER, WORKER, NodeLimits
from dlrover.spec.words import did_you_mean

STATIC_PORT = 29500
"""torchrun's default for ``--master-port``."""
RENDEZVOUS_PORT = 29400
"""torchrun's default port of a rendezvous endpoint that is not static."""
MAX_PORT = 65535


class Endpoint(NamedTuple):
    """A host (an IPv6 address without brackets) and a TCP port."""

    host: str
    port: int


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Meaning of one command line of ``dlrover-run``."""

    launch: LaunchSpec
    job: JobSpec
    """The job as requested, without a name, managed nodes and settings."""
    local_nodes: int
    """Nodes to run on this machine as child processes; 0: not given, this process is one node."""
    node_size: NodeLimits
    """Memory and CPU of each local node."""
    job_dir: str
    """Empty: not given."""
    standalone: bool
    """A job of this machine alone: ``--standalone``, or one node without a rendezvous address."""
    rdzv_backend: str
    rdzv_endpoint: Endpoint | None
    """None: not given, or not needed because the job is standalone."""
    rdzv_conf: dict[str, str]
    node_rank: int
    node_rank_given: bool
    """True if ``node_rank`` was given; it is 0 otherwise."""
    local_addr: str
    """This node's address for the others; empty: find it."""
    master_port: int
    """0: not given."""
    omp_num_threads: str
    """``OMP_NUM_THREADS`` to set for the workers; empty: leave the environment as it is."""
    config_file: str
    """Empty: not given."""
    dashboard: int
    """Port of the dashboard; 0: any free one; -1: none."""
    output: str
    """``text`` or ``json``."""
    accelerator: str
    ray: onray.RayOptions | None
    """Where the nodes run if it is a Ray cluster."""
    lifeline_fd: int
    """File descriptor of the process that this job must not outlive; -1: none."""
    notices: tuple[str, ...]
    """A line for each given option without effect, and for each automatic choice."""


def run_options(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    probe: Callable[[str], int],
    *,
    elsewhere: bool = False,
) -> RunOptions:
    """Return the meaning of ``args``, a namespace of `dlrover.cli.run.arguments.build_parser`.

    ``probe`` counts the devices for a word as ``--nproc-per-node`` (`dlrover.cli.run.nproc.resolve_nproc`).
    ``elsewhere``: the program is not on this machine, so that it cannot be looked for.

    Raises:
        ConfigurationError: the first mistake found.
    """
    chosen = [nodes.auto_config(args, environ, probe)] if args.auto_config else []
    others = nodes.other_nodes(args, environ)
    min_nodes, max_nodes = (bound + others for bound in nodes.bounds(args, environ))
    standalone = _is_standalone(args, min_nodes, max_nodes)
    spares, auto_spares = nodes.spares(args, max_nodes, standalone=standalone)
    _check_node_rank(args, standalone, max_nodes + spares)
    if args.embedding_servers:
        args = nodes.with_embedding_servers(args)
    min_servers, max_servers = nodes.server_bounds(args.servers, args.local_nodes)
    server_failover: Literal["job", "instance"] = "instance" if args.chief else args.server_failover
    if args.instances:
        nodes.check_instances(args, environ)
    alone = standalone and "DLROVER_MASTER_ADDR" not in environ
    if args.server_failover == "instance" and alone and not args.servers:
        raise ConfigurationError(
            "--server-failover instance: the job has no servers; give their number with --servers."
        )
    if args.survive and (args.chief or args.servers):
        other = "--chief" if args.chief else f"--servers {args.servers}"
        raise ConfigurationError(
            f"--survive: keeps replicas of one model; {other} has other processes."
        )
    if args.auto_scale:
        common = args.server_failover == "job"
        has_choice = min_nodes < max_nodes or (common and min_servers < max_servers)
        nodes.check_auto_scale(args, environ, max_nodes, has_choice)
    _check_master_port(args.master_port)
    endpoint = None if standalone else _endpoint(args)
    rdzv_conf = parse_rdzv_conf(args.rdzv_conf)
    launch = _launch_spec(args, environ, probe, standalone, elsewhere=elsewhere)
    if args.chief and launch.nproc_per_node != 1:
        raise ConfigurationError(
            f"--nproc-per-node {launch.nproc_per_node}: with --chief, each node has 1 process."
        )
    oversubscribed = launch.nproc_per_node > 1 and "OMP_NUM_THREADS" not in environ
    return RunOptions(
        launch=launch,
        job=JobSpec(
            name="",
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            node_unit=args.node_unit,
            servers=min_servers
            if args.auto_scale and args.server_failover == "job"
            else max_servers,
            min_servers=min_servers,
            max_servers=max_servers,
            server_failover=server_failover,
            chief=args.chief,
            instances=args.role if args.instances else "",
            spares=spares,
            auto_spares=auto_spares,
            other_nodes=others,
            survive=args.survive,
            auto_scale=args.auto_scale,
            max_restarts=launch.max_restarts,
            shutdown_timeout=launch.shutdown_timeout,
            node_check=args.network_check or args.comm_perf_test or args.precheck > 0,
            exclude_stragglers=args.exclude_straggler,
        ),
        local_nodes=args.local_nodes and args.local_nodes + others,
        node_size=nodes.node_size(args, environ, standalone),
        job_dir=args.job_dir,
        standalone=standalone,
        rdzv_backend="c10d" if standalone else args.rdzv_backend,
        rdzv_endpoint=endpoint,
        rdzv_conf=rdzv_conf,
        node_rank=args.node_rank,
        node_rank_given="node_rank" in args.given,
        local_addr=args.local_addr or "",
        master_port=args.master_port or 0,
        omp_num_threads="1" if oversubscribed else "",
        config_file=args.config,
        output=args.output,
        accelerator=args.accelerator,
        dashboard=_dashboard(args.dashboard),
        ray=onray.ray_options(args, environ, launch.nproc_per_node),
        lifeline_fd=args.lifeline_fd,
        notices=(*chosen, *_notices(args)),
    )


def _dashboard(port: int) -> int:
    if not -1 <= port <= 65_535:
        raise ConfigurationError(f"--dashboard {port}: must be a port, or 0 for any free one.")
    return port


def _launch_spec(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    probe: Callable[[str], int],
    standalone: bool,
    *,
    elsewhere: bool,
) -> LaunchSpec:
    if args.max_restarts < 0:
        raise ConfigurationError(
            f"--max-restarts {args.max_restarts}: must be 0 or a positive whole number."
        )
    entry = _entry(args)
    if not elsewhere:
        _check_program(entry, args.training_script, environ)
    return LaunchSpec(
        entry=entry,
        target=args.training_script,
        args=tuple(args.training_script_args),
        server_module=args.server_module,
        embedding=args.server_module == nodes.EMBEDDING_SERVER,
        python=environ.get("PYTHON_EXEC", ""),
        role=CHIEF if args.chief else WORKER if args.servers else args.role,
        run_id=str(uuid.uuid4()) if standalone else args.rdzv_id,
        max_restarts=args.max_restarts,
        redirects=parse_std("--redirects", args.redirects),
        tee=parse_std("--tee", args.tee),
        local_ranks_filter=parse_local_ranks(args.local_ranks_filter),
        duplicate_stdout_filters=tuple(args.duplicate_stdout_filters),
        duplicate_stderr_filters=tuple(args.duplicate_stderr_filters),
        log_dir=args.log_dir or "",
        log_line_prefix_template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
        signals_to_handle=parse_signals(args.signals_to_handle),
        shutdown_timeout=_shutdown_timeout(args.shutdown_timeout, environ),
        virtual_local_rank=args.virtual_local_rank,
        save_at_breakpoint=args.save_at_breakpoint,
        survive=args.survive,
        auto_tuning=args.auto_tunning,
        numa_binding=args.numa_binding or _numa_affinity(args),
        # Last: it may take seconds, and any other mistake should be reported at once.
        nproc_per_node=resolve_nproc(args.nproc_per_node, probe),
    )


# Nodes


def _is_standalone(args: argparse.Namespace, min_nodes: int, max_nodes: int) -> bool:
    if args.standalone:
        if min_nodes > 1 and not args.local_nodes:
            raise ConfigurationError(
                f"--standalone: trains on this machine alone, but --nnodes {args.nnodes} waits for "
                f"other nodes; --local-nodes {min_nodes} runs them here."
            )
        return True
    if args.platform:
        return False
    nowhere_to_meet = not args.rdzv_endpoint and args.master_port is None
    return args.rdzv_backend == "static" and nowhere_to_meet and max_nodes == 1


def _check_node_rank(args: argparse.Namespace, standalone: bool, max_nodes: int) -> None:
    rank = args.node_rank
    if rank < 0:
        raise ConfigurationError(f"--node-rank {rank}: must be 0 or a positive whole number.")
    # The other backends assign ranks themselves, and torchrun accepts any number there.
    if args.rdzv_backend == "static" and not standalone and rank >= max_nodes:
        raise ConfigurationError(
            f"--node-rank {rank}: must be less than the number of nodes, {max_nodes}."
        )


# Rendezvous


def _check_master_port(port: int | None) -> None:
    if port is not None and not 0 <= port <= MAX_PORT:
        raise ConfigurationError(f"--master-port {port}: must be a port, 0 to {MAX_PORT}.")


def _endpoint(args: argparse.Namespace) -> Endpoint | None:
    if args.rdzv_backend != "static":
        if not args.rdzv_endpoint.strip():
            return None
        return parse_endpoint("--rdzv-endpoint", args.rdzv_endpoint, RENDEZVOUS_PORT)
    port = STATIC_PORT if args.master_port is None else args.master_port
    if args.rdzv_endpoint:
        return parse_endpoint("--rdzv-endpoint", args.rdzv_endpoint, port)
    return parse_endpoint("--master-addr", f"{args.master_addr}:{port}", port)


def parse_endpoint(flag: str, text: str, default_port: int) -> Endpoint:
    """Parse ``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT``; the port follows the last colon."""
    text = text.strip()
    has_port = ":" in text and not text.endswith("]")
    host, _, port = text.rpartition(":") if has_port else (text, "", "")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not re.fullmatch(r"[\w.:-]+", host):
        raise ConfigurationError(
            f"{flag} {text}: must be HOST:PORT, where the host is a name or an IP address."
        )
    if not has_port:
        return Endpoint(host, default_port)
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > MAX_PORT:
        raise ConfigurationError(f"{flag} {text}: the port must be a number from 0 to {MAX_PORT}.")
    return Endpoint(host, int(port))


def parse_rdzv_conf(text: str) -> dict[str, str]:
    """Parse ``k=v,k=v`` into a dictionary; ignore blanks around keys and values.

    Quotes around the whole text are ignored too: they remain where no shell removed them.
    """
    pairs = text.strip()
    if len(pairs) > 1 and pairs[0] == pairs[-1] and pairs[0] in "'\"":
        pairs = pairs[1:-1].strip()
    if not pairs:
        return {}
    conf: dict[str, str] = {}
    for pair in pairs.split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key or not value:
            raise ConfigurationError(
                f"--rdzv-conf {text}: {pair.strip()!r} is not of the form KEY=VALUE."
            )
        conf[key] = value
    return conf


# Logs, signals, shutdown


def parse_std(flag: str, text: str) -> StdMap:
    """Parse ``S`` or ``RANK:S,RANK:S`` (local ranks); S is 0 none, 1 stdout, 2 stderr, 3 both."""
    if re.fullmatch(r"[0-3]", text):
        return StdMap(default=int(text))
    if re.fullmatch(r"(\d+:[0-3],)*\d+:[0-3]", text):
        pairs = (pair.split(":") for pair in text.split(","))
        return StdMap(by_rank={int(rank): int(std) for rank, std in pairs})
    raise ConfigurationError(
        f"{flag} {text}: must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
        "or one of these for each local rank, as 0:3,1:2."
    )


def parse_local_ranks(text: str) -> tuple[int, ...]:
    """Parse comma-separated local ranks, each kept once and in order; empty: no filter."""
    if not text:
        return ()
    try:
        ranks = sorted({int(rank) for rank in text.split(",")})
    except ValueError:
        ranks = [-1]
    if ranks[0] < 0:
        raise ConfigurationError(
            f"--local-ranks-filter {text}: must be local ranks with commas between them, as 0,1,2."
        )
    return tuple(ranks)


def parse_signals(text: str) -> str:
    """Return comma-separated names of signals, without blanks."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in signal.Signals.__members__:
            raise ConfigurationError(
                f"--signals-to-handle {text}: {name!r} is not the name of a signal, as SIGTERM is."
            )
        if name in ("SIGKILL", "SIGSTOP"):
            raise ConfigurationError(f"--signals-to-handle {text}: no process can handle {name}.")
    return ",".join(names)


def _shutdown_timeout(given: int | None, environ: Mapping[str, str]) -> float:
    if given is None:
        source = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT="
        text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    else:
        source, text = "--shutdown-timeout ", str(given)
    try:
        seconds = int(text)
    except ValueError:
        seconds = -1
    if seconds < 0:
        raise ConfigurationError(f"{source}{text}: must be a whole number of seconds, 0 or more.")
    return float(seconds)


# The training program


def _entry(args: argparse.Namespace) -> Entry:
    if args.run_path:
        return Entry.RUN_PATH
    if args.no_python and args.module:
        raise ConfigurationError("--no-python: cannot be combined with -m or --module.")
    if args.no_python:
        return Entry.COMMAND
    return Entry.MODULE if args.module else Entry.SCRIPT


def _check_program(entry: Entry, target: str, environ: Mapping[str, str]) -> None:
    if entry is Entry.MODULE:
        _check_module(target, environ)
        return
    if entry is Entry.COMMAND:
        if shutil.which(target, path=environ.get("PATH", os.defpath)) is None:
            raise ConfigurationError(
                f"command {target} is neither an executable file nor found on PATH."
            )
    elif target == "-" or _reads_once(target):
        raise ConfigurationError(
            f"training script {target}: a pipe or device gives the program to one process, once, but each worker and each restart "
            "reads it; save it to a file, and give the file's name."
        )
    elif not os.path.exists(target):
        raise ConfigurationError(
            f"training script {target} does not exist (looked in {os.getcwd()}).{_nearest(target)}"
        )
    elif os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
        raise ConfigurationError(f"training script {target} is a directory without __main__.py.")


def _reads_once(target: str) -> bool:
    """Whether the path leads to a pipe or a device, such as the shell's ``<(...)`` or a terminal."""
    return os.path.exists(target) and not (os.path.isfile(target) or os.path.isdir(target))


def _check_module(module: str, environ: Mapping[str, str]) -> None:
    """Refuse a module whose top-level package is not found; more is known only by importing it."""
    top, dot, rest = module.partition(".")
    if environ.get("PYTHON_EXEC") or modules.find_top_level(top, os.getcwd()) is not None:
        return  # another interpreter finds other modules
    names = (name.removesuffix(".py") for name in _listed("."))
    hint = did_you_mean(top, filter(str.isidentifier, names), after=f"{dot}{rest}")
    raise ConfigurationError(
        f"-m {module}: there is no module {top} (looked in {os.getcwd()} and where Python finds modules).{hint}"
    )


def _nearest(target: str) -> str:
    """Return a question for a program beside the missing one with nearly its name; empty if there is none."""
    directory, name = os.path.split(target)
    names = [found[:-3] for found in _listed(directory or ".") if found.endswith(".py")]
    before = os.path.join(directory, "")
    return did_you_mean(name.removesuffix(".py"), names, before=before, after=".py")


def _numa_affinity(args: argparse.Namespace) -> str:
    return "node" if args.numa_affinity and accelerators.pci_addresses() else ""


# Options without effect


_WITHOUT_EFFECT = {
    # torch registers its own class as "default".
    "logs_specs": ("default", "the agent writes the workers' logs itself, without torch's classes"),
    "event_log_handler": ("null", "the job's journal records its events"),
    "start_method": ("spawn", "each worker is a program of its own, not a fork of the launcher"),
    "membind_policy": (
        "",
        "a worker that --numa-affinity binds allocates its memory near its processors",
    ),
    "training_port": (
        "",
        "workers inherit this environment, with the ports that a library of collectives reads from it",
    ),
    "ucp_device_type": ("", "checkpoints fit any number of ranks without a conversion"),
}
"""Options without effect, each with a value that needs no notice, and the reason."""


def _notices(args: argparse.Namespace) -> tuple[str, ...]:
    notices = []
    if args.numa_affinity and not (args.numa_binding or _numa_affinity(args)):
        notices.append("--numa-affinity has no effect: this machine has no accelerators.")
    for name, (usual, why) in _WITHOUT_EFFECT.items():
        value = getattr(args, name)
        if value != usual and name in args.given:
            notices.append(f"--{name.replace('_', '-')} {value} has no effect: {why}.")
    if (args.servers or args.chief) and "role" in args.given:
        other, roles = ("servers", (WORKER, SERVER)) if args.servers else ("chief", (CHIEF, WORKER))
        notices.append(
            f"--role {args.role} has no effect with --{other}: the roles are {' and '.join(roles)}."
        )
    return tuple(notices)


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
