"""Workers and parameter servers over plain sockets: ``served.py OUT``.

A server adds up what it is sent, for ever. A worker sends 1 to each server of its world again and again, until
``OUT/go`` exists. ``OUT/starts`` has a line for each process that started: role, rank in it, size of it, rank,
world size, processes of its node. ``OUT/steps`` has one for each step of worker 0: the number of its servers.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path


def main(out: Path) -> None:
    env = os.environ
    names = ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    note(out / "starts", " ".join(env[name] for name in names))
    # Rank 0 holds this port: no two rounds that follow each other have the same.
    at = out / f"servers of {env['MASTER_PORT']}"
    at.mkdir(exist_ok=True)
    if env["ROLE_NAME"] == "ps":
        serve(at / env["ROLE_RANK"])
    count = int(env["WORLD_SIZE"]) - int(env["ROLE_WORLD_SIZE"])
    work(out, [connect(at / str(number)) for number in range(count)])


def serve(name: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    unfinished = name.with_suffix(".new")
    unfinished.write_text(str(listener.getsockname()[1]))
    unfinished.rename(name)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def answer(connection: socket.socket) -> None:
    total = 0
    with contextlib.suppress(OSError):
        while data := connection.recv(1):
            total += data[0]
            connection.sendall(total.to_bytes(8, "big"))


def connect(name: Path) -> socket.socket:
    while True:
        with contextlib.suppress(OSError, ValueError):
            return socket.create_connection(("127.0.0.1", int(name.read_text())))
        time.sleep(0.02)


def work(out: Path, servers: list[socket.socket]) -> None:
    while not (out / "go").exists():
        for server in servers:
            server.sendall(b"\x01")
            if not server.recv(8):
                raise ConnectionResetError("Connection reset by peer")
        if os.environ["RANK"] == "0":
            note(out / "steps", str(len(servers)))
        time.sleep(0.05)


def note(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
