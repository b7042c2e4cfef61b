"""Nodes with a network each: what is sent over a cut one gets lost, and no connection is closed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dlrover.testing.chaos import network

pytestmark = pytest.mark.slow

NODE = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while data := connection.recv(100):
    connection.sendall(data)
"""
WORLD = f"""
import socket, subprocess, sys
from dlrover.testing.chaos import network

network.enter()
with socket.create_server((network.MASTER, 0)) as server:
    place = [network.MASTER, str(server.getsockname()[1])]
    program = [sys.executable, "-c", {NODE!r}, *place, "--node-id", "300"]
    node = subprocess.Popen([sys.executable, "-m", network.__name__, *program])
    connection, address = server.accept()
print(address[0])


def echo(text):
    connection.sendall(text)
    connection.settimeout(0.5)
    try:
        return connection.recv(100)
    except TimeoutError:
        return "nothing"


print(echo(b"one"))
network.cut(300)
print(echo(b"two"), node.poll())
network.join(300)
connection.settimeout(10)
print(connection.recv(100))  # TCP sends it again
connection.close()
print(node.wait(10))
"""


def test_a_cut_node_answers_nothing_and_goes_on_where_it_was() -> None:
    problem = network.why_not()
    if problem:
        pytest.skip(f"no network can be made for each node: {problem}")
    ended = subprocess.run(
        [sys.executable, "-c", WORLD], capture_output=True, text=True, timeout=25, check=False
    )
    expected = ["198.18.1.46", "b'one'", "nothing None", "b'two'", "0"]
    assert ended.stdout.splitlines() == expected, ended.stderr


def test_where_networks_are_not_allowed_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert network.why_not() == "there is no program ip"
