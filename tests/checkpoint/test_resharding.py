"""What was saved in one layout, by some ranks, is loaded in another, by other ones; all of it equal."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).parent / "scripts" / "sharded.py")


@pytest.fixture
def run(forks):
    """Runs the script on so many ranks."""

    def ranks(verb: str, layout: str, where: str, *nodes: Path, ranks: int) -> str:
        env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_")}
        return forks.ranks(
            ranks, SCRIPT, verb, layout, where, *nodes, env=env | {"OMP_NUM_THREADS": "1"}
        )

    return ranks


@pytest.mark.parametrize(
    ("saved", "where"),
    [
        ("fsdp2", "memory"),
        pytest.param("tp x dp", "storage", marks=pytest.mark.heavy),
        pytest.param("tp x dp", "memory", marks=pytest.mark.heavy),
        pytest.param("hsdp", "storage", marks=pytest.mark.heavy),
    ],
)
def test_four_ranks_saved_and_others_load(run, directory, saved, where):
    run("save", saved, where, directory, ranks=4)
    if where == "storage":
        directory.stop_saver()
    for layout, ranks in (("fsdp2", 2), ("tp", 3), ("plain", 1)):
        assert f"equal on {ranks} ranks" in run("load", layout, where, directory, ranks=ranks)


def test_as_many_ranks_load_in_another_layout(run, directory):
    run("save", "fsdp2", "storage", directory, ranks=2)
    assert "equal on 2" in run("load", "tp", "memory", directory, ranks=2)
    directory.stop_saver()
    assert "equal on 2" in run("load", "tp", "storage", directory, ranks=2)


@pytest.mark.heavy
def test_one_rank_saved_and_several_load(run, directory):
    run("save", "plain", "storage", directory, ranks=1)
    assert "equal on 3" in run("load", "fsdp2", "memory", directory, ranks=3)
    directory.stop_saver()
    assert "equal on 2" in run("load", "tp", "storage", directory, ranks=2)


def test_nodes_send_each_other_what_they_need(run, two_nodes):
    """What only the other node has in memory comes over the network."""
    run("save", "fsdp2", "memory", *two_nodes, ranks=4)
    assert "equal on 2" in run("load", "fsdp2", "peer", *reversed(two_nodes), ranks=2)


def test_what_a_lost_node_had_is_missing(run, two_nodes):
    run("save", "fsdp2", "storage", *two_nodes, ranks=4)
    two_nodes[1].stop_saver()
    assert "equal on 2" in run("load", "fsdp2", "storage", *two_nodes, ranks=2)


def test_dcp_reads_what_shards_were_stored(run, directory):
    for layout, ranks in (("tp x dp", 4), ("plain", 1)):
        run("save", layout, "storage", Path(directory / layout), ranks=ranks)
    found = [{"model": {"up.weight": torch.zeros(13, 6)}} for _ in range(2)]
    for state, layout in zip(found, ("tp x dp", "plain"), strict=True):
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(state, checkpoint_id=directory / layout / "step-3", no_dist=True)
    assert torch.equal(found[0]["model"]["up.weight"], found[1]["model"]["up.weight"])
    assert found[0]["model"]["up.weight"].abs().min() > 0
