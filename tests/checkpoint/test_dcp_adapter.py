"""``torch.distributed.checkpoint`` with our reader and writer, on FSDP1."""

import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).parent / "scripts" / "by_dcp.py")


@pytest.mark.parametrize("where", ["storage", pytest.param("memory", marks=pytest.mark.heavy)])
def test_two_ranks_save_and_others_load(forks, directory, where):
    def run(verb: str, directory: Path, where: str, ranks: int) -> str:
        return forks.ranks(ranks, SCRIPT, verb, directory, where, env=os.environ)

    run("save", directory, where, 2)
    if where == "storage":
        directory.stop_saver()
    for ranks in (3, 1):
        assert f"equal on {ranks} ranks" in run("load", directory, where, ranks)
