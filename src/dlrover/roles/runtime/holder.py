"""The process that keeps a machine's weights, so that they outlive who has published them.

``keep`` runs beside a coordinator: it starts the process, takes over the one of an earlier coordinator, and starts
another one if it dies. The process ends with the job.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from dlrover import config
from dlrover._util import procs
from dlrover.errors import DLRoverError
from dlrover.roles.messages import HOLDER
from dlrover.roles.runtime import worker
from dlrover.roles.serving import RolesService

logger = logging.getLogger(__name__)

MODULE = "dlrover.roles.runtime.holder"
PAUSE = 1.0
"""Seconds until a process that has died is started again."""


def main(argv: Sequence[str] | None = None) -> None:
    """Keep weights until the lifeline closes or the process is ended."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=main.__doc__)
    parser.add_argument("--lifeline-fd", type=int, required=True, help="Leave when it closes.")
    args = parser.parse_args(argv)
    worker.start(ready=True)
    while os.read(args.lifeline_fd, 1):
        pass


async def keep(service: RolesService, variables: Mapping[str, str], lifeline_fd: int) -> None:
    """Keep one process that keeps weights, until this is cancelled; then end it.

    Args:
        service: Service of the job.
        variables: Environment of the role `HOLDER`; see `environment.variables`.
        lifeline_fd: Closes when the job's supervisor dies.
    """
    name = config.ROLE_VARIABLES["attempt"]
    pid = 0
    try:
        while True:
            known = service.shared.members.get(HOLDER, 0)
            attempt = known.place.attempt if known is not None else 0
            pid = known.pid if known is not None else 0
            if known is None or known.state == "ended" or not _runs(pid):
                attempt += 1
                with contextlib.suppress(DLRoverError):
                    service.started(HOLDER, 0, attempt)
                process = await asyncio.to_thread(
                    _start, {**variables, name: str(attempt)}, lifeline_fd
                )
                pid = process.pid
                await procs.ended(pid)
                process.wait()
            else:
                await _ended(pid)
            service.ended(HOLDER, 0, attempt, "the process that keeps weights has died")
            logger.warning("The process that keeps weights has died: pid %d", pid)
            await asyncio.sleep(PAUSE)
    finally:
        if _runs(pid):
            procs.kill([pid])


def _start(variables: Mapping[str, str], lifeline_fd: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, "--lifeline-fd", str(lifeline_fd)],
        env={**config.environ(), **variables},
        pass_fds=[lifeline_fd],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _runs(pid: int) -> bool:
    return pid > 0 and MODULE in procs.command(pid)


async def _ended(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        await procs.ended(pid)


if __name__ == "__main__":
    main()
