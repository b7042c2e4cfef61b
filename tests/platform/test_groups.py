"""Control groups of nodes: where they are made, with which limits, and what is taken away again."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from dlrover._util import procs
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.platform import groups
from dlrover.platform.groups import NodeGroups
from dlrover.platform.local import LocalPlatform
from dlrover.spec.node import LaunchNode, NodeLimits

MIB = 1 << 20
SIZE = NodeLimits(memory=512 * MIB, cpu=0.5)


class Kernel:
    """The files of a machine's control groups, which the kernel would make."""

    def __init__(self, directory: Path) -> None:
        self.proc, self.root = directory / "cgroup", directory / "fs"
        self.root.mkdir()

    def version1(self, group: str, *, shared: bool = False) -> None:
        """A process in ``group`` of each controller; ``shared``: two have one hierarchy."""
        processors = ["cpu,cpuacct"] if shared else ["cpu", "cpuacct"]
        self.proc.write_text("".join(f"1:{name}:/{group}\n" for name in ("memory", *processors)))
        self._file(f"memory/{group}/memory.stat")
        for name in processors:
            self._file(f"{name}/{group}/cpu.cfs_period_us" if "cpu" in name.split(",") else name)
        if shared:
            for name in ("cpu", "cpuacct"):
                (self.root / name).symlink_to("cpu,cpuacct")
        else:
            (self.root / "cpuacct").unlink()
            (self.root / "cpuacct" / group).mkdir(parents=True)

    def version2(self, group: str, controllers: str) -> None:
        """A process in ``group``, whose children have these controllers."""
        self.proc.write_text(f"0::/{group}\n")
        self._file(f"{group}/cgroup.subtree_control").write_text(controllers)
        self._file(f"{group}/memory.stat")

    def _file(self, path: str) -> Path:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        return file

    def groups(self) -> NodeGroups:
        return NodeGroups(self.proc, self.root)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def content(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize("shared", [False, True])
def test_version_1_has_a_group_for_each_controller(kernel, shared):
    kernel.version1("box", shared=shared)
    made = [file.parent for file in kernel.groups().make(3, SIZE)]
    assert len(made) == (2 if shared else 3)
    assert {group.name for group in made} == {f"{kernel.groups()._maker}-3"}
    memory = next(group for group in made if group.parent.parent.name == "memory")
    cpu = next(group for group in made if (group / "cpu.cfs_quota_us").exists())
    assert content(memory / "memory.limit_in_bytes") == str(512 * MIB)
    assert content(memory / "memory.memsw.limit_in_bytes") == str(512 * MIB)
    assert content(cpu / "cpu.cfs_quota_us") == "50000"
    assert content(cpu / "cpu.cfs_period_us") == "100000"
    assert not content(memory / "cpu.cfs_quota_us")


def test_version_2_has_one_group(kernel):
    kernel.version2("box", "cpu memory pids")
    (file,) = kernel.groups().make(3, SIZE)
    group = file.parent
    assert group.parent == kernel.root / "box"
    assert content(group / "memory.max") == str(512 * MIB)
    assert content(group / "memory.swap.max") == "0"
    assert content(group / "cpu.max") == "50000 100000"


def test_a_limit_that_is_not_asked_for_is_not_set(kernel):
    kernel.version2("box", "cpu memory")
    groups_ = kernel.groups()
    (file,) = groups_.make(3, NodeLimits(cpu=2))
    assert not (file.parent / "memory.max").exists()
    (file,) = groups_.make(4, NodeLimits(memory=MIB))
    assert not (file.parent / "cpu.max").exists()


def test_version_2_divides_its_own_group_if_that_is_allowed(kernel):
    kernel.version2("box", "")
    (file,) = kernel.groups().make(3, SIZE)
    assert file.parent.parent == kernel.root / "box"
    assert content(kernel.root / "box" / "cgroup.subtree_control") == "+memory +cpu"


def occupied(kernel: Kernel, beside: str) -> None:
    """A process in a group that cannot be divided, beside which groups have some controllers."""
    kernel.version2("slice", beside)
    kernel.version2("slice/box", "")
    (kernel.root / "slice/box/cgroup.subtree_control").unlink()
    (kernel.root / "slice/box/cgroup.subtree_control").mkdir()  # what is written to it is refused


def test_version_2_makes_groups_beside_one_that_cannot_be_divided(kernel):
    occupied(kernel, "memory cpu")
    (file,) = kernel.groups().make(3, SIZE)
    assert file.parent.parent == kernel.root / "slice"


def test_version_2_goes_up_until_it_may_divide(kernel):
    kernel.version2("", "cpuset cpu io memory pids")
    occupied(kernel, "memory pids")
    (file,) = kernel.groups().make(3, SIZE)
    assert file.parent.parent == kernel.root


def test_what_a_machine_does_not_allow_is_said(kernel):
    occupied(kernel, "pids")
    with pytest.raises(ConfigurationError, match=r"slice/box cannot be divided, and none above it"):
        kernel.groups()
    kernel.proc.write_text("")
    with pytest.raises(ConfigurationError, match="has no control groups for memory and cpu"):
        kernel.groups()


def test_a_group_that_cannot_be_made_is_an_error_and_leaves_nothing(kernel):
    kernel.version1("box")
    groups_ = kernel.groups()
    files = groups_.make(3, NodeLimits())
    with pytest.raises(InfrastructureError, match="Node 3 cannot have a control group of its own"):
        groups_.make(3, NodeLimits())
    assert not any(file.parent.exists() for file in files)


def test_a_group_is_removed_once_it_is_empty(kernel):
    kernel.version1("box")
    groups_ = kernel.groups()
    file, *_ = groups_.make(3, NodeLimits())
    file.touch()  # what the kernel says of a group in which processes run
    assert not groups_.remove(3)
    file.unlink()
    assert groups_.remove(3)
    assert groups_.remove(3), "it is gone"


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_killed_process_has_left_behind_is_swept(kernel, version):
    if version == 1:
        kernel.version1("box")
        other = kernel.root / "memory" / "elsewhere"
    else:
        kernel.version2("box", "cpu memory")
        other = kernel.root / "elsewhere"
    kernel.groups().make(3, NodeLimits())
    alive = f"dlrover-{os.getpid()}-{procs.start_time(os.getpid())}-7"
    for name in (
        "dlrover-4194304-12-0",
        f"dlrover-{os.getpid()}-1-0",
        alive,
        "dlrover-notes",
        "box",
    ):
        (other / name).mkdir(parents=True)
    kernel.groups().sweep()
    assert sorted(path.name for path in other.iterdir()) == ["box", alive, "dlrover-notes"]
    assert list(kernel.root.rglob(f"{kernel.groups()._maker}-3")), "its maker lives"


@pytest.mark.parametrize(("version", "name"), [(1, "memory.oom_control"), (2, "memory.events")])
def test_kills_for_want_of_memory_are_counted_for_each_node(kernel, version, name):
    if version == 1:
        kernel.version1("box")
    else:
        kernel.version2("box", "cpu memory")
    groups_ = kernel.groups()
    file, *_ = [f for f in groups_.make(3, NodeLimits()) if version == 2 or "memory" in f.parts]
    assert groups_.oom_kills(3) == 0
    (file.parent / name).write_text("oom 3\noom_kill 2\n")
    assert groups_.oom_kills(3) == 2


# ---- with the kernel


@pytest.fixture
def allowed() -> None:
    try:
        groups.check()
    except ConfigurationError as error:
        pytest.skip(str(error))


def group_of(pid: int) -> Path:
    """The memory group that a process runs in."""
    text = Path(f"/proc/{pid}/cgroup").read_text()
    found = re.search(r":memory:(.*)", text) or re.search(r"^0::(.*)", text, re.MULTILINE)
    top = "/sys/fs/cgroup/memory" if ":memory:" in found[0] else "/sys/fs/cgroup"
    return Path(top + found[1])


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
def test_a_node_runs_in_its_group_which_goes_with_it():
    async def main() -> None:
        exits: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        sleeper = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
        platform = LocalPlatform(sleeper, {}, (), lambda *ended: exits.put_nowait(ended), SIZE)
        handle = platform.launch(LaunchNode(7, 0, memory_factor=2.0))
        pid = int(handle.partition(":")[0])
        while "-7" not in group_of(pid).name:
            await asyncio.sleep(0.01)
        group = group_of(pid)
        limits = [content(group / name).strip() for name in ("memory.max", "memory.limit_in_bytes")]
        assert str(1024 * MIB) in limits
        platform.kill(handle)
        assert (await exits.get())[0] == 7
        await platform.close()
        assert not group.exists()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
def test_a_node_whose_agent_is_killed_for_want_of_memory_says_so():
    async def main() -> None:
        exits: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        hungry = [sys.executable, "-c", "kept = [b'x' * 2**20 * i for i in range(1000)]"]
        size = NodeLimits(memory=64 * MIB)
        platform = LocalPlatform(hungry, {}, (), lambda *ended: exits.put_nowait(ended), size)
        platform.launch(LaunchNode(0, 0))
        _, reason = await exits.get()
        await platform.close()
        assert "killed by SIGKILL for want of memory (OOMKilled)" in reason

    asyncio.run(asyncio.wait_for(main(), 20))
