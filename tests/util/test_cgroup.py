"""Out-of-memory kills are counted for cgroups of both versions."""

import os
from pathlib import Path

from dlrover._util import cgroup


def test_version_2(tmp_path: Path):
    proc = tmp_path / "cgroup"
    proc.write_text("0::/job/7\n")
    group = tmp_path / "fs" / "job" / "7"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert cgroup.oom_kills(proc, tmp_path / "fs") == 3


def test_version_1(tmp_path: Path):
    proc = tmp_path / "cgroup"
    proc.write_text("9:cpu,cpuacct:/x\n4:memory:/job\n0::/\n")
    group = tmp_path / "fs" / "memory" / "job"
    group.mkdir(parents=True)
    (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert cgroup.oom_kills(proc, tmp_path / "fs") == 2


def test_container_sees_its_group_at_the_root(tmp_path: Path):
    proc = tmp_path / "cgroup"
    proc.write_text("0::/host/path/that/is/not/mounted\n")
    (tmp_path / "fs").mkdir()
    (tmp_path / "fs" / "memory.events").write_text("oom_kill 1\n")
    assert cgroup.oom_kills(proc, tmp_path / "fs") == 1


def test_unknown_is_zero(tmp_path: Path):
    assert cgroup.oom_kills(tmp_path / "absent", tmp_path) == 0


def test_a_quota_of_processors(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    proc = tmp_path / "cgroup"
    proc.write_text("0::/job\n")
    group = tmp_path / "fs" / "job"
    group.mkdir(parents=True)
    counts = []
    for text in ("max 100000\n", "250000 100000\n", "50000 100000\n", "nonsense\n"):
        (group / "cpu.max").write_text(text)
        counts.append(cgroup.processors(proc, tmp_path / "fs"))
    assert counts == [8, 3, 1, 8]
    proc.write_text("4:cpu,cpuacct:/job\n")
    old = tmp_path / "fs" / "cpu" / "job"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("400000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup.processors(proc, tmp_path / "fs") == 4
    assert cgroup.processors(tmp_path / "none", tmp_path / "none") == 8


def test_a_share_of_a_core(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    proc = tmp_path / "cgroup"
    proc.write_text("0::/job\n")
    group = tmp_path / "fs" / "job"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("50000 100000\n")
    assert cgroup.cores(proc, tmp_path / "fs") == 0.5
    assert cgroup.cores(tmp_path / "none", tmp_path / "none") == 8.0


def test_processor_time_of_a_group(tmp_path: Path):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("0::/job\n")
    (root / "job").mkdir(parents=True)
    assert cgroup.cpu_seconds(proc, root) is None
    (root / "job" / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    assert cgroup.cpu_seconds(proc, root) == 2.5
    proc.write_text("2:cpuacct:/job\n0::/\n")
    (root / "cpuacct" / "job").mkdir(parents=True)
    (root / "cpuacct" / "job" / "cpuacct.usage").write_text("1500000000\n")
    assert cgroup.cpu_seconds(proc, root) == 1.5
    assert cgroup.cpu_seconds(tmp_path / "none", root) is None


def test_the_group_of_each_controller_is_the_one_that_is_mounted(tmp_path: Path):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("4:memory:/job\n2:cpu,cpuacct:/not/mounted\n3:pids:/job\n0::/\n")
    for folder in ("memory/job", "cpu", "cpuacct"):
        (root / folder).mkdir(parents=True)
    assert cgroup.own_groups(proc, root) == {
        "memory": root / "memory" / "job",
        "cpu": root / "cpu",
        "cpuacct": root / "cpuacct",
        "": root,
    }
