"""``dlrover dashboard``: the page of jobs in a browser."""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path
from typing import Annotated

import typer

from dlrover import config
from dlrover.errors import ConfigurationError

HOST, PORT = "127.0.0.1", 8650


def dashboard(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 for any free one.")] = PORT,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = HOST,
    job_dir: Annotated[
        list[str] | None, typer.Option("--job-dir", help="Job directory to show as well; repeatable.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:PORT]",
            help="Name by which browsers reach the page, as behind a proxy; repeatable.",
        ),
    ] = None,
) -> None:
    """Show jobs in a browser: time, nodes, faults, plans, data, logs, and buttons that act.

    The printed link has a token. DLROVER_DASHBOARD_TOKEN sets the token.
    """
    try:
        from dlrover.dashboard import guard, server  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"The module {error.name} is missing: the dashboard needs pip install 'dlrover[dashboard]'."
        ) from error
    from dlrover.dashboard.cluster import Cluster  # noqa: PLC0415
    from dlrover.dashboard.listing import Listing  # noqa: PLC0415

    logging.basicConfig(format="dlrover dashboard: %(message)s", level=logging.WARNING)
    env = config.environ()
    given = env.get("DLROVER_DASHBOARD_TOKEN", "")
    server.check_host(host, given_token=bool(given))
    token = given or secrets.token_urlsafe(24)
    sock = server.listen(host, port)
    port = sock.getsockname()[1]
    listing = Listing(config.state_dirs(env), map(Path, job_dir or ()))
    hosts = guard.hosts(host, port, allow_host or ())
    app = server.application(listing, Cluster({}), token, hosts)
    name = f"[{host}]" if ":" in host else host
    link = f"http://{name}:{port}/?token={token}"
    print(f"The dashboard is at {link}", flush=True)
    asyncio.run(server.serve(app, sock))
