"""``dlrover operator``: the controller of ElasticJobs, inside or outside the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlrover import extras
from dlrover.cli.cluster.kube import IMAGE, Kubeconfig, MasterImage, extra

if TYPE_CHECKING:
    from dlrover.kubernetes.operator.operator import Operator

LEASE = "dlrover-operator"
"""Name of the Lease by which operators elect their leader."""


def operator(
    namespace: Annotated[
        str, typer.Option(help="Namespace of the jobs; default: all namespaces.")
    ] = "",
    kubeconfig: Kubeconfig = "",
    master_image: MasterImage = IMAGE,
    lease_namespace: Annotated[
        str,
        typer.Option(help="Namespace of the Lease; default: --namespace, else the operator's own."),
    ] = "",
    leader_election: Annotated[
        bool, typer.Option(help="Wait while another operator is the leader.")
    ] = True,
    http_port: Annotated[
        int, typer.Option(help="Port of /healthz, /readyz and /metrics; 0: none.")
    ] = 0,
    http_host: Annotated[
        str, typer.Option(help="Address that --http-port listens on.")
    ] = "127.0.0.1",
) -> None:
    """Run the operator, which starts and restarts the masters of ElasticJobs.

    Exit code 3 if another operator becomes the leader, or it cannot renew its Lease.
    """
    with extra():
        from dlrover.kubernetes.api.client import Client  # noqa: PLC0415 - needs the extra
        from dlrover.kubernetes.operator.leader import Leader  # noqa: PLC0415
        from dlrover.kubernetes.operator.operator import Operator  # noqa: PLC0415

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx2").setLevel(logging.WARNING)

    async def run() -> None:
        async with Client.from_config(kubeconfig) as client:
            leader = None
            if leader_election:
                where = lease_namespace or namespace or client.namespace
                identity = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
                leader = Leader(client, where, LEASE, identity)
            serving = Operator(client, namespace or None, master_image, leader)
            with _health(serving, http_host, http_port):
                await _until_stopped(serving.run())

    asyncio.run(run())


@contextlib.contextmanager
def _health(serving: Operator, host: str, port: int) -> Iterator[None]:
    """Serve the HTTP port, unless ``port`` is 0.

    Raises:
        ConfigurationError: its package is missing, or the address cannot be listened on.
    """
    if not port:
        yield
        return
    with extras.needed(f"--http-port {port}", "metrics"):
        from dlrover.kubernetes.operator.health import HealthServer  # noqa: PLC0415 - an extra
    server = HealthServer(serving, host, port)
    try:
        yield
    finally:
        # Request threads ask this event loop: closing blocks it, but does not wait for them.
        server.close()


async def _until_stopped(serving: Coroutine[Any, Any, None]) -> None:
    """Run ``serving`` to its end, or until SIGTERM or SIGINT."""
    task = asyncio.create_task(serving)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
