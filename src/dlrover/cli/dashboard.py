"""``dlrover dashboard``: the page of jobs in a browser."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlrover import config, extras
from dlrover.cli import jobs
from dlrover.cli.cluster import brain as brains
from dlrover.cli.cluster.kube import Kubeconfig, extra as extra_of_kubernetes
from dlrover.spec.jobdir import TlsFiles

if TYPE_CHECKING:
    from dlrover.dashboard.cluster import JobSources, Source

HOST, PORT = "127.0.0.1", 8650


def dashboard(  # noqa: PLR0913 - each is an option of the command
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 for any free one.")] = PORT,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = HOST,
    job_dir: Annotated[
        list[str] | None,
        typer.Option("--job-dir", help="Job directory to show as well; repeatable."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:PORT]",
            help="Name by which browsers reach the page, as behind a proxy; repeatable.",
        ),
    ] = None,
    brain: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Brain whose jobs to list as well; default: the setting. Its token is as for dlrover brain.",
        ),
    ] = "",
    kubernetes: Annotated[
        str,
        typer.Option(metavar="NAMESPACE", help="Namespace whose ElasticJobs to show; all for all."),
    ] = "",
    kubeconfig: Kubeconfig = "",
    jobs_listed: Annotated[
        int,
        typer.Option(
            "--jobs", min=1, max=9_999, help="Most jobs to list of each source, the latest first."
        ),
    ] = 200,
    lifeline_fd: Annotated[int, typer.Option(hidden=True)] = -1,
    stdio: Annotated[bool, typer.Option("--stdio", hidden=True)] = False,
) -> None:
    """Show jobs in a browser: time, nodes, faults, plans, data, logs, and buttons that act.

    The printed link has a token. DLROVER_DASHBOARD_TOKEN sets the token.
    """
    env = config.environ()
    logging.basicConfig(format="dlrover dashboard: %(message)s", level=logging.WARNING)
    if stdio:
        from dlrover.dashboard.stdio import serve  # noqa: PLC0415 - loads grpc

        asyncio.run(serve(jobs.find(env, "", "")))
        return
    extras.require("The dashboard", "dashboard", ("starlette", "uvicorn"))
    from dlrover.dashboard import guard, server  # noqa: PLC0415 - an extra
    from dlrover.dashboard.listing import JobList  # noqa: PLC0415

    given = env.get("DLROVER_DASHBOARD_TOKEN", "")
    server.check_host(host, given_token=bool(given))
    token = given or secrets.token_urlsafe(24)
    sock = server.listen(host, port)
    port = sock.getsockname()[1]
    listing = JobList(config.state_dirs(env), map(Path, job_dir or ()), jobs_listed)
    hosts = guard.hosts(host, port, allow_host or ())
    sources = _sources(env, brain, kubernetes, kubeconfig, jobs_listed)
    app = server.application(listing, sources, token, hosts)
    print(f"The dashboard is at {server.link(host, port, token)}", flush=True)
    asyncio.run(server.serve(app, sock, lifeline_fd))


def _sources(
    env: Mapping[str, str], brain: str, namespace: str, kubeconfig: str, most: int
) -> JobSources:
    """Return where else jobs are known: the Brain and Kubernetes, as far as they are named."""
    from dlrover.dashboard import cluster  # noqa: PLC0415 - loads grpc
    from dlrover.dashboard.history import BrainJobs  # noqa: PLC0415

    sources: dict[str, Source] = {}
    history: BrainJobs | None = None
    settings = config.settings(env)
    address = brain or settings.brain
    if address:
        token = brains.token(settings.brain_token_file)
        history = BrainJobs(address, token, TlsFiles(ca=settings.tls_ca))
        sources[f"Brain at {address}"] = history.rows
    if not namespace:
        return cluster.JobSources(sources, brain=history, most=most)
    name = "Kubernetes" if namespace == "all" else f"Kubernetes, namespace {namespace}"
    wanted = "" if namespace == "all" else namespace
    with extra_of_kubernetes():
        from dlrover.dashboard.pods import PodJobs  # noqa: PLC0415

        sources[name] = cluster.kubernetes(kubeconfig, wanted)
    return cluster.JobSources(sources, PodJobs(kubeconfig, wanted, history), history, most)
