"""``dlrover roles``: run a job of several roles; its status, its end and the use of its time."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from dlrover import config
from dlrover._util import cgroup
from dlrover.cli import jobs
from dlrover.cli.cluster import submit
from dlrover.cli.cluster.kube import Kubeconfig, extra
from dlrover.cli.output import Form, Output, print_table
from dlrover.cli.run.nodes import machine_memory
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.roles.loading import load, tls_of
from dlrover.roles.messages import weights_in_words
from dlrover.roles.spec import RoleKind, RolesConfig, RolesJob, RoleSpec
from dlrover.spec.events import Event
from dlrover.spec.job import Limits
from dlrover.spec.jobdir import JobDir
from dlrover.spec.outcome import CAUSES, Outcome
from dlrover.spec.words import counted, gib

if TYPE_CHECKING:
    from dlrover.dashboard.inspect.roles import RolesReport
    from dlrover.roles.machine.use import Use

PLATFORMS = ("local", "ray", "kubernetes")
AWAY, AGAIN = 60.0, 0.5
"""Seconds that a follower waits for a coordinator that is away, and between its attempts to reach it."""


def roles(  # noqa: PLR0913 - each is an option of the command
    file: Annotated[str, typer.Argument(metavar="FILE", help="The job: a .py file that makes a "
                                        "dlrover.roles.Job named job, or the same as .yaml.")],
    platform: Annotated[str, typer.Option(help="Where the roles run: local, on this machine; ray, on a Ray "
                                      "cluster; kubernetes, as an ElasticJob.")] = "local",
    ray_address: Annotated[str, typer.Option(help="HOST:PORT of the Ray cluster that this machine is part of "
                                             "(default: RAY_ADDRESS, else the cluster of this machine).")] = "",
    ray_working_dir: Annotated[str, typer.Option(help="Directory with the job's scripts and modules that Ray copies "
                                                 "to each node.")] = "",
    image: Annotated[str, typer.Option(help="Image of all roles on Kubernetes, with what is beside FILE.")] = "",
    working_dir: Annotated[str, typer.Option(help="Directory of the image with what is beside FILE (default: the "
                                             "image's own working directory).")] = "",
    journal_claim: Annotated[str, typer.Option(help="PersistentVolumeClaim that keeps the coordinator's journal "
                                               "when its pod is lost.")] = "",
    tls: Annotated[bool, typer.Option("--tls", help="On Kubernetes: encrypt connections with TLS, with certificates of "
                                      "the job's own. Elsewhere the settings tls_cert, tls_key and tls_ca do.")] = False,
    namespace: Annotated[str, typer.Option(help="Namespace on Kubernetes; default: that of the kubeconfig.")] = "",
    kubeconfig: Kubeconfig = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the ElasticJob without creating it.")] = False,
    job_dir: Annotated[str, typer.Option("--job-dir", help="Directory for the job's journal, logs and roles.")] = "",
    lifeline_fd: Annotated[int, typer.Option(hidden=True)] = -1,
    output: Output = Form.TEXT,
) -> None:  # fmt: skip
    """Run a job of several roles, such as driver, trainer and rollout; each fails and restarts alone."""
    from dlrover.cli.cluster import rolesonray  # noqa: PLC0415 - loads grpc
    from dlrover.cli.run.run import show  # noqa: PLC0415

    if platform not in PLATFORMS:
        raise ConfigurationError(f"--platform {platform}: must be local, ray or kubernetes.")
    where = Where(image, working_dir, journal_claim, tls, namespace, kubeconfig, dry_run)
    where.check(platform)
    job = load(file)
    if platform == "kubernetes":
        rolesonray.refuse(ray_address, ray_working_dir)
        if job_dir:
            raise ConfigurationError(
                f"--job-dir {job_dir}: excludes --platform kubernetes, whose pods have their own."
            )
        _submit(job, where, output)
        return
    if platform == "ray":
        content = rolesonray.content(job, ray_address, ray_working_dir, config.environ())
    else:
        rolesonray.refuse(ray_address, ray_working_dir)
        check_here(job)
        content = RolesConfig(job=job)
    outcome = run(content, job_dir, lifeline_fd)
    show(outcome, output.value)
    raise typer.Exit(outcome.exit_code)


def check_here(job: RolesJob) -> None:
    """Refuse a job that needs more than this machine has; name what each role needs.

    Raises:
        ConfigurationError: the cores, the memory or the accelerators do not suffice.
    """
    from dlrover import accelerators  # noqa: PLC0415 - slow to import

    gpus = len(accelerators.present().device_files())
    check_size(job, cgroup.cores(), machine_memory(), gpus)


def check_size(job: RolesJob, cores: float, memory: int, gpus: int) -> None:
    """Refuse a job that needs more cores, bytes of memory or accelerators than these; roles of a group take turns."""
    for what, has, needs, words in (
        ("cores", cores, lambda role: role.size.cpu, "{:g}".format),
        ("of memory", memory, lambda role: float(role.size.memory), gib),
        ("GPUs", gpus, lambda role: role.gpus, "{:g}".format),
    ):
        wanted = {role.name: role.most * needs(role) for role in job.roles if needs(role)}
        if _together(job, wanted) > has:
            each = ", ".join(
                f"{name} {job.role(name).most} x {words(needs(job.role(name)))}" for name in wanted
            )
            raise ConfigurationError(
                f"resources: the roles need {words(_together(job, wanted))} {what}, and this machine has "
                f"{words(has)}: {each}."
            )


def _together(job: RolesJob, wanted: dict[str, float]) -> float:
    """Return the sum over groups of what their largest role wants."""
    groups: dict[str, float] = {}
    for name, amount in wanted.items():
        group = _group(job.role(name))
        groups[group] = max(groups.get(group, 0.0), amount)
    return sum(groups.values())


def _group(role: RoleSpec) -> str:
    return f"group {role.collocate}" if role.collocate else role.name


class Where(NamedTuple):
    """Options of a job on Kubernetes."""

    image: str
    working_dir: str
    journal_claim: str
    tls: bool
    namespace: str
    kubeconfig: str
    dry_run: bool

    def check(self, platform: str) -> None:
        """Refuse options of Kubernetes for another platform.

        Raises:
            ConfigurationError: one is given.
        """
        for name, value in self._asdict().items():
            if value and platform != "kubernetes":
                flag = f"--{name.replace('_', '-')}" + f" {value}" * (value is not True)
                raise ConfigurationError(f"{flag}: needs --platform kubernetes.")


def _submit(job: RolesJob, where: Where, output: Form) -> None:
    """Create the ElasticJob of a job, or show it."""
    with extra():
        import httpx2  # noqa: F401, PLC0415 - needs the extra
        import yaml  # noqa: F401, PLC0415

        from dlrover.cli.cluster import rolesonkubernetes  # noqa: PLC0415

    master = {"journalClaim": where.journal_claim, "tls": where.tls}
    made = rolesonkubernetes.manifest(job, where.image, where.working_dir, master)
    if where.namespace:
        made["metadata"]["namespace"] = where.namespace
    submit.create(made, where.kubeconfig, output, dry_run=where.dry_run)


def run(content: RolesConfig, directory: str, lifeline_fd: int = -1) -> Outcome:
    """Run a job to its end, or to that of the process whose lifeline is given.

    Raises:
        ConfigurationError: the directory cannot be used.
        InfrastructureError: the coordinator cannot be kept alive.
    """
    from dlrover.cli.run.supervisor import Supervisor  # noqa: PLC0415 - loads grpc
    from dlrover.roles import client  # noqa: PLC0415

    job = content.job
    logging.basicConfig(format="dlrover: %(message)s", level=logging.WARNING)
    env = config.environ()
    content = msgspec.structs.replace(content, tls=(tls := tls_of(env)))
    if tls.ca:  # the launchers of roles may have other working directories
        paths = {"TLS_CERT": tls.cert, "TLS_KEY": tls.key, "TLS_CA": tls.ca}
        env |= {f"{config.ENV_PREFIX}{name}": path for name, path in paths.items()}
    job_dir = jobs.create(env, job.name, directory)
    with jobs.locked(job_dir):
        jobs.write(job_dir, job_dir.roles, msgspec.json.encode(content))
        jobs.write_token(job_dir, secrets.token_hex(16))
        print(f"dlrover: job {job.name} in {job_dir.path}", file=sys.stderr, flush=True)
        supervisor = Supervisor(job_dir, env, lifeline_fd, connect=client.connect)
        supervisor.add_coordinator()
        ends = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
        patience = max(role.shutdown_timeout for role in job.roles)
        outcome = asyncio.run(supervisor.run(ends, patience, Limits().release_grace))
    return msgspec.structs.replace(outcome, job_dir=str(job_dir.path))


# ---- dlrover status, stop and goodput of such a job


def status(job_dir: JobDir) -> RolesReport:
    """Return the status of a job: from its coordinator, or from its journal once that is gone."""
    from dlrover.dashboard.inspect.roles import report  # noqa: PLC0415 - loads grpc

    return asyncio.run(report(job_dir))


def render_status(report: RolesReport, console: Console) -> None:
    """Print the status as text."""
    status = report.status
    rest = f": {status.phase}; {status.seconds:.0f} s"
    console.print(Text.assemble((status.name, "bold"), rest))
    if not report.coordinator_running and report.outcome is None:
        console.print("The coordinator does not answer; this is where its journal ends.")
    if report.outcome is not None:
        console.print(
            f"Exit code {report.outcome.exit_code}: {report.outcome.reason}", soft_wrap=True
        )
    rows = [
        ["role", "kind", "status", "restarts", "instance", "state", "phase", "weights", "last end"]
    ]
    for role in status.roles:
        waits = f" for {', '.join(role.waits_for)}" if role.waits_for else ""
        first = (role.name, role.kind, f"{role.status}{waits}", str(role.restarts))
        for number, one in enumerate(role.instances):
            using = ", ".join(f"{name} {version}" for name, version in one.weights.items())
            cells = first if number == 0 else ("",) * len(first)
            phase = f"{one.phase} {one.phase_seconds:.0f} s" if one.phase else "-"
            rows.append([*cells, str(one.index), one.state, phase, using or "-", one.reason or "-"])
        if not role.instances:
            rows.append([*first, "-", "-", "-", "-", "-"])
    print_table(rows)
    for weights in status.weights:
        lost = f"; version {weights.lost} was lost with its keeper" if weights.lost else ""
        version = (weights.version or ("none now" if lost else "none yet")) + lost
        console.print(
            f"The {weights_in_words(weights.name)} of {weights.role}: version {version}.",
            highlight=False,
        )
    for name, queue in status.queues.items():
        again = f", {queue.redelivered} redelivered" if queue.redelivered else ""
        console.print(
            f"Queue {name}: {queue.waiting} waiting, {queue.leased} leased of {queue.size}; {queue.done} of "
            f"{counted(queue.added, 'item')} done{again}.",
            highlight=False,
        )
    console.print(f"Job directory: {report.job_dir}", highlight=False, soft_wrap=True)


async def follow(job_dir: JobDir, show: Callable[[Event], None]) -> None:
    """Show all events of a job, past and new, until it ends; the death of its coordinator is waited out.

    Raises:
        InfrastructureError: the coordinator stays away, and the job has not ended.
    """
    from dlrover.dashboard.inspect import queries  # noqa: PLC0415
    from dlrover.roles.client import connect  # noqa: PLC0415

    seen, heard = 0, time.monotonic()
    while not job_dir.outcome.exists():
        try:
            async with connect(job_dir) as coordinator:
                async for events in coordinator.events(seen):
                    heard = math.inf  # the coordinator is there
                    for event in events:
                        seen = event.seq
                        show(event)
        except InfrastructureError:
            heard = min(heard, time.monotonic())
            if time.monotonic() - heard > AWAY:
                raise
        await asyncio.sleep(AGAIN)
    for event in queries.events(job_dir)[seen:]:
        show(event)  # events of the last moment


def stop(job_dir: JobDir, reason: str) -> None:
    """Ask the coordinator of a job to end it.

    Raises:
        InfrastructureError: it cannot be reached.
    """
    from dlrover.dashboard.inspect import roles as inspected  # noqa: PLC0415 - loads grpc

    asyncio.run(inspected.stop(job_dir, reason))


def goodput(job_dir: JobDir) -> dict[str, object]:
    """Return the use of the time of each role, by its name: the goodput of one that trains, the `Use` of another.

    It is None for a role whose job has not begun.
    """
    from dlrover.cli.cluster import rolesonray  # noqa: PLC0415 - loads grpc
    from dlrover.dashboard.inspect import goodput as ledger  # noqa: PLC0415
    from dlrover.roles.client import load_config  # noqa: PLC0415
    from dlrover.roles.coordinator.jobs import directory_of  # noqa: PLC0415

    found: dict[str, object] = {}
    of_job = load_config(job_dir)
    states = {role.name: role for role in status(job_dir).status.roles}
    for role in of_job.job.roles:
        if role.kind is not RoleKind.ELASTIC:
            state = states.get(role.name)
            found[role.name] = state.use if state is not None and state.attempt else None
            continue
        own = directory_of(job_dir.path, role.name)
        if of_job.platform == "ray" and own.job.exists() and not own.journal.exists():
            own = rolesonray.copied(own, of_job.ray_address)
        found[role.name] = ledger.report(own).goodput if own.journal.exists() else None
    return found


def render_goodput(found: dict[str, object], _: Console) -> None:
    """Print the use of the time by role."""
    from dlrover.roles.machine.use import Use  # noqa: PLC0415
    from dlrover.spec.outcome import Goodput  # noqa: PLC0415

    rows = [["role", "goodput", "seconds", "largest losses"]]
    for name, use in found.items():
        if isinstance(use, Use):
            rows.append([name, *_cells(use)])
            continue
        if not isinstance(use, Goodput):
            rows.append([name, "not started", "-", "-"])
            continue
        losses = sorted(
            (
                (use.seconds.get(cause.value, 0.0), cause)
                for cause in CAUSES
                if cause.value != "productive"
            ),
            key=lambda loss: -loss[0],
        )
        words = ", ".join(
            f"{cause.label} {seconds:.1f} s" for seconds, cause in losses[:3] if seconds
        )
        rows.append([name, use.in_words(), f"{use.wall_seconds:.1f}", words or "-"])
    print_table(rows)


def _cells(use: Use) -> tuple[str, str, str]:
    """Return the cells of a role that does not train: how much it works, all seconds, and the others by size."""
    if not use.seconds:
        return "not known yet", "-", "-"
    share = 100 * use.working / use.seconds
    losses = {"idle": use.idle, "starting": use.starting, "away": use.away}
    words = ", ".join(
        f"{what} {seconds:.1f} s"
        for what, seconds in sorted(losses.items(), key=lambda loss: -loss[1])
        if seconds
    )
    return f"works {share:.1f} % of its instances' time", f"{use.seconds:.1f}", words or "-"
