"""Settings, and the only reader of the process environment.

A setting's value is, in this order: the command-line flag (``--rdzv-conf key=value``), the environment
(``DLROVER_<KEY>``), the configuration file (TOML; ``--config`` or ``DLROVER_CONFIG``), the default. An
unknown key is an error wherever it stands.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from dlrover.errors import ConfigurationError
from dlrover.spec.job import Limits

ENV_PREFIX = "DLROVER_"
TORCH_RDZV_KEYS = frozenset(
    {"timeout", "close_timeout", "heartbeat", "keep_alive_interval", "read_timeout", "is_host",
     "store_type", "rank", "use_libuv"}
)  # fmt: skip
"""Keys of torchrun's ``--rdzv-conf`` that are accepted and mean nothing to our rendezvous."""
ALIASES = {"lastcall_timeout": "last_call_timeout"}
"""Other spellings of settings: the original DLRover's."""
OTHER_VARIABLES = frozenset(
    {"MASTER_ADDR", "JOB_DIR", "CONFIG", "TOKEN", "STATE_DIR", "KUBERNETES_JOB", "NODE_ID", "NODE_NAME",
     "NODE_RANK", "NODE_COMMAND", "BRAIN_TOKEN", "BRAIN_DATABASE", "INGEST_TOKEN"}
)  # fmt: skip
"""``DLROVER_...`` variables that are not settings of the file."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a process."""

    limits: Limits = Limits()
    journal: str = "file:"
    """Where the master keeps the job's state: ``file:`` in the job directory, ``file:/path`` elsewhere,
    ``memory:`` nowhere (a master that comes back learns from the nodes what they run)."""
    diagnosis_rules: str = ""
    """Path of a TOML file with rows for the table of causes, which are tried before DLRover's own."""
    tls_cert: str = ""
    """PEM certificate of the master's server; set it with ``tls_key``. Empty: no TLS."""
    tls_key: str = ""
    """PEM key that belongs to ``tls_cert``."""
    tls_ca: str = ""
    """PEM certificates that clients trust; they use TLS if it is set."""
    tls_server_name: str = ""
    """Name that the master's certificate has, for clients that reach it by another one."""
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    """Port on which the master serves Prometheus metrics; 0: it serves none."""
    metrics_host: str = "127.0.0.1"
    """Address on which it serves them; 0.0.0.0 for all of the machine."""
    brain: str = ""
    """Address (``host:port``) of the Brain; empty: there is none."""
    optimize_mode: Literal["single-job", "cluster"] = "single-job"
    """Who chooses the size of a job with ``--auto-scale``: the job itself, or the Brain for all jobs."""
    brain_token_file: str = ""
    """File with the Brain's token, if ``DLROVER_BRAIN_TOKEN`` does not have it."""


_GRPC = "GRPC_"
_given: dict[str, str] | None = None
"""The variables of grpc in the environment that this process was given; None: they are as they were."""


def environ() -> dict[str, str]:
    """A copy of the environment, without what grpc added; what workers get."""
    if _given is None:
        return dict(os.environ)
    own = {key: value for key, value in os.environ.items() if not key.startswith(_GRPC)}
    return own | _given


def prepare_for_grpc() -> None:
    """Call it before grpc is loaded, which reads the environment and adds to it.

    Its C library is kept from writing to standard error: what it would say reaches the user as an error
    of ours. Neither that nor what grpc adds is for the workers.
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
    """The settings of this process.

    Raises:
        ConfigurationError: a key is unknown, a value has the wrong type, or the file cannot be read.
    """
    values: dict[str, Any] = _from_file(config_file or env.get(f"{ENV_PREFIX}CONFIG", ""))
    values.update(_from_environment(env))
    values.update(_from_rdzv_conf(rdzv_conf or {}))
    limits = {key: values.pop(key) for key in Limits.__struct_fields__ if key in values}
    if isinstance(limits.get("cause_budgets"), str):
        limits["cause_budgets"] = _budgets(limits["cause_budgets"])
    values["limits"] = limits
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"A setting has a wrong value: {error}.") from error


def node_place(env: Mapping[str, str]) -> tuple[int, int]:
    """The node id and rank with which a platform started this machine's part of a job; -1 for none.

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


def node_command(env: Mapping[str, str]) -> list[str]:
    """The words before the command of each local node, which give it an address of its own; mostly none."""
    return shlex.split(env.get("DLROVER_NODE_COMMAND", ""))


def setting_names() -> frozenset[str]:
    """Every name that a configuration file may set."""
    return (frozenset(Settings.__struct_fields__) - {"limits"}) | set(Limits.__struct_fields__)


def state_dir(env: Mapping[str, str]) -> Path:
    """Where job directories go by default: the user's state directory."""
    if env.get("DLROVER_STATE_DIR"):
        return Path(env["DLROVER_STATE_DIR"])
    base = env.get("XDG_STATE_HOME") or str(Path(env.get("HOME", "/tmp")) / ".local" / "state")  # noqa: S108
    return Path(base) / "dlrover"


def _budgets(text: str) -> dict[str, int]:
    """``ecc:2 host_oom:5`` as a dictionary."""
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
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"The configuration file {path} cannot be read: {error.strerror}."
        ) from error
    try:
        values = msgspec.toml.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"The configuration file {path} is not valid TOML: {error}."
        ) from error
    _refuse_unknown(values, f"the configuration file {path}")
    return values


def _from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    names = setting_names()
    values = {}
    for variable, value in env.items():
        key = variable[len(ENV_PREFIX) :].lower()
        if variable.startswith(ENV_PREFIX) and key in names:
            values[key] = value
    return values


def _from_rdzv_conf(conf: Mapping[str, str]) -> dict[str, Any]:
    values = {ALIASES.get(key, key): value for key, value in conf.items()}
    values = {key: value for key, value in values.items() if key not in TORCH_RDZV_KEYS}
    _refuse_unknown(values, "--rdzv-conf")
    return values


def _refuse_unknown(values: Mapping[str, Any], where: str) -> None:
    names = setting_names()
    for key in values:
        if key not in names:
            raise ConfigurationError(
                f"{where} sets {key}, which is not a setting; the settings are {', '.join(sorted(names))}."
            )
