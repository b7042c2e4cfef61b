"""``dlrover brain``: run the Brain, query its jobs and plans, and set quotas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console

from dlrover import config
from dlrover.cli.output import Form, Output, print_json
from dlrover.errors import ConfigurationError

if TYPE_CHECKING:
    from dlrover.rpc.brain import BrainClient

PORT = 29500
"""Default port of a Brain."""

app = typer.Typer(
    name="brain",
    help="Run the Brain, which plans the resources of jobs, or look at what it knows.",
    no_args_is_help=True,
)

Address = Annotated[
    str,
    typer.Option("--brain", help="Where the Brain is, HOST:PORT; the setting brain if left out."),
]
TokenFile = Annotated[
    str, typer.Option(help="File with the Brain's token; DLROVER_BRAIN_TOKEN if left out.")
]
Config = Annotated[str, typer.Option("--config", help="Settings file (TOML).")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of a job.")]

T = TypeVar("T")


@app.command()
def serve(  # noqa: PLR0913 - each is an option of the command
    database: Annotated[
        str, typer.Option(help="URL; SQLite in the user's state directory if left out.")
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.")] = PORT,
    token_file: TokenFile = "",
    tenants: Annotated[
        str, typer.Option(help="Directory with a token for each tenant, in a file of its name.")
    ] = "",
    retention_days: Annotated[
        float, typer.Option(min=0.01, help="Ended jobs and old samples are kept so many days.")
    ] = 90.0,
    monitor: Annotated[
        str, typer.Option(help="Look at this cluster: kubernetes; none if left out.")
    ] = "",
    kubeconfig: Annotated[str, typer.Option(help="Of that cluster.")] = "",
    config_file: Config = "",
    output: Output = Form.TEXT,
) -> None:
    """Run the Brain until it gets SIGTERM or SIGINT."""
    with _extra():
        from dlrover.brain.app import Options, serve as run  # noqa: PLC0415 - an extra
    from dlrover.rpc import wire  # noqa: PLC0415 - loads grpc

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in ("httpx2", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    env = config.environ()
    settings = config.settings(env, config_file)
    own = config.state_dirs(env)[0] / "brain.db"
    url = database or env.get("DLROVER_BRAIN_DATABASE") or f"sqlite:///{own}"
    options = Options(
        database=url,
        token=_token(token_file or settings.brain_token_file),
        host=host,
        port=port,
        tenants=tenants,
        tls=wire.Tls(settings.tls_cert, settings.tls_key, settings.tls_ca),
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
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Show so many.")] = 50,
    brain: Address = "",
    token_file: TokenFile = "",
    config_file: Config = "",
    output: Output = Form.TEXT,
) -> None:
    """List the jobs that the Brain knows, the latest first."""
    from dlrover.cli.cluster import brainviews  # noqa: PLC0415

    client = _client(brain, token_file, config_file)
    found = _ask(client, lambda c: c.jobs(limit, running=running))
    if output is Form.JSON:
        print_json(found)
    else:
        brainviews.jobs(found, Console())


@app.command()
def explain(
    job: JobId,
    brain: Address = "",
    token_file: TokenFile = "",
    config_file: Config = "",
    output: Output = Form.TEXT,
) -> None:
    """Show a job's plans and their reasons, with predictions beside measurements."""
    from dlrover.cli.cluster import brainviews  # noqa: PLC0415

    client = _client(brain, token_file, config_file)
    story = _ask(client, lambda c: c.explain(job))
    if output is Form.JSON:
        print_json(story)
    else:
        brainviews.story(story, Console())


@app.command("what-if")
def what_if(
    job: JobId,
    workers: Annotated[int, typer.Option(min=1, help="Worker nodes.")],
    servers: Annotated[
        int | None, typer.Option(min=1, help="Parameter servers; as many as it has if left out.")
    ] = None,
    brain: Address = "",
    token_file: TokenFile = "",
    config_file: Config = "",
    output: Output = Form.TEXT,
) -> None:
    """Predict a job's throughput with other numbers of nodes. Changes nothing."""
    from dlrover.cli.cluster import brainviews  # noqa: PLC0415

    client = _client(brain, token_file, config_file)
    expected = _ask(client, lambda c: c.effect(job, workers, servers))
    if output is Form.JSON:
        print_json(expected)
    else:
        brainviews.expected(job, expected, Console())


@app.command()
def cluster(
    brain: Address = "",
    token_file: TokenFile = "",
    config_file: Config = "",
    output: Output = Form.TEXT,
) -> None:
    """Show the cluster's capacity, what is free, and the quotas of its queues."""
    from dlrover.cli.cluster import brainviews  # noqa: PLC0415

    found = _ask(_client(brain, token_file, config_file), lambda c: c.cluster())
    if output is Form.JSON:
        print_json(found)
    else:
        brainviews.cluster(found, Console())


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
    from dlrover.spec.brain import SetQuota  # noqa: PLC0415

    report = SetQuota(request=request_id(), queue=queue, limits=_limits(limits))
    _ask(_client(brain, token_file, config_file), lambda c: c.report(report))
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


@contextlib.contextmanager
def _extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"dlrover brain serve needs {error.name}: pip install 'dlrover[brain]'."
        ) from error


def _token(path: str) -> str:
    """Return the Brain's token from a file, or from the environment without a path.

    Raises:
        ConfigurationError: there is no token, or the file is unreadable.
    """
    given = config.environ().get("DLROVER_BRAIN_TOKEN", "")
    if path:
        try:
            given = Path(path).read_text().strip().partition("\n")[0].strip()
        except OSError as error:
            raise ConfigurationError(
                f"--token-file {path} cannot be read: {error.strerror}."
            ) from error
    if not given:
        raise ConfigurationError(
            "The Brain's token is missing: give --token-file, or set DLROVER_BRAIN_TOKEN."
        )
    return given


def _client(address: str, token_file: str, config_file: str) -> Callable[[], BrainClient]:
    """Return a factory for clients; call it on the event loop that uses the client."""
    from dlrover.rpc import wire  # noqa: PLC0415 - loads grpc
    from dlrover.rpc.brain import BrainClient  # noqa: PLC0415

    settings = config.settings(config.environ(), config_file)
    where = address or settings.brain or f"127.0.0.1:{PORT}"
    token = _token(token_file or settings.brain_token_file)
    return lambda: BrainClient(where, token, wire.Tls(ca=settings.tls_ca))


def _ask(client: Callable[[], BrainClient], ask: Callable[[BrainClient], Awaitable[T]]) -> T:
    async def run() -> Any:
        async with client() as connected:
            return await ask(connected)

    found: T = asyncio.run(run())
    return found
