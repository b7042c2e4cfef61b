"""Records of a job of several roles, and what must hold between them. No torch, no I/O."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from dlrover.errors import ConfigurationError
from dlrover.roles.messages import IDLE
from dlrover.spec.jobdir import TlsFiles
from dlrover.spec.node import NodeLimits
from dlrover.spec.words import did_you_mean

FORMAT = 1
"""Format of `RolesConfig` and of a coordinator's journal."""
OnFailure = Literal["wait", "restart"]
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}")


class RoleKind(str, enum.Enum):
    """How the instances of a role belong together."""

    ELASTIC = "elastic"
    """They are the nodes of one world, with rendezvous, checkpoints and hang detection."""
    SIMPLE = "simple"
    """Each is a world by itself."""
    DRIVER = "driver"
    """One instance, whose success ends the job."""


class Failover(str, enum.Enum):
    """What restarts when an instance fails."""

    INSTANCE = "instance"
    """The instance; in an elastic role the world, which goes on from memory."""
    ROLE = "role"
    """All instances of the role."""
    JOB = "job"
    """All roles."""


class EntryForm(str, enum.Enum):
    """Form of an entry point."""

    SCRIPT = "script"
    """``path/to/file.py arguments``."""
    OBJECT = "object"
    """``module:Class``: other roles call its public methods."""
    FUNCTION = "function"
    """``module.function``, called without arguments."""


class EntryPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The program of a role."""

    form: EntryForm
    target: str
    """Absolute path of a script; ``module:Class`` or ``module.function`` otherwise."""
    args: tuple[str, ...] = ()


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One role as its user asked for it."""

    name: str
    entry: EntryPoint
    kind: RoleKind = RoleKind.SIMPLE
    least: int = 1
    """Instances that those who depend on the role wait for; in an elastic role, the least that train."""
    most: int = 1
    """Instances that are started."""
    processes: int = 1
    """Worker processes of each instance, in an elastic role."""
    spares: int = 0
    """Warm nodes of an elastic role beside ``most``, which take the places of lost ones."""
    size: NodeLimits = NodeLimits()
    """What each instance needs of a machine; zeros where it does not say."""
    gpus: float = 0.0
    """GPUs or other accelerators of each instance: a cluster gives them to it, this machine only has to have them."""
    env: dict[str, str] = {}
    config: dict[str, Any] = {}
    """What its processes find as ``current_worker().config``."""
    failover: Failover = Failover.INSTANCE
    max_restarts: int = 10
    """Restarts within ``window``: of each instance, or of the role where it restarts as a whole."""
    window: float = 3600.0
    health: dict[str, float] = {}
    """Seconds without progress after which an instance is restarted, for each phase that has such a limit."""
    depends_on: dict[str, OnFailure] = {}
    """Roles that must run first. ``restart``: this role restarts when an instance of the other fails."""
    collocate: str = ""
    """Name of a group of roles that take turns with the same resources; empty: the role has its own."""
    shutdown_timeout: int = 30
    """Seconds between SIGTERM and SIGKILL."""

    @property
    def restarts_itself(self) -> bool:
        """True if its own job restarts what fails: an instance alone, or the world of an elastic role."""
        return self.failover is Failover.INSTANCE or (
            self.kind is RoleKind.ELASTIC and self.failover is Failover.ROLE
        )

    @property
    def is_service(self) -> bool:
        """True if others call it, so that it never ends by itself."""
        return self.entry.form is EntryForm.OBJECT


class RolesJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job of several roles; `check` says whether it can be one."""

    name: str
    roles: tuple[RoleSpec, ...]
    directory: str = ""
    """Where its modules are found."""

    def role(self, name: str) -> RoleSpec:
        """Return a role."""
        return next(role for role in self.roles if role.name == name)

    def dependents(self, name: str) -> Iterator[RoleSpec]:
        """Yield the roles that restart with a failure of this role."""
        return (role for role in self.roles if role.depends_on.get(name) == "restart")

    @property
    def driver(self) -> str:
        """Name of the driver; empty if there is none."""
        return next((role.name for role in self.roles if role.kind is RoleKind.DRIVER), "")

    @property
    def members(self) -> dict[str, int]:
        """Maximum number of members of each role: of its instances, or of the workers of an elastic one."""
        return {role.name: role.most * role.processes for role in self.roles}

    @property
    def worlds(self) -> tuple[str, ...]:
        """Names of the roles whose instances start together."""
        return tuple(role.name for role in self.roles if role.kind is RoleKind.ELASTIC)

    @property
    def deciding(self) -> tuple[str, ...]:
        """Names of the roles whose success ends the job."""
        if self.driver:
            return (self.driver,)
        return tuple(role.name for role in self.roles if not role.is_service)


class RolesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of a coordinator process (``roles.json``)."""

    format: int = FORMAT
    job: RolesJob
    platform: str = "local"
    host: str = "127.0.0.1"
    """Address of this machine at which the coordinator listens."""
    port: int = 0
    """0: any free port at the first start, the same one afterwards."""
    address: str = ""
    """``host:port`` at which the roles reach the coordinator; empty: where it listens."""
    tls: TlsFiles = TlsFiles()
    """Of the coordinator's server; all processes of the job use TLS then."""
    ray_address: str = ""
    """The Ray cluster of the platform ``ray``."""
    ray_working_dir: str = ""
    """Directory that Ray copies to each node; empty: none."""


def check(job: RolesJob) -> None:
    """Refuse roles that cannot be one job.

    Raises:
        ConfigurationError: the first fault, in one sentence.
    """
    if not job.roles:
        raise ConfigurationError(
            f"Job {job.name} has no roles; add one with Job.role(name, entry)."
        )
    names = [role.name for role in job.roles]
    for name in names:
        if not NAME.fullmatch(name):
            raise ConfigurationError(
                f"role {name}: a name has letters, digits, - and _, begins with a letter, and has 63 at most."
            )
        if names.count(name) > 1:
            raise ConfigurationError(
                f"role {name} is defined twice; each role has a name of its own."
            )
    drivers = [role.name for role in job.roles if role.kind is RoleKind.DRIVER]
    if len(drivers) > 1:
        raise ConfigurationError(
            f"The roles {' and '.join(drivers)} are both drivers; a job has at most one."
        )
    for role in job.roles:
        _check_role(role)
        _check_times(role)
        _check_health(role)
        _check_dependencies(role, names)
    circle = _circle(job)
    if circle:
        raise ConfigurationError(
            f"The roles need each other in a circle: {' -> '.join(circle)}; take one depends_on away."
        )
    if not job.deciding:
        raise ConfigurationError(
            f"All roles of job {job.name} are objects that others call, so it would never end; add a driver."
        )


def refusal(role: str, field: str, value: object, accepted: str) -> ConfigurationError:
    """Return the error about an option of a role."""
    return ConfigurationError(f"role {role}: {field} {value}: {accepted}.")


def _check_role(role: RoleSpec) -> None:
    def refuse(field: str, value: object, accepted: str) -> None:
        raise refusal(role.name, field, value, accepted)

    if not 1 <= role.least <= role.most:
        refuse(
            "instances",
            f"({role.least}, {role.most})",
            "must be N or (MIN, MAX) with 1 <= MIN <= MAX",
        )
    if role.kind is RoleKind.DRIVER and (role.most > 1 or role.is_service):
        refuse("kind", "driver", "a driver is a script or a function with one instance")
    if role.processes < 1 or (role.processes > 1 and role.kind is not RoleKind.ELASTIC):
        refuse("processes", role.processes, "must be 1, or more for an elastic role")
    if role.gpus > 1 and not role.gpus.is_integer():
        refuse("resources gpu", role.gpus, "must be a whole number, or 1 or less")
    if role.spares and (role.spares < 0 or role.kind is not RoleKind.ELASTIC):
        refuse("spares", role.spares, "must be 0, or more for an elastic role")
    if role.max_restarts < 0:
        refuse("max_restarts", role.max_restarts, "must be 0 or a positive whole number")
    if role.kind is RoleKind.ELASTIC and role.is_service and role.failover is not Failover.INSTANCE:
        refuse("failover", role.failover.value, "an elastic role of objects takes instance")


def _check_times(role: RoleSpec) -> None:
    if not 0 < role.window < math.inf:
        raise refusal(role.name, "window", role.window, "must be a number of seconds above 0")
    if role.shutdown_timeout < 0:
        raise refusal(
            role.name, "shutdown_timeout", role.shutdown_timeout, "must be 0 or more seconds"
        )


def _check_health(role: RoleSpec) -> None:
    for phase, seconds in role.health.items():
        why = "must be the name of a phase with seconds above 0"
        if phase == IDLE:
            why = "an idle instance waits for others, so that idle has no limit"
        elif NAME.fullmatch(phase) and 0 < seconds < math.inf:
            continue
        raise refusal(role.name, f"health {phase}:", f"{seconds:g}", why)


def _check_dependencies(role: RoleSpec, names: Sequence[str]) -> None:
    for other in role.depends_on:
        if other not in names:
            others = [name for name in names if name != role.name]
            hint = f"must be one of {', '.join(others)}" if others else "the job has no other role"
            near = did_you_mean(str(other), others)
            raise ConfigurationError(
                f"role {role.name}: depends_on {other}: there is no such role; {hint}.{near}"
            )


def _circle(job: RolesJob) -> list[str]:
    """Return roles in a circle, each of them depending on the next, the first again at the end; empty if there are none."""
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in job.role(name).depends_on:
            found = search(other, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    return next((found for role in job.roles if (found := search(role.name, []))), [])
