"""A name of the master's host that moves to another address."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.recipes import machines
from tests.recipes.playing import dlrover_run
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

ASK = """
import asyncio
from dlrover.errors import InfrastructureError
from dlrover.rpc.client import MasterClient

async def main():
    async with MasterClient("master:29400", "secret", timeout=1.0) as client:
        while True:
            try:
                print("asked", flush=True)
                return await client.status()
            except InfrastructureError:
                await asyncio.sleep(0.1)

asyncio.run(main())
"""
SOON = 20.0
"""Less than the half minute after which gRPC by itself would look the name up again."""


def test_a_client_finds_a_master_whose_name_has_moved(
    cluster: machines.Cluster, tmp_path: Path
) -> None:
    env = dlrover_run(tmp_path / "bin") | {"DLROVER_TOKEN": "secret"}
    server, client = cluster.machine("one"), cluster.machine("two")
    command = [sys.executable, "-m", "dlrover.cli.main", "master", "--job-dir", tmp_path / "job"]
    server.start(command, env, tmp_path)
    cluster.publish("master", client.address)  # where nobody listens
    asking = client.start([sys.executable, "-c", ASK], env, tmp_path)
    until(lambda: asking.output.count("asked") > 5, 30, "some attempts")
    cluster.publish("master", server.address)
    until(lambda: asking.exit_code is not None, SOON, "an answer")
    assert asking.exit_code == 0, asking.output
