"""``--node-memory`` and ``--node-cpu``: what they take, and what they refuse."""

import os

import pytest

from dlrover._util import cgroup
from dlrover.cli.run import nodes
from dlrover.cli.run.arguments import parse
from dlrover.errors import ConfigurationError
from dlrover.platform import groups
from dlrover.spec.node import NodeLimits

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cgroup, "cores", lambda: 4.0)
    monkeypatch.setattr(nodes, "machine_memory", lambda: 8 * GIB)
    monkeypatch.setattr(groups, "check", lambda: None)


def size(*argv: str, **environ: str) -> NodeLimits:
    def probe(_: str) -> int:
        raise AssertionError

    return parse([*argv, "train.py"], {"PATH": os.defpath, **environ}, probe).node_size


def test_sizes_are_written_as_kubernetes_writes_them():
    given = size("--local-nodes", "2", "--node-memory", "512Mi", "--node-cpu", "500m")
    assert given == NodeLimits(memory=512 << 20, cpu=0.5)
    assert size("--local-nodes", "2", "--node-memory=1.5Gi") == NodeLimits(memory=3 * GIB // 2)
    assert not size("--local-nodes", "2")


def test_a_job_of_one_node_may_have_a_size():
    assert size("--node-cpu", "2") == NodeLimits(cpu=2.0)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ("--node-memory", "lots"),
            "--node-memory lots: must be a number of bytes, as 512Mi or 2Gi are.",
        ),
        (
            ("--node-cpu", "half"),
            "--node-cpu half: must be a number of cores, as 0.5, 500m or 2 are.",
        ),
        *(
            (
                ("--node-memory", text),
                f"--node-memory {text}: must be a number of bytes, as 512Mi or 2Gi are.",
            )
            for text in ("512mi", "512MB", "1.2.3Gi", "1mi", ".", "1e999", "1 Gi")
        ),
        (("--node-memory", "1Mi"), "--node-memory 1Mi: must be 128Mi or more."),
        (("--node-memory", "0"), "--node-memory 0: must be 128Mi or more."),
        (("--node-cpu", "0"), "--node-cpu 0: must be 0.05 or more."),
    ],
)
def test_what_is_no_size(argv, sentence):
    with pytest.raises(ConfigurationError) as error:
        size("--local-nodes", "2", *argv)
    assert str(error.value) == sentence


@pytest.mark.parametrize("environ", [{}, {"DLROVER_MASTER_ADDR": "host:1"}])
def test_only_nodes_that_are_started_here_have_a_size(environ):
    where = ("--local-nodes", "2") if environ else ("--nnodes", "2", "--rdzv-endpoint", "host:1")
    with pytest.raises(ConfigurationError, match="limits nodes that are started on this machine"):
        size("--node-memory", "1Gi", *where, **environ)


def test_nodes_can_grow_until_they_have_all_of_the_machine_together():
    assert nodes.most_memory_factor(NodeLimits(memory=GIB), 2) == 4.0
    assert nodes.most_memory_factor(NodeLimits(memory=4 * GIB, cpu=4.0), 2) == 1.0
    assert nodes.most_memory_factor(NodeLimits(cpu=1.0), 2) == 0.0
    assert nodes.most_memory_factor(NodeLimits(), 0) == 0.0


def test_what_the_machine_does_not_have():
    with pytest.raises(ConfigurationError, match=r"3 nodes need 9Gi, and this machine has 8Gi\.$"):
        nodes.most_memory_factor(NodeLimits(memory=3 * GIB), 3)
    with pytest.raises(ConfigurationError, match=r"--node-cpu 4.5: this machine has 4 cores\.$"):
        nodes.most_memory_factor(NodeLimits(cpu=4.5), 1)


def test_what_the_machine_does_not_allow(monkeypatch):
    def refuse() -> None:
        raise ConfigurationError("This machine has none.")

    monkeypatch.setattr(groups, "check", refuse)
    with pytest.raises(ConfigurationError) as error:
        nodes.most_memory_factor(NodeLimits(memory=GIB), 1)
    assert str(error.value) == "--node-memory cannot be used here. This machine has none."
