"""``dlrover ingest``: an endpoint where other systems push records that a training reads."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import ssl
import threading
from pathlib import Path
from typing import Annotated

import typer

from dlrover import config
from dlrover._util import files
from dlrover.cli.launchspec import parse_rdzv_conf
from dlrover.errors import ConfigurationError, InfrastructureError

GIB = 1024**3
HOUR = 3600.0


def ingest(  # noqa: PLR0913 - options, by name
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where the records are kept.")],
    stream: Annotated[
        list[str],
        typer.Option(metavar="NAME[:PARTITIONS]", help="A stream; 1 partition if not said."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any.")] = 8090,
    max_gib: Annotated[
        float, typer.Option(help="GiB kept from which on producers have to wait.")
    ] = 10.0,
    keep_hours: Annotated[
        float, typer.Option(help="Hours that records are kept; 0: until a reader drops them.")
    ] = 0.0,
    rdzv_conf: Annotated[str, typer.Option(help="Settings: key=value,key=value.")] = "",
    config_file: Annotated[str, typer.Option("--config", help="Settings file (TOML).")] = "",
) -> None:
    """Take in records by HTTP, for trainings to read as a stream.

    A record is on the disk before it is answered for. The token is DLROVER_TOKEN, or a fresh one in DIR/token;
    with the settings tls_cert and tls_key it is HTTPS.
    """
    from dlrover.sharding.ingest.server import Server  # noqa: PLC0415 - loads http.server
    from dlrover.sharding.ingest.streams import Streams  # noqa: PLC0415

    env = config.environ()
    settings = config.settings(env, config_file, parse_rdzv_conf(rdzv_conf))
    tls = _tls(settings.tls_cert, settings.tls_key)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s: %(message)s")
    os.umask(0o077)
    path = Path(directory)
    streams = Streams(
        path, dict(map(_stream, stream)), int(max_gib * GIB), keep_hours * HOUR or None
    )
    token, where = _token(path, env.get("DLROVER_TOKEN", ""))
    try:
        server = Server((host, port), streams, token, tls)
    except OSError as error:
        raise InfrastructureError(
            f"{host}:{port} cannot be listened on: {error.strerror}."
        ) from error
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    scheme = "https" if tls else "http"
    print(
        f"Taking in records at {scheme}://{host}:{server.server_address[1]}; the token is {where}.",
        flush=True,
    )
    with server:
        server.serve_forever(poll_interval=0.1)
    streams.close()


def _stream(text: str) -> tuple[str, int]:
    name, _, count = text.partition(":")
    if count and not count.isdecimal():
        raise ConfigurationError(f"--stream {text}: must be NAME, or NAME:PARTITIONS.")
    return name, int(count or 1)


def _token(directory: Path, given: str) -> tuple[str, str]:
    """The token, and where it is."""
    if given:
        return given, "DLROVER_TOKEN"
    path = directory / "token"
    if not path.exists():
        files.write_atomically(path, secrets.token_hex(16).encode(), mode=0o600)
    return path.read_text().strip(), f"in {path}"


def _tls(cert: str, key: str) -> ssl.SSLContext | None:
    if not cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"tls_cert {cert} cannot be used: {error}.") from error
    return context
