"""Local nodes are real processes: launched, watched, adopted and killed."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable

import pytest

from dlrover._util import procs
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.platform.base import platform_class
from dlrover.platform.local import LocalPlatform
from dlrover.spec.node import FoundNode, LaunchNode

pytestmark = pytest.mark.slow

SLEEPER = [sys.executable, "-c", "import sys, time; time.sleep(60)"]
LEAVER = [sys.executable, "-c", "import sys; sys.exit(int(sys.argv[2]))"]


def run(body: Callable[[LocalPlatform, "asyncio.Queue[tuple[int, str]]"], object], command=SLEEPER):
    async def main() -> None:
        exits: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        platform = LocalPlatform(command, {}, (), lambda *exited: exits.put_nowait(exited))
        await asyncio.wait_for(body(platform, exits), 10)

    asyncio.run(main())


def test_an_exit_is_reported_with_its_reason():
    async def body(platform: LocalPlatform, exits) -> None:
        platform.launch(LaunchNode(7, 0))
        assert await exits.get() == (7, "its agent ended: it left with exit code 7")

    run(body, LEAVER)  # the node's id is its second argument


def test_an_agent_that_aborts_may_lack_threads():
    async def body(platform: LocalPlatform, exits) -> None:
        platform.launch(LaunchNode(0, 0))
        assert await exits.get() == (
            0,
            "its agent ended: it was killed by SIGABRT, as where no thread can be started (see processes in dlrover "
            "doctor)",
        )

    run(body, [sys.executable, "-c", "import os; os.abort()"])


def test_a_killed_node_is_reported_once():
    async def body(platform: LocalPlatform, exits) -> None:
        handle = platform.launch(LaunchNode(0, 0))
        platform.kill(handle)
        assert await exits.get() == (0, "its agent ended: it was killed by SIGKILL")
        platform.kill(handle)
        assert exits.empty()

    run(body)


def test_another_master_process_adopts_a_node():
    async def body(platform: LocalPlatform, exits) -> None:
        handle = platform.launch(LaunchNode(0, 0))
        adopted: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        other = LocalPlatform(SLEEPER, {}, (), lambda *exited: adopted.put_nowait(exited))
        other.adopt(0, handle)
        await asyncio.sleep(0)
        assert adopted.empty()
        other.kill(handle)
        node, _reason = await adopted.get()
        assert node == 0
        await exits.get()

    run(body)


def test_adopting_a_node_that_is_gone_reports_its_exit():
    async def body(platform: LocalPlatform, exits) -> None:
        platform.adopt(3, "999999:12345")
        node, reason = await exits.get()
        assert (node, "while the master was away" in reason) == (3, True)

    run(body)


def test_a_reused_pid_is_not_killed():
    async def body(platform: LocalPlatform, _exits) -> None:
        platform.kill(f"{os.getpid()}:1")  # this process started later than that

    run(body)
    assert procs.start_time(os.getpid()) > 0


def test_a_command_that_cannot_run():
    async def body(platform: LocalPlatform, _exits) -> None:
        with pytest.raises(InfrastructureError, match="Node 0 cannot be started"):
            platform.launch(LaunchNode(0, 0))

    before = threading.active_count()
    run(body, ["/no/such/program"])
    assert threading.active_count() <= before  # those that other tests have left may end


def test_registry():
    assert platform_class("local") is LocalPlatform
    with pytest.raises(ConfigurationError, match="Platform cloud is unknown"):
        platform_class("cloud")


def test_nodes_that_another_master_launched_are_found():
    async def body(platform: LocalPlatform, exits) -> None:
        assert platform.find() == []
        handles = {node_id: platform.launch(LaunchNode(node_id, 9 - node_id)) for node_id in (3, 1)}
        other = LocalPlatform(own, {}, (), lambda *_: None)
        while len(found := other.find()) < 2:  # between fork and exec a child is its parent's twin
            await asyncio.sleep(0.01)
        assert found == [FoundNode(1, 8, handles[1]), FoundNode(3, 6, handles[3])]
        assert LocalPlatform(SLEEPER, {}, (), lambda *_: None).find() == []
        for handle in handles.values():
            platform.kill(handle)
        for _ in handles:
            await exits.get()
        assert platform.find() == []

    own = [*SLEEPER, f"job of {os.getpid()}"]
    run(body, own)
