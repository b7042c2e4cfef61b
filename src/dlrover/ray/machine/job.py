"""A job on a Ray cluster: its record, the names of its actors, the resources of its nodes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from dlrover._util import decoding
from dlrover.errors import ConfigurationError
from dlrover.spec.jobdir import AgentConfig, MasterConfig
from dlrover.spec.node import FoundNode, LaunchNode

NAMESPACE = "dlrover"
"""Ray namespace of all actors and placement groups."""
FILE = "ray.json"
"""Name of the file in a job directory with the `RayJob`."""
OF_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable from which ``ray.init`` takes a job's runtime environment beside the program's own."""
LABEL = "ray.io/node-id"
"""Label of a Ray node that holds its id."""
SHORT = 12
"""Digits of a Ray node's id in the name of a host."""
_WHOLE = 1.0
"""Up to this amount, Ray takes parts of a GPU; above it, whole ones only."""
_NAMES = {"cpu": "CPU", "gpu": "GPU", "memory": "memory"}

Resources = Mapping[str, float]


class RayRole(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each node of a role starts, and what it takes of the cluster."""

    agent: AgentConfig
    resources: dict[str, float] = {}
    """Amounts by Ray's names: ``CPU``, ``GPU``, ``memory`` (bytes), or a resource of the cluster's own."""
    env: dict[str, str] = {}
    """Variables for the workers, over those of the machine."""


class RayJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the actors of a job need."""

    name: str
    master: MasterConfig
    roles: dict[str, RayRole]
    """By role; the role without a name stands for all that are not listed."""
    token: str
    directory: str = ""
    """Working directory of the workers where it exists; empty, or elsewhere: that of Ray's workers."""
    address: str = ""
    """Address of the cluster for the command that starts the job; empty: Ray's own choice."""
    working_dir: str = ""
    """Directory that Ray copies to each node; empty: none."""
    foreground: bool = False
    """True if the job ends with the command that started it."""

    @property
    def place(self) -> str:
        """Name of the job's directories on the machines of the cluster; that of no other job."""
        return f"{directory_of(self.name)}-{hashlib.sha256(self.token.encode()).hexdigest()[:8]}"

    def nodes_place(self, node_rank: int) -> str:
        """Name of the directory that the nodes of a rank's role share on a machine: each role has another agent.json."""
        role = self._role(node_rank)
        return f"{self.place}-nodes-{role}" if role else f"{self.place}-nodes"

    def role(self, node_rank: int) -> RayRole:
        """Return what a node with this wanted rank starts."""
        return self.roles[self._role(node_rank)]

    def _role(self, node_rank: int) -> str:
        name, _ = self.master.job.place(node_rank)
        return name if name in self.roles else ""


def encode(job: RayJob) -> bytes:
    """Return a job as JSON.

    Raises:
        ConfigurationError: a text is not UTF-8.
    """
    try:
        return msgspec.json.encode(job)
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{error.object!r} is not UTF-8, which arguments and names of files must be."
        ) from error


def decode(data: bytes) -> RayJob:
    """Return the job that `encode` wrote."""
    return decoding.json(data, RayJob)


class _RuntimeEnv(msgspec.Struct):
    env_vars: dict[str, str] | None = None
    worker_process_setup_hook: str | None = None


class _RayJobConfig(msgspec.Struct):
    runtime_env: _RuntimeEnv | None = None
    metadata: dict[str, str] | None = None


def ray_job_config(text: str) -> dict[str, Any]:
    """Return Ray's configuration of a job, as ``ray job submit`` sets it in `OF_RAY_JOB`.

    Raises:
        ConfigurationError: it is malformed.
    """
    try:
        decoding.json(text, _RayJobConfig)
        return decoding.json(text, dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"{OF_RAY_JOB}: {str(error).rstrip('.')}; it must be a Ray job's configuration in JSON, which ray job submit"
            " sets by itself: unset or correct it."
        ) from error


# ---- names


def directory_of(job: str) -> str:
    """Return a name for a job's directory: one part of a path, whatever somebody has named the job."""
    plain = quote(job, safe="")
    return plain if not plain.startswith(".") else f"%2E{plain[1:]}"


def master_name(job: str) -> str:
    """Return the name of a job's master actor."""
    return f"{job}/master"


def job_of(master: str) -> str:
    """Return the name of a master actor's job; empty if the actor is no master."""
    job, _, kind = master.rpartition("/")
    return job if kind == "master" else ""


def node_name(job: str, node: LaunchNode) -> str:
    """Return the name of a node's actor and placement group, by which a later master finds the node."""
    place = f"{node.node_id}/{node.node_rank}"
    return f"{job}/node/{place}/{node.memory_factor!r}/{node.cpu_factor!r}"


def found_nodes(job: str, names: Iterable[str]) -> list[FoundNode]:
    """Return the nodes of a job among named actors, by node id."""
    prefix, found = f"{job}/node/", []
    for name in names:
        parts = name.removeprefix(prefix).split("/")
        if name.startswith(prefix) and len(parts) == 4:
            numbers = int(parts[0]), int(parts[1])
            found.append(FoundNode(*numbers, name, float(parts[2]), float(parts[3])))
    return sorted(found, key=lambda node: node.node_id)


def host_name(hostname: str, node_id: str) -> str:
    """Return the name of a node's host: a machine may run several Ray nodes."""
    return f"{hostname}-{node_id[:SHORT]}"


def elsewhere(avoid: Iterable[str], node_ids: Iterable[str]) -> dict[str, str]:
    """Return the label selector that keeps a node off hosts with these names; empty if all are gone."""
    ends = {host.rpartition("-")[2] for host in avoid}
    unwanted = sorted(node_id for node_id in node_ids if node_id[:SHORT] in ends)
    return {LABEL: f"!in({','.join(unwanted)})"} if unwanted else {}


_OF_START = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}$|-\d+(?=-[0-9a-f]{6}$)")
"""What tells starts of one job apart: the time of a command's, and the number of a role's before what tells its job."""


def meant(job: str, known: Iterable[str]) -> str:
    """Return which known job a name or its beginning up to a hyphen means, of several starts the last; empty if none.

    Raises:
        ConfigurationError: it may mean different jobs.
    """
    fitting = [name for name in known if name == job or name.startswith(f"{job}-")]
    if job in fitting:
        return job
    starts: dict[str, str] = {}
    for name in sorted(fitting, key=lambda name: (len(name), name)):
        starts[_OF_START.sub("", name)] = name
    own = re.compile(rf"{re.escape(job)}(-[0-9a-f]{{6}})?")
    found = [one for one in starts if own.fullmatch(one)] or list(starts)
    if len(found) > 1:
        named = " or ".join(sorted(starts[one] for one in found))
        raise ConfigurationError(f"Job {job} may be {named} of the Ray cluster; name one of them.")
    return starts[found[0]] if found else ""


# ---- resources


def parse_resources(text: str) -> dict[str, float]:
    """Parse ``--ray-resources``, as ``CPU=4,GPU=1``, into amounts by Ray's names.

    Raises:
        ConfigurationError: the text is malformed.
    """
    amounts: dict[str, float] = {}
    for pair in text.split(",") if text else ():
        name, _, amount = (part.strip() for part in pair.partition("="))
        try:
            number = float(amount)
        except ValueError:
            number = -1.0
        if not name or not 0 <= number < float("inf"):
            raise ConfigurationError(
                f"--ray-resources {text}: {pair.strip()!r} is not of the form NAME=AMOUNT, as CPU=4 or GPU=1 are."
            )
        amounts[_NAMES.get(name.lower(), name)] = number
    if amounts.get("GPU", 0.0) > _WHOLE and not amounts["GPU"].is_integer():
        raise ConfigurationError(
            f"--ray-resources {text}: GPU={amounts['GPU']:g} must be a whole number, or 1 or less."
        )
    return amounts


def bundle_of(job: RayJob, name: str) -> dict[str, float]:
    """Return the bundle of the node with this name: its role's resources, multiplied by its factors."""
    [node] = found_nodes(job.name, [name])
    factors = {"CPU": node.cpu_factor, "memory": node.memory_factor}
    scaled = {
        kind: amount * factors.get(kind, 1.0)
        for kind, amount in job.role(node.node_rank).resources.items()
        if amount
    }
    if "memory" in scaled:
        scaled["memory"] = float(int(scaled["memory"]))
    return scaled


def actor_options(bundle: Resources) -> dict[str, Any]:
    """Return the options of an actor that takes a bundle."""
    own = {kind: amount for kind, amount in bundle.items() if kind not in _NAMES.values()}
    return {
        "num_cpus": bundle.get("CPU", 0),
        "num_gpus": bundle.get("GPU", 0),
        "memory": bundle.get("memory"),
        "resources": own,
    }


def in_words(amounts: Resources) -> str:
    """Return ``CPU 4, GPU 1, memory 2Gi``."""
    texts = {
        name: f"{amount / (1 << 30):.3g}Gi" if name == "memory" else f"{amount:g}"
        for name, amount in amounts.items()
    }
    return ", ".join(f"{name} {text}" for name, text in texts.items()) or "nothing"


def waits(wanted: Resources, free: Resources, total: Resources) -> str:
    """Return why a placement group is pending."""
    short = [name for name, amount in wanted.items() if free.get(name, 0.0) < amount]
    if not short:
        return f"placement group pending: needs {in_words(wanted)}, and no node of the cluster has all of it free"
    having = " and ".join(
        f"{in_words({name: free.get(name, 0.0)})} free of {in_words({name: total.get(name, 0.0)})[len(name) + 1 :]}"
        for name in short
    )
    return f"placement group pending: needs {in_words(wanted)}, the cluster has {having}"


def too_much(
    roles: Sequence[tuple[str, int, Resources]], nodes: Iterable[Resources], most: Resources | None
) -> str:
    """Return why a cluster can never run roles together, as a clause; empty if it can. Otherwise as `impossible`.

    Args:
        roles: Name, number of nodes and resources of a node of each.
        nodes: Resources of each node of the cluster.
        most: What the autoscaler can bring the cluster to; None without an autoscaler.
    """
    machines = list(nodes)
    for name, count, wanted in roles:
        reason = impossible(wanted, count, machines, most)
        if reason:
            return f"role {name}: {reason}"
    total = _total(machines, most)
    for kind in sorted({kind for _, _, wanted in roles for kind in wanted}):
        needs = sum(count * wanted.get(kind, 0.0) for _, count, wanted in roles)
        if total.get(kind, 0.0) < needs:
            each = ", ".join(
                f"{name} {count} x {in_words({kind: wanted[kind]})}"
                for name, count, wanted in roles
                if kind in wanted
            )
            can = in_words({kind: total.get(kind, 0.0)})
            return (
                f"the roles need {in_words({kind: needs})}, and the cluster can have {can}: {each}"
            )
    return ""


def impossible(
    wanted: Resources, count: int, nodes: Iterable[Resources], most: Resources | None
) -> str:
    """Return why a cluster can never run ``count`` nodes of a size, as a clause; empty if it can.

    Args:
        wanted: Resources of each node.
        count: Number of nodes.
        nodes: Resources of each node of the cluster.
        most: What the autoscaler can bring the cluster to; None without an autoscaler.
    """
    machines = list(nodes)
    total = _total(machines, most)
    asked = {name: amount * count for name, amount in wanted.items() if amount}
    for name, amount in asked.items():
        if total.get(name, 0.0) < amount:
            many = "1 node needs" if count == 1 else f"{count} nodes need"
            each = f", {in_words({name: wanted[name]})} each" if count > 1 else ""
            return (
                f"{many} {in_words({name: amount})}{each}, and the cluster "
                f"can have {in_words({name: total.get(name, 0.0)})}"
            )
    if most is None and not any(_fits(wanted, machine) for machine in machines):
        return f"a node needs {in_words(wanted)}, and no node of the cluster has that much"
    return ""


def _total(machines: Sequence[Resources], most: Resources | None) -> dict[str, float]:
    """Return what a cluster has, or can have, of each resource."""
    names = {name for machine in machines for name in machine}
    total = {name: sum(machine.get(name, 0.0) for machine in machines) for name in names}
    for name, limit in (most or {}).items():
        total[name] = max(total.get(name, 0.0), limit)
    return total


def _fits(wanted: Resources, machine: Resources) -> bool:
    return all(machine.get(name, 0.0) >= amount for name, amount in wanted.items())
