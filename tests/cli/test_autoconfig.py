"""``--auto-config``: what is chosen from what is there, and what is left alone."""

import os
import sys

import pytest

from dlrover._util import cgroup
from dlrover.cli.run import nodes
from dlrover.cli.run.arguments import parse
from dlrover.cli.run.nproc import ACCELERATORS, probe_devices
from dlrover.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cgroup, "processors", lambda: 3)


def options(*argv: str, accelerators: int = 0, **environ: str):
    def probe(word: str) -> int:
        assert word == ACCELERATORS
        return accelerators

    return parse(["--auto-config", *argv, "train.py"], {"PATH": os.defpath, **environ}, probe)


def test_a_machine_alone() -> None:
    found = options()
    assert (found.job.min_nodes, found.job.max_nodes, found.launch.nproc_per_node) == (1, 1, 3)
    assert found.notices == (
        "--auto-config chose --nnodes 1 (no cluster says otherwise), "
        "--nproc-per-node 3 (processors, no accelerator).",
    )


@pytest.mark.parametrize("name", nodes._COUNTS)
def test_a_cluster_says_how_many_nodes_there_are(name: str) -> None:
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1234")
    found = options(*meeting, accelerators=8, **{name: "4"})
    assert (found.job.min_nodes, found.job.max_nodes, found.launch.nproc_per_node) == (4, 4, 8)
    assert found.job.node_check
    assert found.notices == (
        f"--auto-config chose --nnodes 4 ({name}), --nproc-per-node 8 (accelerators), "
        "--network-check (4 nodes).",
    )


def test_what_is_given_wins() -> None:
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1234", "--precheck", "0")
    found = options("--nnodes", "2:5", *meeting, PET_NPROC_PER_NODE="2", NODE_NUM="9")
    assert (found.job.min_nodes, found.job.max_nodes, found.launch.nproc_per_node) == (2, 5, 2)
    assert found.notices == ("--auto-config chose nothing: all was given.",)
    assert not options("--nnodes", "4", *meeting).job.node_check
    found = options("--local-nodes", "5", NODE_NUM="9")
    assert (found.job.min_nodes, found.job.max_nodes, found.job.node_check) == (5, 5, False)


def test_what_is_no_number_of_nodes_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="NODE_NUM=many is not a number of nodes"):
        options(NODE_NUM="many")


@pytest.mark.slow
@pytest.mark.torch
def test_torch_counts_the_accelerators() -> None:
    torch = pytest.importorskip("torch")
    there = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    assert probe_devices(ACCELERATORS, sys.executable) == there


def test_without_torch_there_is_none(tmp_path) -> None:
    answer = tmp_path / "python"
    answer.write_text("#!/bin/sh\necho missing\n")
    answer.chmod(0o755)
    assert probe_devices(ACCELERATORS, str(answer)) == 0
