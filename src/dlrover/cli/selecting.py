"""How a command selects its job: the same argument and options in each, and one look for the job's directory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from dlrover import config
from dlrover.cli import completion, jobs
from dlrover.errors import ConfigurationError
from dlrover.spec.jobdir import JobDir

Own = ParamSpec("Own")
Dir = Annotated[str, typer.Option("--job-dir", help="Job directory, instead of the name.")]
_JOB = {
    "job": Annotated[
        str,
        typer.Argument(
            metavar="[JOB]",
            help="Name of the job; by default the last one.",
            autocompletion=completion.jobs,
        ),
    ],
    "job_dir": Dir,
}
_RAY = {
    "platform": Annotated[
        str,
        typer.Option(help="ray: the job is one of a Ray cluster; by default it is this machine's."),
    ],
    "ray_address": Annotated[
        str, typer.Option(help="The Ray cluster, as for dlrover-run; by default RAY_ADDRESS.")
    ],
}


def of_job(
    *, ray: bool = True, roles: bool = False
) -> Callable[[Callable[Concatenate[JobDir, Own], None]], Callable[..., None]]:
    """Give a command the options that select a job; it is called with the job's directory first.

    Args:
        ray: Whether the job may be one of a Ray cluster.
        roles: Whether the command handles a job of several roles, too; others refuse it.
    """

    def decorate(command: Callable[Concatenate[JobDir, Own], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def selected(
            *, job: str, job_dir: str, platform: str = "", ray_address: str = "", **own: Any
        ) -> None:
            env = config.environ()
            config.check_variables(env)
            found = jobs.find_on(platform, ray_address, env, job, job_dir)
            if not roles:
                refuse_roles(found, f"dlrover {command.__name__}")
            command(found, **own)  # type: ignore[call-arg]

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default="", annotation=kind)
            for name, kind in (_JOB | _RAY if ray else _JOB).items()
        ]
        given = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        required = [each for each in given if each.default is inspect.Parameter.empty]
        every = [*required, *options, *(each for each in given if each not in required)]
        selected.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        selected.__annotations__ = {each.name: each.annotation for each in every}
        return selected

    return decorate


def refuse_roles(job_dir: JobDir, what: str) -> None:
    """Refuse a job of several roles: each role is a job with a directory of its own.

    Raises:
        ConfigurationError: the directory is that of such a job.
    """
    if job_dir.roles.exists():
        raise ConfigurationError(
            f"{job_dir.path} has a job of several roles, and {what} takes one of them: give "
            f"--job-dir {job_dir.path}/roles/ROLE."
        )
