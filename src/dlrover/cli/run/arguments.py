"""Command line of ``dlrover-run``: every option of torchrun 2.13, and DLRover's own.

`build_parser` describes the options, `parse` turns a command line into `RunOptions`. In a working
``torchrun`` command line, only the first word has to change: torchrun's options keep their
spellings, abbreviations, defaults and ``PET_`` environment variables.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from dlrover import __version__, accelerators
from dlrover.cli.run import onray
from dlrover.cli.run.launchspec import RunOptions, run_options
from dlrover.cli.run.nproc import probe_devices
from dlrover.cli.run.parser import HelpFormatter, LaunchParser, OptionGroup

PROG = "dlrover-run"

_USAGE = """%(prog)s [options] script.py [arg ...]
       %(prog)s [options] -m package.module [arg ...]
       %(prog)s [options] --no-python program [arg ...]"""

_DESCRIPTION = (
    "Start distributed training on this node and keep it running through faults. "
    "Takes every option of torchrun, with the same meaning."
)

_EPILOG = (
    "Each option may be written with underscores instead of inner dashes. Where the command line does "
    "not set an option, the environment variable PET_<NAME> does, as PET_NNODES=2 (but "
    "none for --logs-specs and --numa-binding)."
)


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str],
    probe: Callable[[str], int] | None = None,
) -> RunOptions:
    """Return the options that ``dlrover-run argv`` sets.

    ``probe`` counts the devices that a word such as ``gpu`` for ``--nproc-per-node`` stands for;
    by default, the workers' interpreter counts them (`dlrover.cli.run.nproc.probe_devices`).

    Raises:
        ConfigurationError: an option or an environment variable is wrong; the message names it.
        SystemExit: ``--help`` or ``--version`` was given and answered.
    """
    parser = build_parser(environ)
    args = onray.adjusted(parser.parse_args(argv))
    if args.platform:
        probe = functools.partial(onray.devices, args)
    elif probe is None:
        python = environ.get("PYTHON_EXEC") or sys.executable
        probe = functools.partial(probe_devices, python=python, environ=environ)
    options = run_options(args, environ, probe)
    notices = (*options.notices, *parser.misspelt(environ))
    return msgspec.structs.replace(options, notices=notices)


def parse_elsewhere(
    argv: Sequence[str], environ: Mapping[str, str], probe: Callable[[str], int]
) -> RunOptions:
    """Return the options of a command for another machine, which has the program; otherwise as `parse`."""
    args = build_parser(environ).parse_args(argv)
    return run_options(args, environ, probe, elsewhere=True)


def build_parser(environ: Mapping[str, str]) -> LaunchParser:
    """Return a parser whose namespaces hold all of torchrun's values, with defaults from ``environ``.

    Its namespaces also hold ``given``: the names of the options set on the command line or in
    ``environ``. It raises `ConfigurationError` where argparse would exit.
    """
    parser = LaunchParser(
        prog=PROG,
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=functools.partial(HelpFormatter, max_help_position=30),
        add_help=False,
    )
    _add_program(OptionGroup(parser, environ, "the program"))
    _add_nodes(OptionGroup(parser, environ, "nodes and workers"))
    _add_rendezvous(OptionGroup(parser, environ, "rendezvous"))
    _add_restarts(OptionGroup(parser, environ, "restarts and shutdown"))
    _add_logs(OptionGroup(parser, environ, "logs"))
    _add_job(OptionGroup(parser, environ, "DLRover: the job", own=True))
    _add_platform(OptionGroup(parser, environ, "DLRover: where the nodes run", own=True))
    _add_checks(OptionGroup(parser, environ, "DLRover: checks", own=True))
    _add_tuning(OptionGroup(parser, environ, "DLRover: tuning", own=True))
    _add_original(OptionGroup(parser, environ, "accepted from the original DLRover", own=True))
    other = parser.add_argument_group("help")
    other.add_argument("-h", "--help", action="help", help="Show this text.")
    version = other.add_argument(
        "--version", action="version", version=f"{PROG} {__version__}", help="Show the version."
    )
    parser.own_options.add(version.dest)
    parser.set_defaults(given=frozenset(parser.set_by_environ))
    return parser


def _add_program(group: OptionGroup) -> None:
    group.add_positional("training_script", help="The training program.")
    group.add_positional(
        "training_script_args", nargs=argparse.REMAINDER, help="Its arguments, passed on unread."
    )
    group.add_switch(
        "-m", "--module", help="The training program is a module, run as 'python -m' does."
    )
    group.add_switch(
        "--no-python", help="The training program is a command: start it without an interpreter."
    )
    group.add_switch(
        "--run-path",
        help="Run the script (an absolute path) by runpy.run_path in the launcher's own "
        "interpreter. Overrides --no-python and --module.",
    )
    group.add("--role", default="default", help="Role of the workers (default: %(default)s).")
    group.add(
        "--start-method",
        default="spawn",
        choices=["spawn", "fork", "forkserver"],
        help="No effect: each worker is a program of its own.",
    )
    group.add_switch(
        "--virtual-local-rank",
        help="Show each worker only its own accelerator, as device 0, and set LOCAL_RANK to 0.",
    )
    group.add(
        "--numa-binding",
        choices=["node", "socket", "exclusive", "core-complex"],
        from_environ=False,
        help="Bind each worker to the processors near its accelerator.",
    )


def _add_nodes(group: OptionGroup) -> None:
    group.add(
        "--nnodes",
        default="1:1",
        metavar="MIN:MAX",
        help="Nodes of the job: a number, or minimum and maximum (default: %(default)s).",
    )
    group.add(
        "--nproc-per-node",
        default="1",
        metavar="N",
        help="Workers on each node: a number; gpu, cpu or xpu for the number of these devices; or "
        "auto for the number of accelerators, else of processors (default: %(default)s).",
    )
    group.add_switch(
        "--standalone",
        help="Train on this machine alone. The --rdzv-* options are ignored.",
    )
    group.add(
        "--node-rank",
        kind=int,
        default=0,
        metavar="N",
        help="Rank of this node (default: %(default)s).",
    )


def _add_rendezvous(group: OptionGroup) -> None:
    group.add(
        "--rdzv-backend",
        default="static",
        metavar="NAME",
        help="How the nodes find each other (default: %(default)s).",
    )
    group.add(
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT",
        help="Where the nodes meet (default: --master-addr and --master-port if static).",
    )
    group.add(
        "--rdzv-id",
        default="none",
        metavar="ID",
        help="Name of the job, equal on all its nodes (default: %(default)s).",
    )
    group.add(
        "--rdzv-conf",
        default="",
        metavar="KEY=VALUE,...",
        help="Settings of the rendezvous, such as join_timeout=600.",
    )
    group.add(
        "--master-addr",
        default="127.0.0.1",
        metavar="HOST",
        help="Host of node 0, for the static rendezvous; an IPv6 address in brackets "
        "(default: %(default)s).",
    )
    group.add(
        "--master-port",
        kind=int,
        metavar="PORT",
        help="Port on that host (default: 29500).",
    )
    group.add(
        "--local-addr",
        metavar="HOST",
        help="Address of this node for the others (default: detected).",
    )


def _add_restarts(group: OptionGroup) -> None:
    group.add(
        "--max-restarts",
        kind=int,
        default=0,
        metavar="N",
        help="Restarts of the workers after failures of the program (default: %(default)s).",
    )
    group.add(
        "--monitor-interval",
        kind=float,
        default=0.1,
        metavar="SECONDS",
        help="Time between checks of the workers (default: %(default)s).",
    )
    group.add(
        "--signals-to-handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="NAME,...",
        help="Signals that stop the job and are passed on to the workers (default: %(default)s).",
    )
    group.add(
        "--shutdown-timeout",
        kind=int,
        metavar="SECONDS",
        help="Time for workers to exit before SIGKILL "
        "(default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30).",
    )
    group.add(
        "--event-log-handler",
        default="null",
        metavar="NAME",
        help="No effect: the job keeps a journal of its events.",
    )


def _add_logs(group: OptionGroup) -> None:
    group.add("--log-dir", metavar="DIR", help="Where the workers' logs go.")
    group.add(
        "-r",
        "--redirects",
        default="0",
        metavar="STREAMS",
        help="Streams to write to a log file instead of the console: 1 is stdout, 2 is stderr, 3 is "
        "both, 0:1,1:2 is stdout of local rank 0 and stderr of local rank 1 (default: %(default)s).",
    )
    group.add(
        "-t",
        "--tee",
        default="0",
        metavar="STREAMS",
        help="Streams to write to a log file as well as the console (default: %(default)s).",
    )
    group.add(
        "--local-ranks-filter",
        default="",
        metavar="RANK,...",
        help="Local ranks whose output the console shows (default: all). Log files get everything.",
    )
    for stream in ("stdout", "stderr"):
        group.add(
            f"--duplicate-{stream}-filters",
            kind=_comma_separated,
            default=[],
            metavar="TEXT,...",
            help=f"Copy the lines of {stream} that contain one of these texts to one more file; a "
            "doubled comma stands for a comma.",
        )
    group.add(
        "--logs-specs",
        from_environ=False,
        metavar="NAME",
        help="No effect: the agent writes the workers' logs itself.",
    )


def _add_job(group: OptionGroup) -> None:
    group.add(
        "--local-nodes",
        kind=int,
        default=0,
        metavar="N",
        help="Run N nodes on this machine, each a child process; sets --nnodes unless given.",
    )
    group.add(
        "--node-memory",
        default="",
        metavar="SIZE",
        help="Memory of each of these nodes, with all its processes, as 512Mi or 2Gi (default: no limit).",
    )
    group.add(
        "--node-cpu",
        default="",
        metavar="CORES",
        help="Cores of each of these nodes, as 0.5 or 2 (default: no limit).",
    )
    group.add(
        "--node-unit",
        kind=int,
        default=1,
        metavar="N",
        help="Train with a multiple of N nodes only (default: %(default)s).",
    )
    group.add(
        "--spares",
        default="",
        metavar="N|auto",
        help="Spare nodes beside --nnodes, warm and without ranks: each takes the place of a lost node at once. "
        "auto chooses their number from the measured failures (default: 0).",
    )
    group.add(
        "--servers",
        default="",
        metavar="[MIN:]MAX",
        help="Parameter servers to run beside the --local-nodes, each a node of role ps with one "
        "process: all of them, or with --auto-scale MIN to start with.",
    )
    group.add(
        "--server-failover",
        default="job",
        choices=["job", "instance"],
        help="What restarts with a failed server: the job's world, which it belongs to, or only the "
        "server, which then is a world by itself (default: %(default)s).",
    )
    group.add(
        "--server-module",
        default="",
        metavar="MODULE",
        help="Module that the servers run, as with -m (default: the program).",
    )
    group.add(
        "--embedding-servers",
        default="",
        metavar="N",
        help="Servers of embedding tables: --servers N --server-failover instance --server-module "
        "dlrover.embedding.",
    )
    group.add_switch(
        "--chief",
        help="Run one more node, the chief, which coordinates the others. It alone is the job's world; each "
        "worker, evaluator and server is a world by itself that restarts alone.",
    )
    group.add(
        "--evaluators",
        kind=int,
        default=0,
        metavar="N",
        help="Evaluators to run beside the --chief (default: %(default)s).",
    )
    group.add_switch(
        "--instances",
        help="Make each of the --local-nodes an instance: a world by itself, which restarts alone. The job ends "
        "when all have succeeded.",
    )
    group.add_switch(
        "--auto-scale",
        help="Find the best number of nodes within --nnodes while training; starts with "
        "--local-nodes.",
    )
    group.add(
        "--job-dir",
        default=group.environ.get("DLROVER_JOB_DIR", ""),
        metavar="DIR",
        help="Journal, logs and state of the job (default: DLROVER_JOB_DIR).",
    )
    group.add("--config", default="", metavar="FILE", help="Configuration file.")
    group.add(
        "--dashboard",
        kind=int,
        default=-1,
        metavar="PORT",
        help="Show the job in a browser while it runs, at this port of this machine; 0 for any free one. The "
        "link is printed.",
    )
    group.add(
        "--lifeline-fd",
        kind=int,
        default=-1,
        metavar="FD",
        help="Leave when this file descriptor closes, and leave the last screen and the notices to the process at "
        "its other end (default: none).",
    )
    group.add(
        "--output",
        default="text",
        choices=["text", "json"],
        help="Form of the report when the job has ended (default: %(default)s).",
    )
    group.add(
        "--accelerator",
        default=accelerators.RESOURCES[0],
        choices=list(accelerators.resources()),
        metavar="KIND",
        help="Accelerator that the program trains on: %(choices)s (default: %(default)s).",
    )


def _add_platform(group: OptionGroup) -> None:
    group.add(
        "--platform",
        default="",
        choices=["", *onray.PLATFORMS],
        metavar="NAME",
        help="ray: run the --nnodes nodes as actors of a Ray cluster (default: nodes are this machine's "
        "processes, or come by themselves).",
    )
    group.add(
        "--ray-address",
        default="",
        metavar="ADDRESS",
        help="The Ray cluster: HOST:PORT, or ray://HOST:PORT from outside (default: RAY_ADDRESS, else the "
        "cluster of this machine).",
    )
    group.add(
        "--ray-resources",
        default="",
        metavar="NAME=N,...",
        help="What each node takes of the cluster, as CPU=4,GPU=1; memory is in bytes (default: one CPU for each "
        "worker).",
    )
    group.add(
        "--ray-env",
        default="",
        metavar="NAME[=VALUE],...",
        help="Variables for the workers, over those of Ray's machines; without a value, this command's.",
    )
    group.add(
        "--ray-working-dir",
        default="",
        metavar="DIR",
        help="Directory that Ray copies to each node, where the workers then start (default: this directory "
        "where it exists, else that of Ray's workers).",
    )


def _add_checks(group: OptionGroup) -> None:
    group.add_switch(
        "--network-check",
        help="Check each node, and the network between nodes, before it trains; exclude faulty "
        "nodes.",
    )
    group.add_switch(
        "--exclude-straggler",
        help="Like --network-check; also exclude nodes that the check finds slow.",
    )
    group.add(
        "--precheck",
        kind=int,
        default=0,
        choices=[0, 1, 2],
        help="0 checks nothing; 1 and 2 are the same as --network-check (default: %(default)s).",
    )
    group.add_switch(
        "--save-at-breakpoint", help="Persist the newest memory checkpoint when a worker fails."
    )
    group.add_switch(
        "--survive",
        help="When a replica is lost, the others train on in their own processes, and it joins them again.",
    )


def _add_tuning(group: OptionGroup) -> None:
    group.add_switch(
        "--auto-config",
        help="Choose --nnodes and --nproc-per-node from the machine and its cluster and print the choice; "
        "options on the command line stay.",
    )
    group.add_switch(
        "--auto-tunning",
        "--auto-tuning",
        help="Tune the loaders and micro-batches of DLRover's classes from measurements.",
    )


def _add_original(group: OptionGroup) -> None:
    group.add_switch(
        "--comm-perf-test", help="Like --network-check, which measures the network, too."
    )
    group.add_switch(
        "--numa-affinity",
        help="Like --numa-binding node, on a machine with accelerators.",
    )
    group.add(
        "--membind-policy",
        default="none",
        choices=["none", "preferred", "bind"],
        help="No effect: a bound worker's memory is near its processors because it allocates it there.",
    )
    group.add(
        "--training-port",
        kind=int,
        metavar="PORT",
        help="No effect: workers inherit the launcher's environment, with the ports of collectives.",
    )
    group.add(
        "--ucp-device-type",
        metavar="DEVICE",
        help="No effect: checkpoints fit any number of ranks without a conversion.",
    )


def _comma_separated(text: str) -> list[str]:
    """Return the items of a comma-separated list; ``,,`` is a comma within an item."""
    items = [""]
    for index, piece in enumerate(text.split(",,")):
        first, *rest = piece.split(",")
        items[-1] += first if index == 0 else f",{first}"
        items += rest
    return items
