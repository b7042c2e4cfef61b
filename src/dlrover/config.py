"""Settings, and the only reader of the process environment.

The first source that has a setting wins: the command-line flag (``--rdzv-conf key=value``), the environment
(``DLROVER_<KEY>``), the configuration file (TOML; ``--config`` or ``DLROVER_CONFIG``), the default. An
unknown key in any of them is an error.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shlex
import tempfile
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from dlrover._util import decoding
from dlrover.errors import ConfigurationError, kind_of, readable
from dlrover.spec.job import Limits
from dlrover.spec.jobdir import MetricsAddress, TlsFiles
from dlrover.spec.words import did_you_mean

logger = logging.getLogger(__name__)

ENV_PREFIX = "DLROVER_"
TORCH_RDZV_KEYS = frozenset(
    {"timeout", "close_timeout", "heartbeat", "keep_alive_interval", "read_timeout", "is_host",
     "store_type", "rank", "use_libuv"}
)  # fmt: skip
"""Keys of torchrun's ``--rdzv-conf`` that are accepted and ignored."""
ALIASES = {"lastcall_timeout": "last_call_timeout"}
"""Names of settings in the original DLRover, and today's names."""
OTHER_VARIABLES = frozenset(
    {"MASTER_ADDR", "JOB_DIR", "CONFIG", "TOKEN", "STATE_DIR", "CACHE_DIR", "KUBERNETES_JOB", "KUBERNETES_JOB_UID", "NODE_ID",
     "NODE_NAME", "NODE_RANK", "NODE_COMMAND", "STEPS_FILE", "BRAIN_TOKEN", "BRAIN_DATABASE", "DASHBOARD_TOKEN", "REPLICA_SECRET",
     "NATIVE", "ROLES_ADDRESS", "ROLES_TOKEN", "ROLES_TOKEN_FILE", "ROLES_JOB", "ROLES_INSTANCES", "ROLE", "ROLE_ATTEMPT",
     "ROLE_CONFIG", "ROLES_TLS_CA", "ROLES_TLS_SERVER_NAME", "VERL"}
)  # fmt: skip
"""``DLROVER_...`` variables that are not settings of the configuration file."""
REPLICA_SECRET = f"{ENV_PREFIX}REPLICA_SECRET"
"""Variable in which the agent of a job with TLS passes its workers the shared secret of their savers."""
TEST_VARIABLES = frozenset({"PROBE_FAULTS", "CHAOS_MARK", "REAL_KUBELET", "APIEXTENSIONS_SERVER"})
"""Variables of tests; the names of all other test variables begin with ``DLROVER_TEST_``."""
_SERVICE = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP|SCTP)(_.+)?)")
"""Names, without our prefix, of the variables that Kubernetes sets for a Service named ``dlrover...``."""
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)
"""Start of the value of a Service's ``_PORT`` variable."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a process."""

    limits: Limits = Limits()
    journal: str = "file:"
    """Location of the job's state, kept by the master: ``file:`` in the job directory, ``file:/path``
    elsewhere, ``memory:`` nowhere (a restarted master learns from the nodes what they run)."""
    diagnosis_rules: str = ""
    """Path of a TOML file with rows for the table of causes; they are tried before DLRover's own."""
    tls_cert: str = ""
    """PEM certificate of the master's server; set it together with ``tls_key``. Empty: no TLS."""
    tls_key: str = ""
    """PEM key of ``tls_cert``."""
    tls_ca: str = ""
    """PEM certificates that clients trust; clients use TLS if this is set."""
    tls_server_name: str = ""
    """Name in the master's certificate, for clients that reach the master by another name."""
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    """Port on which the master serves Prometheus metrics; 0: no metrics."""
    metrics_host: str = "127.0.0.1"
    """Address on which the master serves metrics; 0.0.0.0 for all addresses of the machine."""
    brain: str = ""
    """Address (``host:port``) of the Brain; empty: no Brain."""
    optimize_mode: Literal["single-job", "cluster"] = "single-job"
    """Authority over the size of a job with ``--auto-scale``: the job itself, or the Brain for all jobs."""
    brain_token_file: str = ""
    """File with the Brain's token, used if ``DLROVER_BRAIN_TOKEN`` is not set."""

    @property
    def tls(self) -> TlsFiles:
        """The ``tls_`` settings."""
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca, self.tls_server_name)

    @property
    def metrics(self) -> MetricsAddress:
        """The ``metrics_`` settings."""
        return MetricsAddress(self.metrics_host, self.metrics_port)


_GRPC = "GRPC_"
_given: dict[str, str] | None = None
"""The original grpc variables of the environment; None while the environment is unchanged."""


def environ() -> dict[str, str]:
    """Return a copy of the environment without grpc's additions; workers get this copy."""
    if _given is None:
        return dict(os.environ)
    own = {key: value for key, value in os.environ.items() if not key.startswith(_GRPC)}
    return own | _given


def prepare_for_grpc() -> None:
    """Prepare the environment for grpc; call this before loading grpc, which reads and extends it.

    This silences grpc's C library on standard error, since its errors reach the user as ours. Workers get
    neither this setting nor grpc's additions.
    """
    global _given  # noqa: PLW0603 - one environment, one process
    if _given is None:
        _given = {key: value for key, value in os.environ.items() if key.startswith(_GRPC)}
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def settings(
    env: Mapping[str, str],
    config_file: str = "",
    rdzv_conf: Mapping[str, str] | None = None,
) -> Settings:
    """Return the settings of this process.

    Raises:
        ConfigurationError: a key is unknown, a value has the wrong type, or the file cannot be read.
    """
    file = config_file or env.get(f"{ENV_PREFIX}CONFIG", "")
    values: dict[str, Any] = {}
    for source, found in (
        (f"{file}: {{}} = ", _from_file(file)),
        (f"{ENV_PREFIX}{{}}=", _from_environment(env)),
        ("--rdzv-conf {}=", _from_rdzv_conf(rdzv_conf or {})),
    ):
        _check_types(found, source)
        values.update(found)
    limits = {key: values.pop(key) for key in Limits.__struct_fields__ if key in values}
    if isinstance(limits.get("cause_budgets"), str):
        limits["cause_budgets"] = _budgets(limits["cause_budgets"])
    values["limits"] = limits
    converted = decoding.convert(values, Settings, strict=False)
    if "slow_rank_window" not in limits:  # the default must cover a longer heartbeat_interval
        given = converted.limits
        window = max(given.slow_rank_window, given.heartbeat_interval)
        fitting = msgspec.structs.replace(given, slow_rank_window=window)
        converted = msgspec.structs.replace(converted, limits=fitting)
    _check(converted.limits)
    return converted


def _check_types(values: Mapping[str, Any], source: str) -> None:
    """Refuse the first value of the wrong type; ``source`` has ``{}`` in place of the setting's name."""
    types = {
        **typing.get_type_hints(Limits, include_extras=True),
        **typing.get_type_hints(Settings, include_extras=True),
    }
    for key, value in values.items():
        if key == "cause_budgets" and isinstance(value, str):
            continue
        try:
            decoding.convert(value, types[key], strict=False)
        except msgspec.ValidationError as error:
            name = key.upper() if source.startswith(ENV_PREFIX) else key
            raise ConfigurationError(
                f"{source.format(name)}{value}: the setting has a wrong value; it takes {_accepted(types[key])}."
            ) from error


def _accepted(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is Annotated:
        kind, bounds = typing.get_args(kind)
        return f"{_accepted(kind)} from {bounds.ge} to {bounds.le}"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return words.get(kind, "a table")


ABOVE_ZERO = (
    "heartbeat_interval", "restart_window", "hang_sample_gap", "slow_rank_window", "usage_interval",
    "hot_server_window",
    "autoscale_window", "autoscale_interval", "check_timeout",
)  # fmt: skip
"""Limits that must not be 0; all others may be 0 unless `RANGES` excludes it."""
RANGES = {
    "hang_factor": (1.0, math.inf),
    "slow_rank_ratio": (1.0, math.inf),
    "straggler_ratio": (1.0, math.inf),
    "slow_rank_windows": (1, math.inf),
    "check_rounds": (1, math.inf),
    "node_start_attempts": (1, math.inf),
    "autoscale_cost": (0.0, 1.0),
}
"""Minimum and maximum of single limits."""
RELATIONS = (
    ("heartbeat_timeout", 2.0, "heartbeat_interval", "one late heartbeat must not lose a node"),
    ("slow_rank_window", 1.0, "heartbeat_interval", "heartbeats report how long steps take"),
    ("memory_horizon", 1.0, "usage_interval", "a node's memory is measured that often"),
    ("autoscale_patience", 1.0, "autoscale_window", "a change is measured for that time"),
)
"""Limits that must be at least a multiple of another limit: name, factor, other name, reason."""


def _check(limits: Limits) -> None:
    """Refuse limits that are invalid alone or in combination.

    Raises:
        ConfigurationError: a limit is out of its range, or too small for another one.
    """
    for name in Limits.__struct_fields__:
        value = getattr(limits, name)
        if not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise ConfigurationError(
                f"The setting {name} is {value:g}; it must be a finite number."
            )
        least, most = RANGES.get(name, (0.0, math.inf))
        if not least <= value <= most:
            accepted = (
                f"{least:g} or more" if most == math.inf else f"between {least:g} and {most:g}"
            )
            raise ConfigurationError(f"The setting {name} is {value:g}; it must be {accepted}.")
        if name in ABOVE_ZERO and not value:
            raise ConfigurationError(f"The setting {name} is 0; it must be above 0.")
    for name, factor, other, why in RELATIONS:
        least = factor * getattr(limits, other)
        value = getattr(limits, name)
        if value < least:
            raise ConfigurationError(
                f"The setting {name} is {value:g} and {other} is {getattr(limits, other):g}: {name} must be "
                f"{least:g} or more, since {why}."
            )


def node_place(env: Mapping[str, str]) -> tuple[int, int]:
    """Return the node id and rank that the platform gave this node; -1 for each that is missing.

    Raises:
        ConfigurationError: a variable is not a whole number.
    """
    place = []
    for name in ("DLROVER_NODE_ID", "DLROVER_NODE_RANK"):
        value = env.get(name, "-1")
        if not value.removeprefix("-").isdecimal():
            raise ConfigurationError(f"{name}={value}: must be a whole number.")
        place.append(int(value))
    return place[0], place[1]


def steps_file(env: Mapping[str, str]) -> str:
    """Return the file for the steps of this worker's program; empty if unset, or on ranks other than 0."""
    return env.get("DLROVER_STEPS_FILE", "") if env.get("RANK", "0") == "0" else ""


def node_command(env: Mapping[str, str]) -> list[str]:
    """Return the command prefix that gives each local node an address of its own; usually empty."""
    return shlex.split(env.get("DLROVER_NODE_COMMAND", ""))


def native(env: Mapping[str, str]) -> str:
    """Return whether to use the compiled library (`dlrover._native`): ``auto``, ``require`` or ``off``.

    Raises:
        ConfigurationError: ``DLROVER_NATIVE`` has another value.
    """
    choice = env.get("DLROVER_NATIVE") or "auto"
    if choice not in ("auto", "require", "off"):
        raise ConfigurationError(f"DLROVER_NATIVE={choice}: it takes auto, require or off.")
    return choice


ROLE_VARIABLES = {
    "address": "DLROVER_ROLES_ADDRESS",
    "token_file": "DLROVER_ROLES_TOKEN_FILE",
    "token": "DLROVER_ROLES_TOKEN",
    "job": "DLROVER_ROLES_JOB",
    "role": "DLROVER_ROLE",
    "attempt": "DLROVER_ROLE_ATTEMPT",
    "config": "DLROVER_ROLE_CONFIG",
    "roles": "DLROVER_ROLES_INSTANCES",
    "tls_ca": "DLROVER_ROLES_TLS_CA",
    "tls_server_name": "DLROVER_ROLES_TLS_SERVER_NAME",
    "index": "ROLE_RANK",
    "instances": "ROLE_WORLD_SIZE",
}
"""Variables of a process in a job of several roles, by field of `RolePlace`."""


class RolePlace(msgspec.Struct, frozen=True):
    """What a process of a job of several roles knows of its place, from `ROLE_VARIABLES`."""

    address: str
    """Address (``host:port``) of the job's coordinator."""
    role: str
    token_file: str = ""
    """File with the job's token; empty on a machine that does not have the job's directory."""
    token: str = ""
    """The token itself, where there is no such file."""
    job: str = ""
    attempt: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of the start of the role's job."""
    config: str = "{}"
    """The user's configuration of the role, as JSON."""
    roles: str = "{}"
    """Maximum number of members of each role of the job, as JSON; empty: not known."""
    index: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of the instance in its role; in an elastic role, of the worker."""
    instances: Annotated[int, msgspec.Meta(ge=1)] = 1
    tls_ca: str = ""
    """PEM certificates by which the coordinator is verified; empty: the job does not use TLS."""
    tls_server_name: str = ""
    """Name in the coordinator's certificate, if that is not the address."""


def role_place(env: Mapping[str, str]) -> RolePlace | None:
    """Return the place of this process in a job of several roles; None if it has none.

    Raises:
        ConfigurationError: a variable is missing or wrong.
    """
    if "DLROVER_ROLES_ADDRESS" not in env:
        return None
    values = {field: env[name] for field, name in ROLE_VARIABLES.items() if env.get(name)}
    try:
        return decoding.convert(values, RolePlace, strict=False)
    except msgspec.ValidationError as error:
        given = ", ".join(
            f"{ROLE_VARIABLES[field]}={value}"
            for field, value in values.items()
            if field != "token"
        )
        raise ConfigurationError(
            f"The place of this process in a job of several roles is wrong: {error}; set are {given}."
        ) from error


def setting_names() -> frozenset[str]:
    """Return all names that a configuration file may set."""
    return (frozenset(Settings.__struct_fields__) - {"limits"}) | set(Limits.__struct_fields__)


def state_dirs(env: Mapping[str, str]) -> list[Path]:
    """Return the candidate parents of job directories; the first writable one is used.

    The user's state directory precedes a temporary one; ``DLROVER_STATE_DIR`` replaces both.
    """
    if env.get("DLROVER_STATE_DIR"):
        return [Path(env["DLROVER_STATE_DIR"])]
    temporary = Path(tempfile.gettempdir()) / f"dlrover-{os.getuid()}"
    if env.get("XDG_STATE_HOME"):
        return [Path(env["XDG_STATE_HOME"]) / "dlrover", temporary]
    home = [Path(env["HOME"]) / ".local" / "state" / "dlrover"] if env.get("HOME") else []
    return [*home, temporary]


def in_state_dir(
    env: Mapping[str, str], make: Callable[[Path], Path], instead: str = ""
) -> tuple[Path, Path]:
    """Call ``make`` on the first of `state_dirs` where it succeeds; return that directory and what was made.

    Args:
        env: The process environment.
        make: Makes a file or folder in a directory that may not exist yet, and returns its path.
        instead: An option or variable that the user can set, too, if none is writable.

    Raises:
        ConfigurationError: No directory can be written.
    """
    wanted, *others = state_dirs(env)
    try:
        return wanted, make(wanted)
    except OSError as error:
        problem = error
    for other in others:
        with contextlib.suppress(OSError):
            other.mkdir(mode=0o700, exist_ok=True)
            if other.stat().st_uid != os.getuid():
                continue  # another user made it, perhaps to read or to replace what is written there
            made = make(other)
            logger.warning("%s cannot be written (%s): %s is used.", wanted, problem.strerror, made)
            return other, made
    options = " or ".join(filter(None, (instead, "DLROVER_STATE_DIR")))
    raise kind_of(problem)(
        f"{wanted} cannot be written ({problem.strerror}): set {options}."
    ) from problem


def cache_dir(env: Mapping[str, str]) -> Path | None:
    """Return the directory for what only saves time; None without a home. ``DLROVER_CACHE_DIR`` replaces it."""
    if "DLROVER_CACHE_DIR" in env:
        return Path(env["DLROVER_CACHE_DIR"]) if env["DLROVER_CACHE_DIR"] else None
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "dlrover"
    return Path(env["HOME"]) / ".cache" / "dlrover" if env.get("HOME") else None


def _budgets(text: str) -> dict[str, int]:
    """Parse ``ecc:2 host_oom:5`` into a dictionary."""
    budgets = {}
    for pair in text.split():
        cause, _, count = pair.partition(":")
        if not cause or not count.isdecimal():
            raise ConfigurationError(
                f"cause_budgets {text!r}: {pair!r} is not of the form CAUSE:NUMBER, as ecc:2 is."
            )
        budgets[cause] = int(count)
    return budgets


def _from_file(path: str) -> dict[str, Any]:
    if not path:
        return {}
    with readable(f"The configuration file {path}"):
        data = Path(path).read_bytes()
    try:
        values = decoding.toml(data)
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"The configuration file {path} is not valid TOML: {error}."
        ) from error
    _refuse_unknown(values, f"the configuration file {path}")
    return values


def check_variables(env: Mapping[str, str]) -> None:
    """Refuse a ``DLROVER_`` variable that nothing reads, for a command that takes no settings.

    Raises:
        ConfigurationError: there is one; the sentence has the nearest name.
    """
    _from_environment(env)


def _from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    names = setting_names()
    values = {}
    for variable, value in env.items():
        name = variable.removeprefix(ENV_PREFIX)
        if name == variable or not value or name in OTHER_VARIABLES | TEST_VARIABLES:
            continue
        if _is_of_a_service(name, value):
            continue
        if name.lower() in names and name == name.upper():
            values[name.lower()] = value
        elif not name.startswith("TEST_"):
            known = [*(key.upper() for key in names), *OTHER_VARIABLES]
            hint = did_you_mean(name.upper(), known, before=ENV_PREFIX)
            raise ConfigurationError(f"{variable} is set and is no variable of DLRover.{hint}")
    return values


def _is_of_a_service(name: str, value: str) -> bool:
    """Return whether Kubernetes set a variable for a Service whose name begins with ``dlrover``."""
    url = re.fullmatch(r"(.*_)?PORT", name) and _SERVICE_URL.match(value)
    return bool(url or _SERVICE.fullmatch(name))


def _from_rdzv_conf(conf: Mapping[str, str]) -> dict[str, Any]:
    values = {ALIASES.get(key, key): value for key, value in conf.items()}
    values = {key: value for key, value in values.items() if key not in TORCH_RDZV_KEYS}
    _refuse_unknown(values, "--rdzv-conf")
    return values


def _refuse_unknown(values: Mapping[str, Any], where: str) -> None:
    names = setting_names()
    for key in values:
        if key not in names:
            hint = did_you_mean(key, names) or f" The settings are {', '.join(sorted(names))}."
            raise ConfigurationError(f"{where} sets {key}, which is not a setting.{hint}")
