"""Facts about a node: the lines of a kernel's log that may tell of a fault, and full disks."""

import os

import pytest

from dlrover.agent.workers import facts
from dlrover.agent.workers.facts import NodeFacts, may_be_fault
from dlrover.spec.failure import FACTS_LIMIT

XID = "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus."


@pytest.fixture
def kernel_log():
    """What the kernel logs, as a pipe, which gives one record at a time as ``/dev/kmsg`` does."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_DIRECT)  # a message at a time
    node = NodeFacts(f"/proc/self/fd/{reader}")

    def log(*messages):
        for message in messages:
            os.write(writer, f"6,1,2,-;{message}\n SUBSYSTEM=pci\n".encode())

    node.log = log
    yield node
    node.close()
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    "line",
    [
        XID,
        "Out of memory: Killed process 7 (python) total-vm:1kB",
        "oom-kill:constraint=CONSTRAINT_MEMCG,task=python",
        "nfs: server store not responding, still trying",
        "blk_update_request: I/O error, dev sda, sector 1",
        "EXT4-fs (sda1): Remounting filesystem read-only",
        "mlx5_core 0000:b1:00.0: Port module event: error",
        "python[7]: segfault at 0 ip 00 sp 00 error 4",
        "mce: [Hardware Error]: Machine check events logged",
    ],
)
def test_lines_that_tell_of_a_fault(line):
    assert may_be_fault(line)


@pytest.mark.parametrize("line", ["usb 1-1: new high-speed USB device", "audit: type=1400", ""])
def test_lines_that_do_not(line):
    assert not may_be_fault(line)


def test_what_the_kernel_says_while_the_workers_run(kernel_log, tmp_path):
    kernel_log.begin()
    kernel_log.log(XID)
    assert kernel_log.gather(tmp_path) == (XID,)
    kernel_log.begin()
    assert kernel_log.gather(tmp_path) == ()


def test_only_telling_lines_are_facts(kernel_log, tmp_path):
    kernel_log.begin()
    kernel_log.log("usb 1-1: new device")
    assert kernel_log.gather(tmp_path) == ()


def test_each_worker_of_a_round_gets_all_the_facts(kernel_log, tmp_path):
    kernel_log.begin()
    kernel_log.log(XID)
    assert kernel_log.gather(tmp_path) == kernel_log.gather(tmp_path) == (XID,)


def test_of_a_flood_the_latest_are_kept(kernel_log, tmp_path):
    kernel_log.begin()
    for number in range(3 * FACTS_LIMIT):
        kernel_log.log(f"NVRM: Xid (PCI:0): {number}")
        kernel_log.gather(tmp_path)
    kept = kernel_log.gather(tmp_path)
    assert len(kept) == FACTS_LIMIT
    assert kept[-1] == f"NVRM: Xid (PCI:0): {3 * FACTS_LIMIT - 1}"


def test_a_log_that_may_not_be_read_tells_nothing(tmp_path):
    node = NodeFacts(tmp_path / "none")
    node.begin()
    assert node.gather(tmp_path) == ()
    node.close()


def test_the_kernels_own_log_does_no_harm(tmp_path):
    node = NodeFacts()
    node.begin()
    assert len(node.gather(tmp_path)) <= FACTS_LIMIT
    node.close()


def test_a_full_file_system_is_a_fact(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)

    def with_free(blocks):
        values = list(real)
        values[4] = blocks  # f_bavail
        return lambda _: os.statvfs_result(values)

    node = NodeFacts(tmp_path / "none")
    monkeypatch.setattr(facts.os, "statvfs", with_free(0))
    [fact] = node.gather(tmp_path)
    assert fact.startswith("disk: 0.0 GiB free of ")
    assert fact.endswith(f"GiB in {tmp_path}")
    monkeypatch.setattr(facts.os, "statvfs", with_free(real.f_blocks))
    assert node.gather(tmp_path) == ()


def test_a_directory_that_is_gone_is_no_fact(tmp_path):
    assert NodeFacts(tmp_path / "none").gather(tmp_path / "gone") == ()


KILLED = "Memory cgroup out of memory: Killed process {} (python) total-vm:1kB"
CHOSEN = "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/a,task=python,pid={},uid=0"


@pytest.mark.parametrize("line", [KILLED, CHOSEN])
def test_the_out_of_memory_kill_of_another_process_is_no_fact_about_a_worker(
    kernel_log, tmp_path, monkeypatch, line
):
    kernel_log.begin()
    kernel_log.log("python invoked oom-killer: gfp_mask=0xcc0", line.format(71), XID)
    everything = kernel_log.gather(tmp_path)
    assert len(everything) == 3
    monkeypatch.setattr(facts, "FIRST_PID_NAMESPACE", facts.PID_NAMESPACE.stat().st_ino)
    assert kernel_log.gather(tmp_path, 7) == (XID,)
    assert kernel_log.gather(tmp_path, 71) == (line.format(71), XID)
    monkeypatch.setattr(facts, "FIRST_PID_NAMESPACE", 1)
    assert kernel_log.gather(tmp_path, 7) == everything, "a container has numbers of its own"
