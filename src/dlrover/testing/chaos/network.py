"""Separate networks for local nodes, so that a node's cable can be pulled.

The whole run lives in a network namespace with a bridge; each node has another one, joined to the bridge by
a pair of virtual interfaces. No namespace has a name: the kernel removes each with its last process.
``python -m dlrover.testing.chaos.network COMMAND`` runs a node's command in a namespace of its own.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from dlrover import config
from dlrover._util import start
from dlrover.errors import InfrastructureError

CLONE_NEWNET = 0x40000000
BRIDGE = "nodes"
INTERFACE = "eth0"
"""Name of the interface in each node."""
MASTER = "198.18.0.1"
"""Address of the bridge, in a range reserved for network tests (RFC 2544)."""
FIRST_NODE = 2
"""Number added to a node's id to get the number of its address."""


def why_not() -> str:
    """Return why no networks can be made here, in a few words; empty if they can."""
    for program in ("ip", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"there is no program {program}"
    command = ["unshare", "--net", "ip", "link", "add", "name", BRIDGE, "type", "bridge"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    said = tried.stderr.strip() or f"exit code {tried.returncode}"
    return said.splitlines()[-1] if tried.returncode else ""


def enter() -> None:
    """Move this process, which must have one thread, into a new network with a bridge for nodes.

    Raises:
        InfrastructureError: the network cannot be made, although `why_not` found no reason.
    """
    _leave_network()
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "name", BRIDGE, "type", "bridge")
    _ip("address", "add", f"{MASTER}/16", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")


def environ() -> dict[str, str]:
    """Return the variables of a launcher whose local nodes have separate networks."""
    own = shlex.join(start.command(__name__))
    families = ("GLOO", "TP", "NCCL", "HCCL")
    interfaces = {f"{family}_SOCKET_IFNAME": INTERFACE for family in families}
    return {"DLROVER_NODE_COMMAND": own, **interfaces}


def cut(node_id: int) -> None:
    """Pull a node's cable: packets get lost, and no connection is closed."""
    _ip("link", "set", _outer(node_id), "down")


def join(node_id: int) -> None:
    """Plug a node's cable in again, if the node still has a network."""
    _ip("link", "set", _outer(node_id), "up", missing_ok=True)


def _outer(node_id: int) -> str:
    """Return the name of a node's interface at the bridge."""
    return f"node{node_id}"


def _address(node_id: int) -> str:
    number = node_id + FIRST_NODE
    return f"198.18.{number >> 8}.{number & 255}"


def _leave_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        reason = os.strerror(ctypes.get_errno())
        raise InfrastructureError(f"A network namespace cannot be made: {reason}.")


def _ip(*words: str, outside: int = 0, missing_ok: bool = False) -> None:
    """Run ``ip``, in the network of the process ``outside`` if given."""
    around = ["nsenter", f"--net=/proc/{outside}/ns/net"] if outside else []
    done = subprocess.run([*around, "ip", *words], capture_output=True, text=True, check=False)
    if done.returncode and not missing_ok:
        raise InfrastructureError(f"ip {' '.join(words)}: {done.stderr.strip()}.")


def main(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Become a node's agent, with the command line ``command``, in a network of its own."""
    node_id = int(command[command.index("--node-id") + 1])
    outside = os.getppid()
    _leave_network()
    _ip("link", "set", "lo", "up")
    pair = ("type", "veth", "peer", "name", _outer(node_id), "netns", str(outside))
    _ip("link", "add", INTERFACE, *pair)
    _ip("address", "add", f"{_address(node_id)}/16", "dev", INTERFACE)
    _ip("link", "set", INTERFACE, "up")
    _ip("link", "set", _outer(node_id), "master", BRIDGE, "up", outside=outside)
    os.execve(command[0], list(command), dict(env))  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:], config.environ())
