"""Running a program of verl with our worker groups, without a change in it."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import traceback
import types
from collections.abc import Sequence
from typing import Any

from dlrover import config, extras
from dlrover.errors import ConfigurationError, DLRoverError, ExitCode, causes
from dlrover.integrations.verl.history import VARIABLE, repair
from dlrover.ray import cluster
from dlrover.ray.machine.job import OF_RAY_JOB, ray_job_config
from dlrover.training.worker import bootstrap, imports

HOME = "verl.single_controller.ray.base"
"""The module that defines verl's group; the package above it takes the name from here."""
GROUP = "dlrover.integrations.verl.group"
"""The module that defines ours, which builds on verl's; whichever a process imports first brings the other."""
HOOK = "dlrover.integrations.verl.install"


def install() -> None:
    """Let ``RayWorkerGroup`` be ours in this process; call it before the program imports verl's."""
    imports.after_import(HOME, _bring)
    imports.after_import(GROUP, _replace)


def _bring(_: types.ModuleType) -> None:
    importlib.import_module(GROUP)


def _replace(group: types.ModuleType) -> None:
    """Put our group in the place of verl's; the package has a name of its own if our module imported it."""
    ours = group.WorkerGroup
    # Pickles name the class; another process then imports verl's module first, and with it ours.
    ours.__module__, ours.__qualname__, ours.__name__ = HOME, *["RayWorkerGroup"] * 2
    for name in (HOME, HOME.rpartition(".")[0]):
        if hasattr(sys.modules.get(name), "RayWorkerGroup"):
            sys.modules[name].RayWorkerGroup = ours  # type: ignore[attr-defined]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a program with our worker groups, in its driver and in all its processes on Ray; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dlrover.integrations.verl",
        usage="%(prog)s [-m MODULE | SCRIPT] ARGS...",
        description=main.__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("-m", dest="module", action="store_true", help="Run a module.")
    parser.add_argument("program", help="A module or a script.")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    try:
        _prepare()
        program = bootstrap.Program(
            entry="module" if args.module else "script",
            target=args.program, args=args.args, error_file="", slot=0,
        )  # fmt: skip
        bootstrap.execute(program)
    except Exception as error:  # noqa: BLE001 - the program's last screen
        if not isinstance(error, DLRoverError) or _is_remote(error):
            traceback.print_exception(error)
        said, code = _explained(error)
        if said:
            sys.stderr.write(f"dlrover: {said}\n")
        return code
    return ExitCode.SUCCESS


def _prepare() -> None:
    """Check what is needed, and set what the processes on Ray get."""
    env = config.environ()
    extras.require("dlrover.integrations.verl", "ray", ("ray",))
    if importlib.util.find_spec("verl") is None:
        raise ConfigurationError(
            "dlrover.integrations.verl needs the package verl: pip install verl."
        )
    repair(env.get(VARIABLE, ""))
    cluster.check_port(env.get("RAY_ADDRESS", ""))
    job = job_config(env.get(OF_RAY_JOB, ""), env.get(VARIABLE, ""))
    os.environ[OF_RAY_JOB] = json.dumps(job)  # noqa: TID251
    install()


def job_config(given: str, settings: str) -> dict[str, Any]:
    """Return Ray's configuration of the job, with our hook in the runtime environment.

    Args:
        given: What ``ray job submit`` has set, as JSON.
        settings: Our settings, for the processes on Ray.

    Raises:
        ConfigurationError: it is malformed, or the job has a hook of its own.
    """
    job = ray_job_config(given or "{}")
    runtime = job["runtime_env"] = job.get("runtime_env") or {}
    if (runtime.get("worker_process_setup_hook") or HOOK) != HOOK:
        raise ConfigurationError(
            f"The Ray job has the worker_process_setup_hook {runtime['worker_process_setup_hook']}: call {HOOK}()"
            " there, and run the program without python -m dlrover.integrations.verl."
        )
    runtime["worker_process_setup_hook"] = HOOK
    if settings:
        runtime["env_vars"] = {VARIABLE: settings, **(runtime.get("env_vars") or {})}
    return job


def _is_remote(error: BaseException) -> bool:
    return hasattr(error, "cause")


def _explained(error: BaseException) -> tuple[str, int]:
    """Return the root cause of an error in words, empty if it is the program's own, and the exit code."""
    ray = importlib.import_module("ray") if importlib.util.find_spec("ray") else None
    for one in causes(error, "cause"):
        if isinstance(one, DLRoverError) and not _is_remote(one):
            return str(one), one.exit_code
        if ray is not None and isinstance(one, getattr(ray.exceptions, "AuthenticationError", ())):
            return cluster.why_unauthenticated(
                config.environ().get("RAY_ADDRESS", "")
            ), ExitCode.USAGE
        actor = getattr(one, "actor_id", None)
        if ray is not None and isinstance(one, ray.exceptions.RayActorError) and actor:
            deaths = importlib.import_module("dlrover.integrations.verl.deaths")
            said = (
                f"{deaths.described(actor)}.{deaths.last_lines(actor)}"
                if ray.is_initialized()
                else str(one)
            )
            return f"An actor died: {said}", ExitCode.INFRASTRUCTURE
    return "", ExitCode.USER_CODE
