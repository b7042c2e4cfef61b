"""The job directory: everything a job leaves behind lies in it, under these names."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from dlrover.errors import FormatError
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.launch import LaunchSpec
from dlrover.spec.node import NodeSize
from dlrover.spec.plan import Group

T = TypeVar("T")

FORMAT = 2
"""Of the journal, the configurations and the events. It changes with the meaning or the shape of any record in them: a
master never goes on with half of what an earlier version has written."""


class JobDir:
    """Paths in the job directory at ``path``. Nothing is made or read here."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def job(self) -> Path:
        """The `MasterConfig` that the job's master was started with (JSON)."""
        return self.path / "job.json"

    @property
    def agent(self) -> Path:
        """The `AgentConfig` of the nodes that were started from here (JSON)."""
        return self.path / "agent.json"

    @property
    def token(self) -> Path:
        """The job's token; readable by its owner alone."""
        return self.path / "token"

    @property
    def master(self) -> Path:
        """Where the master listens: a `MasterAddress` (JSON), replaced at each start of a master."""
        return self.path / "master.json"

    @property
    def journal(self) -> Path:
        """Every input of the master's machines (SQLite)."""
        return self.path / "journal.sqlite"

    @property
    def events(self) -> Path:
        """The job's events, one JSON object a line."""
        return self.path / "events.jsonl"

    @property
    def evidence(self) -> Path:
        """The stacks of hangs, numbered: ``1.txt`` to read, ``1.json`` with every rank."""
        return self.path / "evidence"

    @property
    def outcome(self) -> Path:
        """The job's `Outcome` (JSON), once it has ended."""
        return self.path / "outcome.json"

    @property
    def left(self) -> Path:
        """The `Outcome` with which this machine's node left a job whose master is elsewhere (JSON)."""
        return self.path / "left.json"

    @property
    def lock(self) -> Path:
        """Locked by the launcher while it runs."""
        return self.path / "lock"

    @property
    def logs(self) -> Path:
        """The workers' logs, in torchrun's layout."""
        return self.path / "logs"

    @property
    def master_log(self) -> Path:
        """What the master logs."""
        return self.path / "master.log"

    def agent_log(self, name: str) -> Path:
        """What an agent logs."""
        return self.path / f"agent-{name}.log"


class MasterAddress(msgspec.Struct, frozen=True):
    """Where a job's master listens."""

    address: str
    pid: int


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files, and the name that the server's certificate has; empty ones are not used."""

    cert: str = ""
    key: str = ""
    ca: str = ""
    server_name: str = ""


class MetricsAddress(msgspec.Struct, frozen=True):
    """Where a master serves Prometheus metrics; port 0: nowhere."""

    host: str = "127.0.0.1"
    port: int = 0


class BrainSide(msgspec.Struct, frozen=True, kw_only=True):
    """How a master finds the Brain, and what it tells it of its job."""

    address: str = ""
    """``host:port``; empty: there is none."""
    token_file: str = ""
    """File with the Brain's token; empty: the environment has it."""
    cluster: bool = False
    """The Brain chooses the job's size beside that of all others; else the job does so itself."""
    program: str = ""
    """What the job runs, by which similar past jobs are found."""
    node: Group = Group(count=1)
    """What each node takes of the cluster, where that is known."""


class MasterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a master process is started with; read it with `decode`."""

    format: int = FORMAT
    """Of the job directory."""
    job: JobSpec
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = 0
    """0: any free port at the first start, the same one afterwards."""
    platform: str = ""
    """Launches the job's ``managed_nodes``; empty if there are none."""
    node_size: NodeSize = NodeSize()
    """What each node gets of the machine, if its platform is ``local``."""
    tls: TlsFiles = TlsFiles()
    journal: str = "file:"
    """Where the job's state is kept; see the setting of this name."""
    metrics: MetricsAddress = MetricsAddress()
    brain: BrainSide = BrainSide()


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent process is started with; read it with `decode`."""

    format: int = FORMAT
    """Of the job directory."""
    launch: LaunchSpec
    limits: Limits = Limits()
    master_address: str = ""
    """``host:port``; empty: the one in the job directory."""
    address: str = "127.0.0.1"
    """Where the other nodes reach this one; empty: at the address from which it reaches the master."""
    store_port: int = 0
    """The port of the world's store if this node has rank 0; 0: any free one."""
    accelerator: str = ""
    """What the program trains on, as ``--accelerator`` names it; empty: whatever the node has."""
    tls: TlsFiles = TlsFiles()


class Header(msgspec.Struct, frozen=True):
    """What the configuration of every version has."""

    format: int = 1
    """The first version wrote none."""
    journal: str = "file:"
    """As in `MasterConfig`."""


def decode(path: Path, data: bytes, kind: type[T]) -> T:
    """The configuration that the file ``path`` holds as ``data``.

    Raises:
        FormatError: another version of DLRover wrote it.
        msgspec.DecodeError: it is damaged.
    """
    check_format(path, msgspec.json.decode(data, type=Header).format)
    return msgspec.json.decode(data, type=kind)


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
