"""The job directory: file names of everything that a job leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from dlrover._util import decoding
from dlrover.errors import FormatError
from dlrover.spec.job import JobSpec, LaunchSpec, Limits
from dlrover.spec.node import NodeLimits
from dlrover.spec.plan import NodeGroup

T = TypeVar("T")

FORMAT = 3
"""Format number of the journal, the configurations and the events. It changes with the meaning or the shape
of any record in them, so that a master never continues from half of what an earlier version wrote."""

OUTCOME_ROOM = 256 * 1024
"""Bytes reserved for an outcome: more than the longest texts of a failure take."""


def liveness_socket(port: int) -> str:
    """Return the abstract Unix socket, without a file, at which the master on a port shows that it runs."""
    return f"\0dlrover-master-{port}"


class JobDir:
    """Paths in the job directory at ``path``. Creates and reads nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def job(self) -> Path:
        """The `MasterConfig` that the job's master was started with (JSON)."""
        return self.path / "job.json"

    @property
    def roles(self) -> Path:
        """The `RolesConfig` of a job of several roles (JSON). Each role has a job directory below this one."""
        return self.path / "roles.json"

    @property
    def agent(self) -> Path:
        """The `AgentConfig` of the nodes that were started from this directory (JSON)."""
        return self.path / "agent.json"

    @property
    def token(self) -> Path:
        """The job's token; only its owner can read it."""
        return self.path / "token"

    @property
    def master(self) -> Path:
        """Address of the master: a `MasterAddress` (JSON), replaced at each start of a master."""
        return self.path / "master.json"

    @property
    def journal(self) -> Path:
        """Every input of the master's state machines (SQLite)."""
        return self.path / "journal.sqlite"

    @property
    def events(self) -> Path:
        """The job's events, one JSON object per line."""
        return self.path / "events.jsonl"

    @property
    def clock(self) -> Path:
        """Where the clock of the job's masters begins (JSON)."""
        return self.path / "clock.json"

    @property
    def evidence(self) -> Path:
        """The stacks of hangs, numbered: ``1.txt`` to read, ``1.json`` with every rank."""
        return self.path / "evidence"

    @property
    def checkpoints(self) -> Path:
        """The checkpoint directories that the program saves to, one per line."""
        return self.path / "checkpoints.txt"

    @property
    def outcome(self) -> Path:
        """The job's `Outcome` (JSON), written when the job ends."""
        return self.path / "outcome.json"

    @property
    def left(self) -> Path:
        """The `Outcome` with which this machine's node left a job whose master runs elsewhere (JSON)."""
        return self.path / "left.json"

    @property
    def lock(self) -> Path:
        """Lock of the launcher, held while it runs."""
        return self.path / "lock"

    @property
    def logs(self) -> Path:
        """The workers' logs, in torchrun's layout."""
        return self.path / "logs"

    @property
    def master_log(self) -> Path:
        """The master's log."""
        return self.path / "master.log"

    def agent_log(self, name: str) -> Path:
        """The log of one agent."""
        return self.path / f"agent-{name}.log"


class MasterAddress(msgspec.Struct, frozen=True):
    """Address and process id of a job's master."""

    address: str
    pid: int


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files, and the name in the server's certificate; empty ones are not used."""

    cert: str = ""
    key: str = ""
    ca: str = ""
    server_name: str = ""


class MetricsAddress(msgspec.Struct, frozen=True):
    """Address of a master's Prometheus metrics; port 0: no metrics."""

    host: str = "127.0.0.1"
    port: int = 0


class BrainSide(msgspec.Struct, frozen=True, kw_only=True):
    """A master's connection to the Brain, and its report about the job."""

    address: str = ""
    """``host:port``; empty: no Brain."""
    token_file: str = ""
    """File with the Brain's token; empty: the environment has it."""
    cluster: bool = False
    """True: the Brain chooses the job's size together with those of all others. False: the job does."""
    program: str = ""
    """The job's program, by which similar past jobs are found."""
    origin: str = ""
    """Id of the object from which the job was made, such as the uid of an ElasticJob; empty: none."""
    node: NodeGroup = NodeGroup(count=1)
    """Resources of the cluster that each node takes, where known."""


class MasterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of a master process; read it with `decode`."""

    format: int = FORMAT
    """Format of the job directory."""
    job: JobSpec
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = 0
    """0: any free port at the first start, the same one afterwards."""
    platform: str = ""
    """Platform that launches the job's ``managed_nodes``; empty if there are none."""
    node_size: NodeLimits = NodeLimits()
    """Each node's share of the machine, if the platform is ``local``."""
    tls: TlsFiles = TlsFiles()
    journal: str = "file:"
    """Location of the job's state; see the setting of this name."""
    metrics: MetricsAddress = MetricsAddress()
    brain: BrainSide = BrainSide()


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of an agent process; read it with `decode`."""

    format: int = FORMAT
    """Format of the job directory."""
    launch: LaunchSpec
    limits: Limits = Limits()
    master_address: str = ""
    """``host:port``; empty: the address in the job directory."""
    address: str = "127.0.0.1"
    """Address at which other nodes reach this one; empty: the address from which it reaches the master."""
    store_port: int = 0
    """Port of the world's store if this node has rank 0; 0: any free port."""
    accelerator: str = ""
    """Device type for the program, as ``--accelerator`` names it; empty: what the node has."""
    tls: TlsFiles = TlsFiles()


class ConfigHeader(msgspec.Struct, frozen=True):
    """Fields that the configurations of all versions share."""

    format: int = 1
    """1 if missing: the first version did not write it."""
    journal: str = "file:"
    """As in `MasterConfig`."""


def decode(path: Path, data: bytes, kind: type[T]) -> T:
    """Decode ``data``, the content of the configuration file ``path``.

    Raises:
        FormatError: another version of DLRover wrote it.
        msgspec.DecodeError: it is damaged.
    """
    check_format(path, decoding.json(data, ConfigHeader).format)
    return decoding.json(data, kind)


def check_format(path: Path, found: int) -> None:
    """Refuse a file of another format.

    Raises:
        FormatError: ``found`` is not the format that this version reads.
    """
    if found != FORMAT:
        raise FormatError(
            f"{path} has format {found}, of another version of DLRover; this one reads format {FORMAT}. Finish "
            "the job with the version that began it, or start a new job in another directory: this file stays "
            "as it is."
        )
