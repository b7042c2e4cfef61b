"""A job without PyTorch that resumes: ``count.py OUT STEPS``. All workers meet in each step.

Rank 0 listens where torchrun's variables say; the others connect from their machines. ``OUT/losses.jsonl``
has a line for each step. A worker whose peer is gone waits: who started it has to end it.
"""

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path

STEP_TIME = 0.05
ALONE = 1.0
"""Time of a step without others: they get time to come."""


def peers(rank: int, world_size: int) -> list[socket.socket]:
    """Connections to all others for rank 0, to rank 0 for the others."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        with socket.create_server(("", port), backlog=world_size) as server:
            return [server.accept()[0] for _ in range(world_size - 1)]
    while (connection := attempt(host, port)) is None:
        time.sleep(STEP_TIME)
    return [connection]


def attempt(host: str, port: int) -> socket.socket | None:
    with contextlib.suppress(OSError):
        return socket.create_connection((host, port))
    return None


def meet(connections: list[socket.socket], rank: int) -> None:
    """Return when all ranks have called it."""
    if rank:
        connections[0].sendall(b".")
    for connection in connections:
        if not connection.recv(1):
            time.sleep(1000)
    if rank == 0:
        for connection in connections:
            connection.sendall(b".")


def main(out: Path, steps: int) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    connections = peers(rank, world_size)
    log = out / "losses.jsonl"
    done = len(log.read_text().splitlines()) if log.exists() else 0
    meet(connections, rank)  # before rank 0 writes to what the others read
    for step in range(done + 1, steps + 1):
        meet(connections, rank)
        if rank == 0:
            with log.open("a") as file:
                file.write(json.dumps({"step": step, "world_size": world_size}) + "\n")
        time.sleep(STEP_TIME if world_size > 1 else ALONE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
