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
import sys
import threading
from collections.abc import Mapping, Sequence

from dlrover import config
from dlrover._util import procs, start
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.roles.messages import HOLDER, MemberEnded, MemberPlace, MemberStarted
from dlrover.roles.runtime import worker
from dlrover.roles.serving import RolesService

logger = logging.getLogger(__name__)

MODULE = "dlrover.roles.runtime.holder"
PAUSE = 1.0
"""Seconds until a process that has died is started again."""


def main(argv: Sequence[str] | None = None) -> None:
    """Keep weights until the lifeline closes or another process has taken this one's place."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=main.__doc__)
    parser.add_argument("--lifeline-fd", type=int, required=True, help="Leave when it closes.")
    args = parser.parse_args(argv)

    def follow_lifeline() -> None:
        os.read(args.lifeline_fd, 1)
        os._exit(0)  # whatever it waits for

    threading.Thread(target=follow_lifeline, name="lifeline", daemon=True).start()
    try:
        joined = worker.start(ready=True)
    except ConfigurationError as error:  # another process has taken its place meanwhile
        logger.info("No weights are kept here: %s", error)
        return
    joined.phases.leave()  # it has no program whose progress counts; that it reports does
    joined.link.over.wait()


async def keep(service: RolesService, variables: Mapping[str, str], lifeline_fd: int) -> None:
    """See to it that there is one process that keeps weights, until this is cancelled.

    Args:
        service: Service of the job.
        variables: Environment of the role `HOLDER`; see `environment.variables`.
        lifeline_fd: Closes at the end of the job, with which the process ends.
    """
    while True:
        try:
            await _keep_one(service, variables, lifeline_fd)
        except (
            OSError,
            InfrastructureError,
        ) as error:  # no room in the journal, or no process can be started
            logger.warning("No process keeps weights now: %s", error)
        await asyncio.sleep(PAUSE)


async def _keep_one(service: RolesService, variables: Mapping[str, str], lifeline_fd: int) -> None:
    """Find the process or start it, and wait for its end."""
    known = service.shared.members.get(HOLDER, 0)
    attempt = known.place.attempt if known is not None else 0
    # One that has lost its connection joins again.
    reason = "it died"
    if known is not None and not service.shared.members.is_over(known.place) and known.pid:
        if _runs(known.pid):
            with contextlib.suppress(ProcessLookupError):
                await procs.ended(known.pid)
    else:
        attempt += 1
        service.tell(MemberStarted(MemberPlace(HOLDER, 0, attempt)))
        pid = _start({**variables, config.ROLE_VARIABLES["attempt"]: str(attempt)}, lifeline_fd)
        await procs.ended(pid)
        reason = procs.exit_reason(os.waitpid(pid, 0)[1])  # noqa: ASYNC222 - it has ended
    if not procs.Lifeline.is_cut(lifeline_fd):  # else it ends with the job
        logger.warning("The process that keeps weights has died: %s", reason)
        service.tell(MemberEnded(MemberPlace(HOLDER, 0, attempt), reason))


def end(service: RolesService, place: MemberPlace, reason: str) -> None:
    """End a process that keeps weights, and say why; `keep` starts another one."""
    known = service.shared.members.get(place.role, place.index)
    if known is None or known.place != place or not _runs(known.pid):
        return
    logger.warning("The process that keeps weights is killed: %s", reason)
    with contextlib.suppress(InfrastructureError):  # no room in the journal: `keep` says it later
        service.tell(MemberEnded(place, reason))
    procs.kill([known.pid])


def _start(variables: Mapping[str, str], lifeline_fd: int) -> int:
    """Start the process and return its pid; it is not tied to this one."""
    os.set_inheritable(lifeline_fd, True)
    words = [*start.command(MODULE), "--lifeline-fd", str(lifeline_fd)]
    null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    env = {**config.environ(), **variables}
    return os.posix_spawn(sys.executable, words, env, file_actions=[null], setsid=True)


def _runs(pid: int) -> bool:
    return pid > 0 and MODULE in procs.command(pid)


if __name__ == "__main__":
    main()
