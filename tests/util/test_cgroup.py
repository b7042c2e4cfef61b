"""Out-of-memory kills are counted for cgroups of both versions."""

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
