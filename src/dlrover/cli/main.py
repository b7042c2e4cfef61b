"""``dlrover``: the verbs for looking at a job, ending it, checking a machine and running a master."""

from __future__ import annotations

import asyncio
import secrets
import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from dlrover import __version__, config
from dlrover._util import files
from dlrover.cli import ckpt, jobs
from dlrover.cli.launchspec import parse_nnodes, parse_rdzv_conf
from dlrover.cli.output import Form, Output, print_json
from dlrover.errors import DLRoverError, ExitCode
from dlrover.spec.events import Event
from dlrover.spec.job import JobSpec
from dlrover.spec.jobdir import MasterConfig, TlsFiles

app = typer.Typer(
    name="dlrover",
    help="Look at a DLRover job, end it, check this machine, or run a job's master.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(ckpt.app)


Job = Annotated[
    str, typer.Argument(metavar="[JOB]", help="Name of a job; the last one if it is left out.")
]
Dir = Annotated[str, typer.Option("--job-dir", help="Directory of the job, instead of its name.")]


@app.command()
def status(job: Job = "", job_dir: Dir = "", output: Output = Form.TEXT) -> None:
    """Show where a job stands: its phase, its nodes, its steps, and what it waits for."""
    from dlrover.cli import queries  # noqa: PLC0415 - loads grpc

    report = queries.status(jobs.find(config.environ(), job, job_dir))
    if output is Form.JSON:
        print_json(report)
    else:
        queries.render_status(report, Console())


@app.command()
def events(
    job: Job = "",
    job_dir: Dir = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")
    ] = False,
    output: Output = Form.TEXT,
) -> None:
    """Show what happened to a job, one line for each event (with JSON: one object a line)."""
    from dlrover.cli import queries  # noqa: PLC0415

    found = jobs.find(config.environ(), job, job_dir)

    def show(event: Event) -> None:
        text = msgspec.json.encode(event).decode() if output is Form.JSON else queries.line(event)
        print(text, flush=True)

    if follow and not found.outcome.exists():
        asyncio.run(queries.follow(found, show))
    else:
        for event in queries.events(found):
            show(event)


@app.command()
def stop(
    job: Job = "",
    job_dir: Dir = "",
    reason: Annotated[
        str, typer.Option(help="Why; it is kept with the job's events.")
    ] = "The job was stopped by dlrover stop.",
    output: Output = Form.TEXT,
) -> None:
    """End a job: its workers get SIGTERM and their time to leave."""
    from dlrover.cli import queries  # noqa: PLC0415
    from dlrover.master.app import read_outcome  # noqa: PLC0415

    found = jobs.find(config.environ(), job, job_dir)
    outcome = read_outcome(found.outcome)
    if outcome is not None:
        print(f"The job in {found.path} has ended already: {outcome.reason}")
        return
    queries.stop(found, reason)
    if output is Form.JSON:
        print(msgspec.json.encode({"job_dir": str(found.path), "stopping": True}).decode())
    else:
        print(f"The job in {found.path} is being stopped.")


@app.command()
def doctor(output: Output = Form.TEXT) -> None:
    """Check this machine for what training needs; a sentence for each finding."""
    from dlrover.cli.doctor import doctor as examine  # noqa: PLC0415

    raise typer.Exit(examine(output.value, config.environ(), Console()))


@app.command()
def master(  # noqa: PLR0913 - each is an option of the command
    nnodes: Annotated[str, typer.Option(help="Nodes of the job: N or MIN:MAX.")] = "1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.")] = 29400,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",  # noqa: S104
    name: Annotated[str, typer.Option(help="Name of the job.")] = "job",
    node_unit: Annotated[int, typer.Option(help="A world has a multiple of it.")] = 1,
    max_restarts: Annotated[int, typer.Option(help="As of dlrover-run.")] = 0,
    rdzv_conf: Annotated[str, typer.Option(help="Settings: key=value,key=value.")] = "",
    config_file: Annotated[str, typer.Option("--config", help="Settings file (TOML).")] = "",
    job_dir: Dir = "",
    output: Output = Form.TEXT,
) -> None:
    """Run one job's master here, for nodes that are started with DLROVER_MASTER_ADDR.

    Its token is DLROVER_TOKEN, or a fresh one that is printed.
    """
    from dlrover.master.app import main as run_master  # noqa: PLC0415 - loads grpc

    env = config.environ()
    settings = config.settings(env, config_file, parse_rdzv_conf(rdzv_conf))
    min_nodes, max_nodes = parse_nnodes(nnodes)
    job = JobSpec(
        name=name,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_unit=node_unit,
        max_restarts=max_restarts,
        limits=settings.limits,
    )
    tls = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)
    directory = jobs.create(env, name, job_dir or env.get("DLROVER_JOB_DIR", ""))
    with jobs.locked(directory, resume=True):
        content = MasterConfig(job=job, host=host, port=port, tls=tls, journal=settings.journal)
        files.write_atomically(directory.job, msgspec.json.encode(content), mode=0o600)
        token = env.get("DLROVER_TOKEN") or jobs.kept_token(directory) or secrets.token_hex(16)
        jobs.write_token(directory, token)
        if output is Form.JSON:
            print(msgspec.json.encode({"job_dir": str(directory.path), "port": port}).decode())
        else:
            print(f"The token is in {directory.token}; give it to the nodes as DLROVER_TOKEN.")
        sys.stdout.flush()
        code = run_master(["--job-dir", str(directory.path)])
    raise typer.Exit(code)


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
    """Options before the verb."""


def main() -> int:
    """Run ``dlrover``; its exit code."""
    try:
        app()
    except DLRoverError as error:
        print(f"dlrover: {error}", file=sys.stderr)
        return error.exit_code
    return ExitCode.SUCCESS


if __name__ == "__main__":
    sys.exit(main())
