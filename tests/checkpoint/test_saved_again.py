"""A step that is saved more than once: its last save counts, whole, for all ranks."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dlrover.checkpoint import Checkpointer
from tests.support.forks import Forks

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(90)]

SCRIPT = Path(__file__).parent / "scripts" / "again.py"
ENV = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


def state(value: float) -> dict:
    return {"w": torch.full((1000,), value), "value": value}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("first", ["memory", "storage"])
def test_the_second_save_of_a_step_replaces_the_first(directory, first):
    saves = Checkpointer(directory, linger=0.0)
    saves.save(1, state(1.0), to=first)
    saves.save(1, state(2.0), to="storage")
    saves.wait()
    in_memory, on_disk = state(0.0), {"w": torch.zeros(1000), "value": 0.0}
    assert saves.load(in_memory).source == "memory"
    dcp.load(on_disk, checkpoint_id=directory / "step-1", no_dist=True)
    saves.close()
    assert in_memory["value"] == on_disk["value"] == 2.0
    assert torch.equal(in_memory["w"], on_disk["w"])
    directory.until_no_saver()
    assert sorted(path.name for path in directory.glob(".*")) == []


@pytest.fixture
def ranks(forks: Forks):
    return partial(run, forks)


def run(forks: Forks, directory: Path, verb: str, *saves: int) -> list[str]:
    plan = {
        "verb": verb, "directory": str(directory), "saves": saves,
        "meet": f"file://{directory}-meet-{verb}",
    }  # fmt: skip
    started = [
        forks.start(SCRIPT, rank, json.dumps(plan), env={**os.environ, **ENV})
        for rank in range(len(saves))
    ]
    try:
        return [process.communicate(timeout=60)[0].strip() for process in started]
    finally:
        for process in started:
            process.kill()


def test_all_ranks_have_the_last_save(ranks, directory):
    assert ranks(directory, "save", 3, 3) == ["stored"] * 2
    directory.stop_saver()
    assert ranks(directory, "load", 0, 0) == ["storage: save 3"] * 2


def test_a_save_that_a_dead_rank_did_not_make_is_mixed_with_no_other(ranks, directory):
    said = ranks(directory, "die", 2, 1)
    assert "rank 1 ended before" in said[0]
    directory.until_no_saver()
    assert ranks(directory, "load", 0, 0) == ["storage: save 1"] * 2
