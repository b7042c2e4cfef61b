"""``dlrover brain``: run the Brain, query its jobs and plans, and set quotas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlrover import config, extras
from dlrover.cli.output import Form, Output, show
from dlrover.errors import ConfigurationError
from dlrover.spec import brain as records
from dlrover.spec.jobdir import TlsFiles
from dlrover.spec.plan import Effect, NodeGroup
from dlrover.spec.words import counted

if TYPE_CHECKING:
    from dlrover.rpc.brain import BrainClient

GIB = 1 << 30
PORT = 29500
"""Default port of a Brain."""

app = typer.Typer(
    name="brain",
    help="Run the Brain, which plans the resources of jobs, or query it.",
    no_args_is_help=True,
)

Address = Annotated[
    str,
    typer.Option("--brain", help="Address of the Brain, HOST:PORT; by default the setting brain."),
]
TokenFile = Annotated[
    str, typer.Option(help="File with the Brain's token; by default DLROVER_BRAIN_TOKEN.")
]
Config = Annotated[str, typer.Option("--config", help="Settings file (TOML).")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of a job.")]

T = TypeVar("T")


@app.command()
def serve(  # noqa: PLR0913 - each is an option of the command
    database: Annotated[
        str, typer.Option(help="Database URL; by default SQLite in the user's state directory.")
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 for any free one.")
    ] = PORT,
    token_file: TokenFile = "",
    tenants: Annotated[
        str, typer.Option(help="Directory with a token for each tenant, in a file of its name.")
    ] = "",
    retention_days: Annotated[
        float,
        typer.Option(
            min=0.01, help="Days for which ended jobs, silent jobs and old samples are kept."
        ),
    ] = 90.0,
    monitor: Annotated[
        str, typer.Option(help="Cluster to monitor: kubernetes; by default none.")
    ] = "",
    kubeconfig: Annotated[str, typer.Option(help="Kubeconfig file of that cluster.")] = "",
    config_file: Config = "",
    output: Output = Form.TEXT,
) -> None:
    """Run the Brain until it gets SIGTERM or SIGINT."""
    with extras.needed("dlrover brain serve", "brain"):
        from dlrover.brain.app import BrainOptions, serve as run  # noqa: PLC0415 - an extra

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in ("httpx2", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    env = config.environ()
    settings = config.settings(env, config_file)
    own = config.state_dirs(env)[0] / "brain.db"
    url = database or env.get("DLROVER_BRAIN_DATABASE") or f"sqlite:///{own}"
    options = BrainOptions(
        database=url,
        token=token(token_file or settings.brain_token_file),
        host=host,
        port=port,
        tenants=tenants,
        tls=settings.tls,
        retention_days=retention_days,
        monitor=monitor,
        monitor_source=kubeconfig,
    )

    def ready(bound: int) -> None:
        if output is Form.JSON:
            print(msgspec.json.encode({"host": host, "port": bound}).decode(), flush=True)
        else:
            print(f"The Brain listens on {host}:{bound}.", flush=True)

    asyncio.run(run(options, ready))


@app.command()
def jobs(
    running: Annotated[bool, typer.Option("--running", help="Only those that run.")] = False,
    limit: Annotated[
        int, typer.Option(min=1, max=10_000, help="Largest number of jobs to show.")
    ] = 50,
    brain: Address = "",
    token_file: TokenFile = "",
    config_file: Config = "",
    output: Output = Form.TEXT,
) -> None:
    """List the jobs that the Brain knows, the latest first."""
    found = _ask(brain, token_file, config_file, lambda c: c.jobs(limit, running=running))
    show(found, output, _print_jobs)


@app.command()
def explain(
    job: JobId,
    brain: Address = "",
    token_file: TokenFile = "",
    config_file: Config = "",
    output: Output = Form.TEXT,
) -> None:
    """Show a job's plans and their reasons, with predictions beside measurements."""
    story = _ask(brain, token_file, config_file, lambda c: c.explain(job))
    show(story, output, _print_story)


@app.command("what-if")
def what_if(
    job: JobId,
    workers: Annotated[int, typer.Option(min=1, help="Worker nodes.")],
    servers: Annotated[
        int | None, typer.Option(min=1, help="Parameter servers; by default the present number.")
    ] = None,
    brain: Address = "",
    token_file: TokenFile = "",
    config_file: Config = "",
    output: Output = Form.TEXT,
) -> None:
    """Predict a job's throughput with other numbers of nodes. Changes nothing."""
    expected = _ask(brain, token_file, config_file, lambda c: c.effect(job, workers, servers))
    show(expected, output, lambda found, console: _print_expected(job, found, console))


@app.command()
def cluster(
    brain: Address = "",
    token_file: TokenFile = "",
    config_file: Config = "",
    output: Output = Form.TEXT,
) -> None:
    """Show the cluster's capacity, what is free, and the quotas of its queues."""
    found = _ask(brain, token_file, config_file, lambda c: c.cluster())
    show(found, output, _print_cluster)


@app.command()
def quota(
    queue: Annotated[str, typer.Argument(metavar="QUEUE", help="Name of a queue.")],
    limits: Annotated[
        str, typer.Argument(metavar="LIMITS", help="accelerator=64,cpu=512; - for no quota.")
    ],
    brain: Address = "",
    token_file: TokenFile = "",
    config_file: Config = "",
) -> None:
    """Set a limit on the resources that all jobs of a queue may use together."""
    from dlrover.rpc.brain import request_id  # noqa: PLC0415 - loads grpc

    report = records.SetQuota(request=request_id(), queue=queue, limits=_limits(limits))
    _ask(brain, token_file, config_file, lambda c: c.report(report))
    print(f"Queue {queue}: {limits if report.limits else 'no quota'}.")


def _limits(text: str) -> dict[str, float]:
    accepted = "accelerator, cpu (cores) and memory (bytes), as accelerator=64,cpu=512"
    limits = {}
    for pair in text.split(",") if text != "-" else []:
        name, _, amount = pair.partition("=")
        if (
            name not in ("accelerator", "cpu", "memory")
            or not amount.replace(".", "", 1).isdecimal()
        ):
            raise ConfigurationError(
                f"LIMITS {text}: {pair!r} is not accepted; it takes {accepted}."
            )
        limits[name] = float(amount)
    return limits


def token(path: str) -> str:
    """Return the Brain's token from a file, or from the environment without a path.

    Raises:
        ConfigurationError: there is no token, or the file is unreadable.
    """
    from dlrover.rpc import wire  # noqa: PLC0415 - loads grpc

    given = config.environ().get("DLROVER_BRAIN_TOKEN", "")
    if path:
        given = wire.token_in(path, "--token-file")
    if not given:
        raise ConfigurationError(
            "The Brain's token is missing: give --token-file, or set DLROVER_BRAIN_TOKEN."
        )
    return given


def _ask(
    address: str, token_file: str, config_file: str, ask: Callable[[BrainClient], Awaitable[T]]
) -> T:
    """Return the Brain's answer to a question."""
    from dlrover.rpc.brain import BrainClient  # noqa: PLC0415

    settings = config.settings(config.environ(), config_file)
    where = address or settings.brain or f"127.0.0.1:{PORT}"
    secret = token(token_file or settings.brain_token_file)

    async def run() -> T:
        async with BrainClient(where, secret, TlsFiles(ca=settings.tls_ca)) as client:
            return await ask(client)

    return asyncio.run(run())


# ---- text


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


def _print_jobs(rows: tuple[records.JobRow, ...], console: Console) -> None:
    """Print a line for each job."""
    if not rows:
        console.print("The Brain knows no job.")
        return
    table = Table("job", "name", "mode", "state", "size", "samples/s", "samples", "plans", box=None)
    for row in rows:
        table.add_row(
            row.job,
            row.description.name,
            row.description.mode,
            row.state,
            _counts(row.shape.groups) if row.shape else "-",
            f"{row.throughput:,.4g}" if row.throughput else "-",
            str(row.samples),
            str(row.plans),
        )
    console.print(table)


def _print_story(story: records.Story, console: Console) -> None:
    """Print a job, its measurements, and each plan with its outcome."""
    row = story.job
    ended = f": {row.reason}" if row.reason else ""
    rest = f" ({row.description.name}): {row.state}{ended}"
    console.print(Text.assemble((row.job, "bold"), rest), soft_wrap=True)
    _say(
        console,
        f"{row.description.strategy}, optimizeMode {row.description.mode}, {row.samples} samples"
        + (f", {_size(row.shape.groups)}, {row.throughput:,.4g} samples/s" if row.shape else ""),
    )
    end = story.outcome
    if end is not None and end.goodput is not None:
        made = f"{counted(end.steps, 'step')}, {counted(end.restarts, 'restart')}"
        _say(console, f"goodput {end.goodput.in_words()}, {made}")
    if not story.plans:
        console.print("It has had no plan.")
        return
    for record in story.plans:
        console.print()
        _print_plan(record, console)
    errors = [abs(record.error) for record in story.plans if record.error is not None]
    if errors:
        inside = sum(1 for record in story.plans if record.within)
        _say(
            console,
            f"\nPredictions: {len(errors)} measured, mean error {sum(errors) / len(errors):.1%}, "
            f"{inside} in their interval.",
        )


def _print_plan(record: records.PlanRecord, console: Console) -> None:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.at))
    _say(console, f"{at}  {_size(record.plan.groups)}  by {record.optimizer}")
    _say(console, f"  why        {record.plan.reason}")
    if record.plan.effect is not None:
        _say(console, f"  predicted  {_effect(record.plan.effect)}")
    _say(console, f"  outcome    {_outcome(record)}")


def _outcome(record: records.PlanRecord) -> str:
    if record.state is None:
        return "not reported yet"
    said = record.state + (f": {record.reason}" if record.reason else "")
    if record.measured:
        said += f", {record.measured:,.4g} samples/s measured"
    if record.error is not None:
        where = "in the interval" if record.within else "outside of the interval"
        said += f", error {record.error:+.1%}, {where}"
    return said


def _print_expected(job: str, found: records.Expected, console: Console) -> None:
    """Print the predicted effect of a change of a job's size."""
    effect = found.plan.effect
    assert effect is not None
    _say(console, f"{job}: {_size(found.before.groups)} -> {_size(found.shape.groups)}")
    _say(console, f"  predicted  {_effect(effect)}")
    _say(console, f"  now        {effect.before:,.4g} samples/s by the model: {found.plan.reason}")
    if not found.inside:
        console.print("  This is farther from what was measured than a plan would go.")


def _print_cluster(found: records.ClusterResources, console: Console) -> None:
    """Print the cluster's machines, free resources and quotas."""
    if not found.nodes:
        console.print("No monitor has reported the cluster to the Brain.")
    else:
        seen = max(0.0, time.time() - found.seen)
        ready = sum(1 for node in found.nodes if node.ready)
        _say(console, f"{ready} of {len(found.nodes)} machines ready, seen {seen:.0f} s ago")
        table = Table("resource", "capacity", "free", box=None)
        for name, amount in sorted(found.capacity.items()):
            table.add_row(name, _amount(name, amount), _amount(name, found.free.get(name, 0.0)))
        console.print(table)
    for queue, limits in sorted(found.quotas.items()):
        _say(console, f"queue {queue}: {_use(limits)}")


def _size(groups: Mapping[str, NodeGroup]) -> str:
    """Return the nodes of a plan or a shape in words."""
    return ", ".join(_group(kind, group) for kind, group in groups.items())


def _counts(groups: Mapping[str, NodeGroup]) -> str:
    return ", ".join(f"{group.count} {kind}" for kind, group in groups.items())


def _group(kind: str, group: NodeGroup) -> str:
    plural = "" if group.count == 1 or kind == "ps" else "s"
    each = [f"{group.accelerators} GPU"] if group.accelerators else []
    each += [f"{group.cpu:g} CPU"] if group.cpu else []
    each += [f"{group.memory / GIB:.1f} GiB"] if group.memory else []
    return f"{group.count} {kind}{plural}" + (f" ({', '.join(each)})" if each else "")


def _effect(effect: Effect) -> str:
    return (
        f"{effect.throughput:,.4g} samples/s ({effect.low:,.4g} to {effect.high:,.4g} "
        f"with {effect.confidence:.0%})"
    )


def _use(use: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_amount(name, amount)}" for name, amount in sorted(use.items()))


def _amount(name: str, amount: float) -> str:
    return f"{amount / GIB:,.1f} GiB" if name == "memory" else f"{amount:,.6g}"
