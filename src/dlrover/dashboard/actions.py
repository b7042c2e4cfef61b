"""The page's buttons: each is a request to the job's master, and its answer is one sentence."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from dlrover.dashboard.inspect import queries, roles
from dlrover.errors import ConfigurationError, ExitCode
from dlrover.rpc.client import MasterClient
from dlrover.spec.jobdir import JobDir
from dlrover.spec.node import WORKER
from dlrover.spec.numbers import Count

REASON = "asked for on the dashboard"
STOPPED = "The job was stopped on the dashboard."
STOPPING = "The job is being stopped."


class _Action(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="action"):
    pass


class ScaleAction(_Action, frozen=True, tag="scale"):
    """Another number of nodes of a role."""

    nodes: Count
    role: str = WORKER


class StopAction(_Action, frozen=True, tag="stop"):
    """The end of the job."""


class SaveAction(_Action, frozen=True, tag="save"):
    """The newest memory checkpoint to storage."""


class StacksAction(_Action, frozen=True, tag="stacks"):
    """Where every rank is now."""


class DrainAction(_Action, frozen=True, tag="drain"):
    """Another node in place of one, which trains until then."""

    node: Count


Action = ScaleAction | StopAction | SaveAction | StacksAction | DrainAction


async def carry_out(job_dir: JobDir, action: Action) -> dict[str, Any]:
    """Ask the job's master; return its answer as ``text``, and whether it ``refused``.

    Raises:
        ConfigurationError: the job has ended, or has several roles, which can only be stopped together.
        InfrastructureError: the master cannot be reached.
    """
    if job_dir.roles.exists():
        if not isinstance(action, StopAction):
            raise ConfigurationError("This job has several roles: open the page of one of them.")
        await roles.stop(job_dir, STOPPED)
        return {"text": STOPPING, "refused": False}
    return await queries.answer(job_dir, _question(action))


def _question(action: Action) -> Callable[[MasterClient], Awaitable[dict[str, Any]]]:
    async def ask(master: MasterClient) -> dict[str, Any]:
        match action:
            case StacksAction():
                stacks = await master.stacks()
                return {"text": stacks.report or "No workers run.", "refused": False}
            case StopAction():
                await master.stop(STOPPED, ExitCode.STOPPED)
                return {"text": STOPPING, "refused": False}
            case ScaleAction(nodes, role):
                reply = await master.scale(nodes, REASON, role)
            case DrainAction(node):
                reply = await master.drain(node, REASON)
            case _:
                reply = await master.save(REASON)
        return {"text": reply.sentence, "refused": reply.refused}

    return ask
