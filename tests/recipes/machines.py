"""Machines of a test: each has its own host name, address and names that it knows; as a pod has.

They are namespaces of the kernel. A machine is a process that holds its network and its name, as the pause
container of a pod; what runs on it are containers, each with its own process ids, mounts and ``/etc/hosts``.
All end with the process that made them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

SUBNET = "10.77.0"
NAMESPACE = "default"
"""The Kubernetes namespace in full names."""
END_WAIT = 10.0
"""Seconds that a killed container has to be gone."""

BRIDGE = f"""
ip link set lo up
ip link add br0 type bridge
ip addr add {SUBNET}.1/24 dev br0
ip link set br0 up
echo ready
exec sleep 1000
"""
PAUSE = """
hostname "$1"
echo ready
exec sleep 1000
"""
CONTAINER = """
set -e
hosts=$1 volume=$2 path=$3
shift 3
mount --bind "$hosts" /etc/hosts
if [ -n "$path" ]; then
  mount -t tmpfs none /mnt
  mkdir -p "$path"
  mount --bind "$volume" "$path"
fi
exec "$@"
"""


def _unprivileged() -> list[str]:
    return [] if os.geteuid() == 0 else ["--user", "--map-root-user"]


def why_not() -> str:
    """Why there can be no machines here; empty if there can."""
    for tool in ("unshare", "nsenter", "setpriv", "ip", "mount"):
        if shutil.which(tool) is None:
            return f"there is no {tool} on this machine"
    flags = [*_unprivileged(), "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc"]
    attempt = ["unshare", *flags, "ip", "link", "add", "br0", "type", "bridge"]
    done = subprocess.run(attempt, capture_output=True, text=True, check=False)
    return f"no namespaces: {done.stderr.strip()}" if done.returncode else ""


class Container:
    """A command that runs on a machine, as process 1 of its own."""

    def __init__(self, process: psutil.Popen, log: Path) -> None:
        self._process = process
        self._log = log
        self._killed = False

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """As Kubernetes counts it: 137 after SIGKILL; None while it runs."""
        code = self._process.poll()
        return 128 + signal.SIGKILL if code is not None and self._killed else code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its process 1; SIGKILL ends all its processes with it."""
        if self._process.poll() is None:
            self._killed = self._killed or number is signal.SIGKILL
            for first in self._process.children():
                first.send_signal(number)

    def close(self) -> None:
        """End it at once."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()
        self._process.wait(END_WAIT)


class Machine:
    """A host name, an address, and what runs there."""

    def __init__(self, cluster: Cluster, name: str, number: int, pause: subprocess.Popen) -> None:
        self.name = name
        self.address = f"{SUBNET}.{number}"
        self.pid = pause.pid
        self.hosts = cluster.directory / f"hosts-{number}"
        self.containers: list[Container] = []
        self._cluster = cluster
        self._pause = pause

    def command(
        self, command: Sequence[str | Path], volume: Path | None = None, path: str = ""
    ) -> list[str]:
        """What starts ``command`` here, with a volume mounted at ``path``, which is below ``/mnt``."""
        enter = [*self._cluster.enter, "nsenter", "--target", str(self.pid), "--net", "--uts", "--"]
        flags = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        mounts = [str(self.hosts), str(volume or ""), path]
        return [
            *enter,
            "unshare",
            *flags,
            "--",
            "sh",
            "-c",
            CONTAINER,
            "sh",
            *mounts,
            *map(str, command),
        ]

    def start(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str],
        cwd: Path,
        volume: Path | None = None,
        path: str = "",
    ) -> Container:
        """Run a command here; its output goes to a file."""
        log = self._cluster.directory / f"{self.name}-{self.address}-{len(self.containers)}.log"
        with log.open("wb") as output:
            process = psutil.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self.command(command, volume, path)],
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.containers.append(Container(process, log))
        return self.containers[-1]

    def close(self) -> None:
        """End everything on the machine, then the machine; its address answers no more."""
        for container in self.containers:
            container.close()
        self._pause.kill()
        self._pause.wait()


class Cluster:
    """Machines on one network, and the names by which they know each other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.machines: list[Machine] = []
        self._names: dict[str, str] = {}
        self._holder = self._hold(["unshare", *_unprivileged(), "--net", "--", "sh", "-ec", BRIDGE])
        own_user = ["--user", "--preserve-credentials"] if _unprivileged() else []
        self.enter = ["nsenter", "--target", str(self._holder.pid), *own_user, "--net", "--"]

    def machine(self, name: str, subdomain: str = "") -> Machine:
        """A new machine with a new address; its own full name is in its ``/etc/hosts``, as in a pod's."""
        number = len(self.machines) + 2
        command = [*self.enter, "unshare", "--net", "--uts", "--", "sh", "-ec", PAUSE, "sh", name]
        machine = Machine(self, name, number, self._hold(command))
        self.machines.append(machine)  # first of all: it ends with the cluster, whatever comes next
        link = f"v{number}"
        inside = ["nsenter", "--target", str(machine.pid), "--net", "--"]
        self._run(f"ip link add {link} type veth peer name eth0 netns {machine.pid}")
        self._run(f"ip link set {link} master br0 up")
        for words in ("addr add {0}/24 dev eth0", "link set eth0 up", "link set lo up"):
            self._run(" ".join(["ip", words.format(machine.address)]), inside)
        full = f"{name}.{subdomain}.{NAMESPACE}.svc.cluster.local {name}" if subdomain else name
        machine.hosts.write_text(f"127.0.0.1 localhost\n{machine.address} {full}\n")
        self._tell([machine])
        return machine

    def publish(self, name: str, address: str) -> None:
        """Let every machine know a name, or its new address; what the cluster's DNS does."""
        self._names[name] = address
        self._tell(self.machines)

    def close(self) -> None:
        """End all machines."""
        for machine in self.machines:
            machine.close()
        self._holder.kill()
        self._holder.wait()

    def _tell(self, machines: Sequence[Machine]) -> None:
        for machine in machines:
            own = machine.hosts.read_text().splitlines()[:2]
            known = [f"{address} {name}" for name, address in self._names.items()]
            machine.hosts.write_text("\n".join([*own, *known]) + "\n")  # in place: it is mounted

    def _run(self, words: str, inside: Sequence[str] = ()) -> None:
        subprocess.run([*self.enter, *inside, *words.split()], check=True, capture_output=True)

    @staticmethod
    def _hold(command: Sequence[str]) -> subprocess.Popen:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            process.kill()
            process.wait()
            raise RuntimeError(f"{command} did not start")
        process.stdout.close()
        return process


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """A cluster that is gone afterwards; the test is skipped where there can be none."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = Cluster(directory)
    try:
        yield made
    finally:
        made.close()
