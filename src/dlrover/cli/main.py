"""``dlrover``: commands to inspect, scale and end a job, check a machine and run a master."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import re
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import typer

from dlrover import __version__, config
from dlrover._util import files, procs
from dlrover.cli import chaos, ckpt, completion, dashboard, embedding, jobs, roles, strategy
from dlrover.cli.cluster import brain, operator, submit
from dlrover.cli.output import Form, Output, print_json, print_line, show, terminal, write_file
from dlrover.cli.run.launchspec import parse_rdzv_conf
from dlrover.cli.run.nodes import parse_nnodes
from dlrover.cli.selecting import Dir, of_job, refuse_roles
from dlrover.errors import ConfigurationError, DLRoverError, ExitCode, InfrastructureError
from dlrover.spec.events import Event
from dlrover.spec.job import JobSpec
from dlrover.spec.jobdir import JobDir, MasterConfig
from dlrover.spec.node import WORKER
from dlrover.spec.words import printable_lines

logger = logging.getLogger(__name__)

PROG = "dlrover"
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""A wrong command line. Click's class, or that of the copy of click that newer versions of typer contain."""

app = typer.Typer(
    name=PROG,
    help="Inspect, scale and stop DLRover jobs, check this machine, or run a job's master.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(brain.app)
app.add_typer(ckpt.app)
app.add_typer(embedding.app)
app.command(context_settings={"allow_interspersed_args": False})(chaos.chaos)
app.command()(completion.completion)
app.command()(dashboard.dashboard)
app.command()(operator.operator)
app.command()(roles.roles)
app.command()(strategy.strategy)
app.command()(submit.submit)


Reason = Annotated[str, typer.Option(help="Reason, recorded in the job's events.")]


@app.command()
@of_job(roles=True)
def status(job: JobDir, output: Output = Form.TEXT) -> None:
    """Show a job's phase, nodes and steps, and what it waits for."""
    from dlrover.dashboard.inspect import queries  # noqa: PLC0415 - loads grpc

    if job.roles.exists():
        show(roles.status(job), output, roles.render_status)
    else:
        show(queries.status(job), output, queries.render_status, queries.named_status)


@app.command()
@of_job()
def nodes(job: JobDir, output: Output = Form.TEXT) -> None:
    """Show the memory, cores and accelerators that each node of a job uses and has."""
    from dlrover.dashboard.inspect import queries  # noqa: PLC0415 - loads grpc

    found = queries.status(job).status.nodes
    show(found, output, queries.render_nodes, queries.named_nodes)


@app.command()
@of_job(ray=False)
def top(job: JobDir) -> None:
    """Show a job's nodes and ranks live on the terminal: q quits, arrows move, r changes to ranks."""
    from dlrover.cli import top as live  # noqa: PLC0415 - loads grpc

    live.top(job, terminal())


@app.command()
@of_job(ray=False)
def drain(
    job: JobDir,
    node: Annotated[int, typer.Argument(help="Id of the node, as dlrover nodes shows it.")],
    reason: Reason = "dlrover drain",
    output: Output = Form.TEXT,
) -> None:
    """Put another node in the place of one, which trains on until then."""
    from dlrover.dashboard.inspect import queries  # noqa: PLC0415 - loads grpc

    reply = {"node": node, "message": queries.drain(job, node, reason)}
    show(reply, output, lambda *_: print(reply["message"]))


@app.command()
@of_job(roles=True)
def events(
    job: JobDir,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the job until it ends.")
    ] = False,
    output: Output = Form.TEXT,
) -> None:
    """Show a job's events, one per line (with JSON: one object per line)."""
    from dlrover.dashboard.inspect import queries  # noqa: PLC0415 - loads grpc

    def show_event(event: Event) -> None:
        if output is Form.JSON:
            print(msgspec.json.encode(event).decode(), flush=True)
        else:
            print_line(queries.line(event))

    if follow and not job.outcome.exists():
        asyncio.run((roles if job.roles.exists() else queries).follow(job, show_event))
    else:
        for event in queries.events(job):
            show_event(event)


@app.command()
@of_job(roles=True)
def goodput(
    job: JobDir,
    html: Annotated[
        str, typer.Option(metavar="FILE", help="Write the job's page, frozen as one file.")
    ] = "",
    trace: Annotated[
        str, typer.Option(metavar="FILE", help="Write a trace for chrome://tracing or Perfetto.")
    ] = "",
    output: Output = Form.TEXT,
) -> None:
    """Show where the time of a job's nodes went, and what each incident cost."""
    from dlrover.dashboard import content  # noqa: PLC0415
    from dlrover.dashboard.inspect import goodput as ledger, trace as tracing  # noqa: PLC0415

    if html or trace:
        refuse_roles(job, "--html" if html else "--trace")
    if job.roles.exists():
        show(roles.goodput(job), output, roles.render_goodput)
        return
    found = ledger.report(job)
    if html:
        write_file("--html", html, content.frozen(job, found))
    if trace:
        write_file("--trace", trace, tracing.trace(found))
    show(found.content(), output, lambda _, console: ledger.render(found, console))


@app.command()
@of_job()
def plan(job: JobDir, output: Output = Form.TEXT) -> None:
    """Show the auto-scaler's plans for a job: reasons, predictions, measurements and outcomes."""
    from dlrover.dashboard.inspect import plans  # noqa: PLC0415

    show(plans.plans(job), output, lambda found, _: print(plans.render(found)))


@app.command()
@of_job()
def stacks(job: JobDir, output: Output = Form.TEXT) -> None:
    """Show where every rank is now: ranks grouped by place, with the stacks of one rank per group."""
    from dlrover.dashboard.inspect import queries  # noqa: PLC0415 - loads grpc

    show(queries.stacks(job), output, lambda found, _: print(found.report or "No workers run."))


@app.command()
@of_job()
def scale(
    job: JobDir,
    nodes: Annotated[int, typer.Option(help="Wanted number of nodes of the role.")],
    role: Annotated[
        str, typer.Option(help="worker, or ps for the servers of a job with --servers.")
    ] = WORKER,
    reason: Reason = "dlrover scale",
    output: Output = Form.TEXT,
) -> None:
    """Change the number of nodes of a running job."""
    from dlrover.dashboard.inspect import queries  # noqa: PLC0415 - loads grpc
    from dlrover.master.files import read_outcome  # noqa: PLC0415

    outcome = read_outcome(job.outcome)
    if outcome is not None:
        raise ConfigurationError(f"The job in {job.path} has ended: {outcome.reason}")
    sentence = queries.scale(job, nodes, reason, role)
    reply = {"job_dir": str(job.path), "role": role, "nodes": nodes, "message": sentence}
    show(reply, output, lambda *_: print(sentence))


@app.command()
@of_job(roles=True)
def stop(
    job: JobDir,
    reason: Reason = "The job was stopped by dlrover stop.",
    output: Output = Form.TEXT,
) -> None:
    """Stop a job: its workers get SIGTERM and time to exit."""
    from dlrover.dashboard.inspect import queries  # noqa: PLC0415 - loads grpc
    from dlrover.master.files import read_outcome  # noqa: PLC0415

    outcome = read_outcome(job.outcome)
    if outcome is not None:
        sentence = f"The job in {job.path} has ended already: {outcome.reason}"
    else:
        (roles if job.roles.exists() else queries).stop(job, reason)
        sentence = f"The job in {job.path} is being stopped."
    reply = {"job_dir": str(job.path), "stopping": outcome is None, "message": sentence}
    show(reply, output, lambda *_: print(sentence))


@app.command()
def doctor(output: Output = Form.TEXT) -> None:
    """Check this machine for what training needs; print a sentence for each finding."""
    from dlrover.cli.host.doctor import doctor as examine  # noqa: PLC0415

    raise typer.Exit(examine(output, config.environ(), terminal()))


@app.command()
def diagnose(
    file: Annotated[
        str, typer.Argument(metavar="[FILE]", help="Log file; - or nothing for standard input.")
    ] = "",
    job_dir: Dir = "",
    rules: Annotated[str, typer.Option(help="TOML file with rows for the table of causes.")] = "",
    output: Output = Form.TEXT,
) -> None:
    """Explain from a log why a program failed, or why a job's workers did, and what to do."""
    from dlrover.cli import diagnose as diagnosing  # noqa: PLC0415 - slow to import
    from dlrover.master.diagnosis_rules import load_own  # noqa: PLC0415

    env = config.environ()
    own = load_own(rules or config.settings(env).diagnosis_rules, {})
    if job_dir:
        if file:
            raise ConfigurationError(f"{file}: excludes --job-dir; give the log file or the job.")
        job = jobs.find(env, "", job_dir)
        refuse_roles(job, "dlrover diagnose")
        found = diagnosing.of_job(job, own)
    else:
        found = (diagnosing.of_log(file, own),)
    none = f"No worker failed or hung in {job_dir}; dlrover events shows what happened there."
    show(found, output, lambda all_, _: print("\n\n".join(map(diagnosing.render, all_)) or none))


@app.command()
def check(
    directory: Annotated[
        str,
        typer.Option(
            help="Directory on the disk to check; by default the one for temporary files."
        ),
    ] = "",
    accelerator: Annotated[
        str, typer.Option(help="Kind of accelerator, as for dlrover-run; detected by default.")
    ] = "",
    config_file: Annotated[str, typer.Option("--config", help="Settings file (TOML).")] = "",
    output: Output = Form.TEXT,
) -> None:
    """Measure this machine's device, memory, disk and network; in a launcher's job, all its machines.

    Exits with 3 if a part is at fault.
    """
    from dlrover.cli.host import check as checking  # noqa: PLC0415

    env = config.environ()
    limits = config.settings(env, config_file).limits
    report = checking.check(env, limits, directory, accelerator)
    if output is Form.JSON:
        print_json(report)
    else:
        place = checking.find_place(env)
        if place is None or place.local_rank == 0:
            checking.render(report, terminal())
        print("\n".join(checking.verdict(report)), flush=True)
    raise typer.Exit(report.exit_code)


@app.command()
def master(  # noqa: PLR0913 - each is an option of the command
    nnodes: Annotated[str, typer.Option(help="Nodes of the job: N or MIN:MAX.")] = "1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 for any free one.")
    ] = 29400,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",  # noqa: S104
    name: Annotated[str, typer.Option(help="Name of the job.")] = "job",
    node_unit: Annotated[int, typer.Option(help="Train with a multiple of N nodes only.")] = 1,
    max_restarts: Annotated[int, typer.Option(help="As for dlrover-run.")] = 0,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="Port for Prometheus metrics; 0 for none.")
    ] = None,
    network_check: Annotated[
        bool, typer.Option("--network-check", help="As for dlrover-run.")
    ] = False,
    exclude_straggler: Annotated[
        bool, typer.Option("--exclude-straggler", help="As for dlrover-run.")
    ] = False,
    platform: Annotated[
        str,
        typer.Option(
            help="Platform that launches the nodes: kubernetes; by default nodes come by themselves."
        ),
    ] = "",
    rdzv_conf: Annotated[str, typer.Option(help="Settings: key=value,key=value.")] = "",
    config_file: Annotated[str, typer.Option("--config", help="Settings file (TOML).")] = "",
    job_dir: Dir = "",
    output: Output = Form.TEXT,
) -> None:
    """Run one job's master here, for nodes that are started with DLROVER_MASTER_ADDR.

    The token is DLROVER_TOKEN, else the one in the job directory, else a new one. With --platform kubernetes,
    the job is the ElasticJob that DLROVER_KUBERNETES_JOB names, and the master makes its pods.
    """
    from dlrover.master.app import main as run_master  # noqa: PLC0415 - loads grpc
    from dlrover.master.compose import Request, master_config  # noqa: PLC0415

    env = config.environ()
    settings = config.settings(env, config_file, parse_rdzv_conf(rdzv_conf))
    min_nodes, max_nodes = parse_nnodes(nnodes)
    if platform not in ("", "kubernetes"):
        raise ConfigurationError(f"--platform {platform}: must be kubernetes or empty.")
    if metrics_port is not None:
        settings = msgspec.structs.replace(settings, metrics_port=metrics_port)
    if platform:
        raise typer.Exit(_in_pod(env, settings, host, port, job_dir, output))
    job = JobSpec(
        name=name,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_unit=node_unit,
        max_restarts=max_restarts,
        node_check=network_check,
        exclude_stragglers=exclude_straggler,
    )

    def run(directory: JobDir) -> int:
        return run_master(["--job-dir", str(directory.path)])

    raise typer.Exit(
        _serve(env, master_config(Request(job=job), settings, host, port), job_dir, output, run)
    )


def _serve(
    env: Mapping[str, str],
    content: MasterConfig,
    job_dir: str,
    output: Output,
    run: Callable[[JobDir], int],
    waiting: Callable[[str], None] = logger.warning,
) -> int:
    """Prepare the job directory of a master, and ``run`` the master there; return its exit code.

    ``waiting`` is called with a sentence if the directory has to be waited for.
    """
    directory = jobs.create(env, content.job.name, job_dir or env.get("DLROVER_JOB_DIR", ""))
    signal.signal(signal.SIGTERM, procs.leave)
    patience = content.job.limits.master_timeout
    with jobs.locked(directory, resume=True, patience=patience, waiting=waiting):
        jobs.write(directory, directory.job, msgspec.json.encode(content))
        token = jobs.given_token(env) or jobs.kept_token(directory) or secrets.token_hex(16)
        jobs.write_token(directory, token)
        if output is Form.JSON:
            shown = {"job_dir": str(directory.path), "port": content.port}
            print(msgspec.json.encode(shown).decode())
        else:
            print(f"The token is in {directory.token}; give it to the nodes as DLROVER_TOKEN.")
        sys.stdout.flush()
        return run(directory)


def _in_pod(
    env: Mapping[str, str],
    settings: config.Settings,
    host: str,
    port: int,
    job_dir: str,
    output: Output,
) -> int:
    """Run the master or the coordinator of an ElasticJob; return the exit code.

    By the code, the operator learns whether and how the job ended. An unexpected error must not count as one of the
    program, as by Python's own exit code, nor a failing volume as the end of a job that its next master continues.
    """
    from dlrover.kubernetes.platform import job as elastic_job  # noqa: PLC0415 - an extra
    from dlrover.master.compose import master_config  # noqa: PLC0415

    try:
        found = asyncio.run(elastic_job.fetch(env))
        if found.spec.roles:
            from dlrover.cli.cluster.rolesonkubernetes import coordinate  # noqa: PLC0415

            return coordinate(found, env, job_dir, port)
        request = elastic_job.request(found)
        content = master_config(request, settings, env.get("POD_IP") or host, port)
        waiting = functools.partial(elastic_job.report_wait, found)
        return _serve(env, content, job_dir, output, _run_in_pod, waiting)
    except InfrastructureError as error:
        print(f"dlrover: {printable_lines(str(error))}", file=sys.stderr)
        return ExitCode.INTERNAL
    except DLRoverError:
        raise
    except Exception:
        logger.exception("The master ends")
        return ExitCode.INTERNAL


def _run_in_pod(directory: JobDir) -> int:
    """Run a master in its pod; return the exit code."""
    from dlrover.master.app import main as run_master  # noqa: PLC0415 - loads grpc
    from dlrover.master.files import read_outcome  # noqa: PLC0415

    try:
        # A pod's log is what its users see.
        code = run_master(["--job-dir", str(directory.path), "--stderr"])
    except Exception:  # the job may have ended before it
        logger.exception("The master ends")
        code = ExitCode.INFRASTRUCTURE
    outcome = read_outcome(directory.outcome)
    if outcome is None:
        return ExitCode.INTERNAL if code == ExitCode.INFRASTRUCTURE else code
    print(outcome.reason, file=sys.stderr)  # the end of the pod's log
    return outcome.exit_code


def _version(show: bool) -> None:
    if show:
        print(f"dlrover {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Handle the options before the command."""


def main() -> int:
    """Run ``dlrover``; return its exit code."""
    gc.freeze()  # what is imported stays, and the process's end need not look at it
    procs.open_standard_streams()
    try:
        code = app(prog_name=PROG, standalone_mode=False)
    except USAGE_ERROR as error:
        return _refused(error)
    except DLRoverError as error:
        print(f"dlrover: {printable_lines(str(error))}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in files.NO_ROOM:
            raise
        what = error.filename or "The output"
        print(f"dlrover: {what} cannot be written: {error.strerror}.", file=sys.stderr)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
        return ExitCode.INFRASTRUCTURE
    return code if isinstance(code, int) else ExitCode.SUCCESS


def _refused(error: Any) -> int:
    """Print what is wrong with a command line; return the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return ExitCode.USAGE
    message = " ".join(error.format_message().split()).rstrip(".")
    message = re.sub(r"\.? Did you mean (.*)\?$", r" (did you mean \1?)", message)
    command = error.ctx.command_path if error.ctx is not None else PROG
    print(f"{PROG}: {printable_lines(message)}; see {command} --help", file=sys.stderr)
    return ExitCode.USAGE


if __name__ == "__main__":
    sys.exit(main())
