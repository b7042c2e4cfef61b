"""Access to a Ray cluster: connecting, named actors, placement groups, resources, records of ended jobs."""

from __future__ import annotations

import logging
import platform
import socket
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from dlrover import config, extras
from dlrover._util import decoding
from dlrover._util.doors import install
from dlrover.errors import ConfigurationError, InfrastructureError, causes
from dlrover.ray.machine import job as jobs, words
from dlrover.ray.machine.job import NAMESPACE, Resources
from dlrover.rpc import foreign

MOST_RECORD = 16 << 20
"""Bytes of an ended job's record beyond which its journal is left out of it."""
CONNECT_TIMEOUT = 10.0
"""Seconds for a connection to the cluster's port."""
ASKED = {
    "": "/ray.rpc.NodeInfoGcsService/CheckAlive",
    "ray://": "/ray.rpc.RayletDriver/ClusterInfo",
}
"""Methods that any cluster has, by the beginning of its address."""
RETRY_DELAY = 0.2
"""Seconds between two calls to an actor that Ray restarts."""
_RECORD = "dlrover:ended:"


def connect(address: str, working_dir: str = "") -> None:
    """Connect this process to the cluster at ``address``, or to the one that Ray finds by itself.

    Raises:
        ConfigurationError: Ray is not installed or too old, there is no cluster, it runs another version of Ray or turns
            this process away, or a variable of Ray is malformed.
    """
    with extras.needed("--platform ray", "ray"):
        import ray  # noqa: PLC0415 - needs the extra

    words.check_version(ray.__version__, install("ray"))
    if ray.is_initialized():
        return
    check_port(address)
    env = config.environ()
    if jobs.OF_RAY_JOB in env:
        jobs.ray_job_config(env[jobs.OF_RAY_JOB])
    options: dict[str, Any] = {"runtime_env": {"working_dir": working_dir}} if working_dir else {}
    if not address.startswith("ray://"):
        options |= {"log_to_driver": False, "configure_logging": False}
    try:
        ray.init(address or "auto", namespace=NAMESPACE, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        if is_about_tokens(error):
            raise ConfigurationError(why_unauthenticated(address)) from error
        ours = f"Ray {ray.__version__} and Python {platform.python_version()}"
        raise ConfigurationError(words.why_refused(address, str(error), ours)) from error


def check_port(address: str) -> None:
    """Refuse an address where nothing listens, or a cluster that turns this process away or runs another version of Ray.

    Ray itself would try again and again.

    Raises:
        ConfigurationError: the address is one of these.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT):
            pass
    except (OSError, ValueError) as error:
        raise ConfigurationError(words.why_refused(address, str(error))) from error
    env = config.environ()
    mode = env.get("RAY_AUTH_MODE", "")
    if mode not in ("", "token", "disabled") or "RAY_ENABLE_K8S_TOKEN_AUTH" in env:
        return  # the token comes from elsewhere
    if env.get("RAY_USE_TLS", "0") not in ("", "0"):
        return  # the question, and a token in it, would go unencrypted
    token = _token() if mode != "disabled" else ""
    if not (token.isascii() and token.isprintable()):
        raise ConfigurationError(
            "The Ray token of this environment is malformed: it must be one line of printable ASCII characters; correct"
            " RAY_AUTH_TOKEN, or the file at RAY_AUTH_TOKEN_PATH."
        )
    method = ASKED["ray://" if address.startswith("ray://") else ""]
    answer = foreign.ask(f"{host}:{port}", method, token)
    if answer.turned_away:
        raise ConfigurationError(why_unauthenticated(address))
    theirs, ours = words.version_in(answer.body), _version()
    if theirs and ours and theirs != ours:
        raise ConfigurationError(words.why_other(address, f"Ray {theirs}", f"Ray {ours}"))


def _version() -> str:
    """Return the version of Ray in this environment; empty if it is unknown."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        return ""


def is_about_tokens(error: BaseException | None) -> bool:
    """Return whether an error of Ray comes of a token that is missing or wrong."""
    return any(words.is_about_tokens(f"{type(one).__name__}: {one}") for one in causes(error))


def why_unauthenticated(address: str) -> str:
    """Return, in one sentence, why a cluster turns this process away, and what to do."""
    mode = config.environ().get("RAY_AUTH_MODE", "")
    return words.why_unauthenticated(address, mode, has_token=bool(_token()))


def _token() -> str:
    """Return the token that Ray takes in this environment; empty if there is none."""
    env = config.environ()
    if token := env.get("RAY_AUTH_TOKEN", ""):
        return token.strip()
    path = Path(env.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def disconnect() -> None:
    """Leave the cluster, if this process has connected to one."""
    with extras.needed("--platform ray", "ray"):
        import ray  # noqa: PLC0415 - needs the extra
    ray.shutdown()


def actor(name: str) -> Any:
    """Return the handle of a named actor, or None if it is dead for good."""
    import ray  # noqa: PLC0415

    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None


def names() -> list[str]:
    """Return the names of all actors of DLRover that are alive, starting or waiting."""
    import ray  # noqa: PLC0415

    found = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in found if one["namespace"] == NAMESPACE]


def end_actor(name: str) -> None:
    """Kill a named actor; do nothing if it is gone."""
    import ray  # noqa: PLC0415

    found = actor(name)
    if found is not None:
        ray.kill(found, no_restart=True)


def remove_groups(prefix: str) -> None:
    """Remove all placement groups whose names begin with ``prefix``."""
    import ray  # noqa: PLC0415
    from ray.util.placement_group import PlacementGroup  # noqa: PLC0415

    for key, group in ray.util.placement_group_table().items():
        if group["name"].startswith(prefix) and group["state"] != "REMOVED":
            identity = ray.PlacementGroupID(bytes.fromhex(key))
            ray.util.remove_placement_group(PlacementGroup(identity))


def has_room(name: str) -> bool:
    """Return whether the placement group of this name has its resources."""
    import ray  # noqa: PLC0415

    groups = ray.util.placement_group_table().values()
    return any(group["name"] == name and group["state"] == "CREATED" for group in groups)


def machines() -> dict[str, Resources]:
    """Return the resources of each living node of the cluster, by its id."""
    import ray  # noqa: PLC0415

    return {one["NodeID"]: one["Resources"] for one in ray.nodes() if one["Alive"]}


def most() -> Resources | None:
    """Return what the cluster's autoscaler can bring it to; None without an autoscaler."""
    from ray._private.state import state  # noqa: PLC0415

    return state.get_max_resources_from_cluster_config()  # type: ignore[no-any-return]


def check_room(job: jobs.RayJob) -> None:
    """Refuse a job that the cluster can never run with its least number of nodes.

    Raises:
        ConfigurationError: it cannot; the message says what is missing.
    """
    for role in job.roles.values():
        _check_amounts("--ray-resources", role.resources)
    spec = job.master.job
    counts = {"": max(1, spec.min_nodes)}
    reason = jobs.impossible(job.role(0).resources, counts[""], machines().values(), most())
    if reason:
        raise ConfigurationError(f"--ray-resources: {reason}.")


def check_roles(roles: Sequence[tuple[str, int, Resources]]) -> None:
    """Refuse roles that the cluster can never run together: name, instances and resources of each.

    Raises:
        ConfigurationError: it cannot; the message says what is missing.
    """
    for name, _, wanted in roles:
        _check_amounts(f"role {name}: resources", wanted)
    reason = jobs.too_much(roles, machines().values(), most())
    if reason:
        raise ConfigurationError(f"resources: {reason}.")


def _check_amounts(what: str, wanted: Resources) -> None:
    """Refuse amounts that Ray gives to no actor, such as a part of an accelerator that it does not divide."""
    import ray  # noqa: PLC0415

    def nothing() -> None:
        pass

    try:
        ray.remote(**jobs.actor_options({kind: n for kind, n in wanted.items() if n}))(nothing)
    except ValueError as error:
        raise ConfigurationError(f"{what}: {str(error).rstrip('.')}.") from error


def own_address() -> str:
    """Return the address of this machine for the others of the cluster."""
    import ray  # noqa: PLC0415

    return str(ray.util.get_node_ip_address())


# ---- records of ended jobs


def keep_record(job: str, files: dict[str, bytes]) -> None:
    """Keep the files of an ended job in Ray's key-value store, where commands find them."""
    from ray.experimental import internal_kv  # noqa: PLC0415

    data = msgspec.msgpack.encode(files)
    if len(data) > MOST_RECORD:
        data = msgspec.msgpack.encode({k: v for k, v in files.items() if "journal" not in k})
    internal_kv._internal_kv_put(_RECORD + job, data, overwrite=True)  # noqa: SLF001


def record(job: str) -> dict[str, bytes] | None:
    """Return the files of an ended job; None if there are none."""
    from ray.experimental import internal_kv  # noqa: PLC0415

    data = internal_kv._internal_kv_get(_RECORD + job)  # noqa: SLF001
    return None if data is None else decoding.msgpack(data, dict[str, bytes])


def records() -> list[str]:
    """Return the names of the ended jobs that left a record."""
    from ray.experimental import internal_kv  # noqa: PLC0415

    found = internal_kv._internal_kv_list(_RECORD)  # noqa: SLF001
    return sorted(key.decode().removeprefix(_RECORD) for key in found)


def forget_record(job: str) -> None:
    """Drop the record of an earlier job of this name."""
    from ray.experimental import internal_kv  # noqa: PLC0415

    internal_kv._internal_kv_del(_RECORD + job)  # noqa: SLF001


def answer(call: Callable[[], Any], timeout: float) -> Any:
    """Return the result of a call to an actor; call again while Ray restarts the actor.

    Raises:
        InfrastructureError: the actor is dead, or does not answer within ``timeout`` seconds.
    """
    import ray  # noqa: PLC0415

    until = time.monotonic() + timeout
    while True:
        try:
            return ray.get(call(), timeout=max(0.0, until - time.monotonic()))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            if isinstance(error, ray.exceptions.GetTimeoutError):
                raise InfrastructureError(
                    f"Ray: the job's master actor gave no answer within {timeout:g} s."
                ) from error
            away = isinstance(error, ray.exceptions.ActorUnavailableError)
            if not away or time.monotonic() > until:
                raise InfrastructureError(f"Ray: {words.why_died(str(error))}.") from error
            time.sleep(RETRY_DELAY)  # noqa: TID251 - Ray restarts the actor meanwhile
