"""``dlrover embedding``: show, export and serve the checkpoints of embedding tables."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any

import typer

from dlrover import config, extras
from dlrover.cli import jobs
from dlrover.cli.output import Form, Output, print_json, print_table, size
from dlrover.spec.words import counted

NEEDS = "dlrover embedding", "embedding"
REMIND = 60.0
"""Seconds between two messages about a checkpoint that is waited for."""
app = typer.Typer(
    name="embedding",
    help="Show, export and serve the checkpoints of embedding tables.",
    no_args_is_help=True,
)


class ExportFormat(str, Enum):
    """Format of exported values."""

    NPZ = "npz"
    SAFETENSORS = "safetensors"
    PARQUET = "parquet"
    TABLE = "table"


Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A directory of embedding checkpoints, or the URL of one; or a file of HashTable.save.",
    ),
]


@app.command()
def show(checkpoint: Checkpoint, output: Output = Form.TEXT) -> None:
    """Show the stored checkpoints, the newest first, and the tables."""
    found = extras.load("dlrover.embedding.tools.listing", *NEEDS).listing(checkpoint)
    if output is Form.JSON:
        print_json(found)
        return
    rows = [("step", "kind", "rows", "size", "parts")]
    for item in found.checkpoints:
        kind = "full" if item.adds_to is None else f"adds to step {item.adds_to}"
        rows.append((str(item.step), kind, str(item.rows), size(item.nbytes), str(item.parts)))
    print_table(rows)
    print()
    tables = [("table", "dim", "type", "optimizer")]
    for name, options in found.tables.items():
        tables.append((name, str(options.dim), options.dtype, options.optimizer.name))
    print_table(tables)


@app.command()
def export(
    checkpoint: Checkpoint,
    destination: Annotated[str, typer.Argument(help="File to create; it must not exist.")],
    to: Annotated[ExportFormat, typer.Option(help="Format of the file.")],
    table: Annotated[str, typer.Option(help="Name of the only table to write.")] = "",
    step: Annotated[int | None, typer.Option(help="Step; by default the newest.")] = None,
    output: Output = Form.TEXT,
) -> None:
    """Write keys and values to a file, without the states of the optimizers."""
    found = extras.load("dlrover.embedding.tools.export", *NEEDS).export(
        checkpoint, destination, to.value, table=table, step=step
    )
    if output is Form.JSON:
        print_json(found)
        return
    rows = ", ".join(f"{counted(count, 'row')} of {name}" for name, count in found.rows.items())
    print(f"{rows}, step {found.step}: {found.destination}")


@app.command()
def serve(
    checkpoint: Checkpoint,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port for HTTP; 0 for any free one.")
    ] = 8500,
    raw_port: Annotated[
        int, typer.Option(help="Port for the raw protocol; 0 for any free one.")
    ] = 8501,
    poll: Annotated[
        float, typer.Option(min=0.01, help="Seconds between two looks for newer checkpoints.")
    ] = 1.0,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the first checkpoint at most.")
    ] = 600.0,
) -> None:
    """Answer lookups of the newest checkpoint, and follow newer ones.

    Clients give the token DLROVER_TOKEN; without it, a new one is made and printed.
    """
    given = jobs.given_token(config.environ())
    token = given or secrets.token_hex(16)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    kind = extras.load("dlrover.embedding.serving.app", *NEEDS).ReadOnlyServer
    server = _when_stored(
        lambda: kind(checkpoint, token, host=host, port=port, raw_port=raw_port, poll=poll),
        wait,
        poll,
        ended,
    )
    if server is None:
        return
    server.start()
    print(
        f"Serving step {server.follower.served.step} of {checkpoint}: HTTP at {host}:{server.port},"
        f" raw protocol at {host}:{server.raw_port}.",
        flush=True,
    )
    if not given:
        print(f"The token is {token}", flush=True)
    ended.wait()
    server.close()


def _when_stored(make: Callable[[], Any], wait: float, poll: float, ended: threading.Event) -> Any:
    """Return what is made of the first checkpoint; None if ``ended`` is set before there is one.

    Raises:
        ConfigurationError: There is none after ``wait`` seconds.
    """
    began = time.monotonic()
    said = -REMIND
    while not ended.is_set():
        try:
            return make()
        except extras.load("dlrover.embedding.serving.follower", *NEEDS).NoCheckpointError as error:
            waited = time.monotonic() - began
            if waited >= wait:
                raise
            if waited >= said + REMIND:
                said = waited
                print(
                    f"{error} Waiting for the first one: {waited:.0f} s of {wait:.0f} s.",
                    flush=True,
                )
        ended.wait(min(poll, wait - waited))
    return None
