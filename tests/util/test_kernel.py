"""System calls that an interpreter has not."""

import asyncio
import errno
import os
import select
import subprocess

import pytest

from dlrover._util import kernel, procs


@pytest.fixture(params=["os", "C library"])
def interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "os":
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.delattr(os, "pidfd_open")


@pytest.mark.usefixtures("interpreter")
def test_a_file_in_memory_keeps_its_size() -> None:
    fd = kernel.memfd_create("test", kernel.MFD_CLOEXEC | kernel.MFD_ALLOW_SEALING)
    assert not os.get_inheritable(fd)
    os.ftruncate(fd, 10)
    kernel.fix_size(fd)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 20)
    os.close(fd)


@pytest.mark.usefixtures("interpreter")
def test_the_end_of_a_process_is_seen() -> None:
    process = subprocess.Popen(["sleep", "60"])
    pidfd = kernel.pidfd_open(process.pid)
    assert not os.get_inheritable(pidfd)
    process.kill()
    assert select.select([pidfd], [], [], 10)[0]
    os.close(pidfd)
    process.wait()
    with pytest.raises(ProcessLookupError):
        kernel.pidfd_open(process.pid)


def test_without_the_system_call_the_end_of_a_process_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refused)
    monkeypatch.setattr(procs, "LOOK_INTERVAL", 0.001)
    first, second = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    first.kill()
    asyncio.run(procs.ended(first.pid))
    first.wait()
    procs.end_in_order([second.pid], 10.0)
    assert not procs.start_time(second.pid)
    second.returncode = 0
