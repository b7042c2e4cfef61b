"""What a node uses, from the kernel's files and from real processes."""

import subprocess
import sys
import time

import pytest

from dlrover._util import cgroup
from dlrover.agent import usage

MIB = 1 << 20


def container(tmp_path, version: int, limit: str):
    """The kernel's files of a memory cgroup."""
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    if version == 2:
        proc.write_text("0::/box\n")
        group = root / "box"
        names = ("memory.current", "memory.max", "inactive_file")
    else:
        proc.write_text("3:cpu,memory:/box\n")
        group = root / "memory" / "box"
        names = ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file")
    group.mkdir(parents=True)
    (group / names[0]).write_text(f"{300 * MIB}\n")
    (group / names[1]).write_text(f"{limit}\n")
    active = names[2].replace("inactive", "active")
    (group / "memory.stat").write_text(f"anon 5\n{names[2]} {100 * MIB}\n{active} {50 * MIB}\n")
    return proc, root


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_container_is_what_the_kernel_cannot_drop(tmp_path, version):
    proc, root = container(tmp_path, version, str(400 * MIB))
    assert cgroup.memory(proc, root) == (200 * MIB, 400 * MIB)
    assert cgroup.available(proc, root) == 250 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_limited_by_the_groups_around_a_process_too(tmp_path, version):
    proc, root = container(tmp_path, version, str(400 * MIB))
    proc.write_text(f"{proc.read_text().strip()}/task/step\n")
    inside = root / ("box" if version == 2 else "memory/box") / "task"
    inside.mkdir()
    limit = "memory.max" if version == 2 else "memory.limit_in_bytes"
    (inside / limit).write_text("max\n" if version == 2 else "9223372036854771712\n")
    assert cgroup.available(proc, root) == 250 * MIB


@pytest.mark.parametrize(("version", "limit"), [(2, "max"), (1, "9223372036854771712")])
def test_without_a_limit_it_is_no_container(tmp_path, version, limit):
    assert cgroup.memory(*container(tmp_path, version, limit)) is None


def test_without_cgroups_there_is_nothing_to_know(tmp_path):
    assert cgroup.memory(tmp_path / "none", tmp_path) is None
    assert cgroup.available(tmp_path / "none", tmp_path) == cgroup.NO_LIMIT


@pytest.mark.slow
def test_a_busy_worker_is_seen_with_its_children():
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    worker = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
    try:
        meter = usage.UsageMeter(0.2)
        assert meter.look([worker.pid]) is None
        end = time.monotonic() + 20
        found = None
        while (found is None or found.cpu < 0.05) and time.monotonic() < end:
            time.sleep(0.05)
            found = meter.look([worker.pid]) or found
        assert found.cpu > 0.05
        assert 0 < found.memory < found.limit
    finally:
        subprocess.run(["kill", "-9", "--", f"-{worker.pid}"], check=True)
        worker.wait()


def test_workers_that_have_ended_are_none():
    meter = usage.UsageMeter(0.0)
    assert meter.look([2**22 + 1]).cpu == 0.0
