"""A checkpoint that was saved under one strategy loads under any other, on another number of ranks, too."""

import json
import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "scripts" / "checkpoints.py"


@pytest.fixture
def run(forks, directory):
    """Runs the script on so many ranks."""

    def ranks(number, *cases):
        env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_")}
        output = forks.ranks(
            number, SCRIPT, directory, json.dumps(cases), env=env | {"OMP_NUM_THREADS": "1"}
        )
        assert output.count("EQUAL ") == number * len(cases), output

    return ranks


@pytest.mark.heavy
def test_shards_and_tensors_load_as_a_pipeline_and_whole(run):
    run(
        4,
        ("save", "plain", {"dp_shard": 2, "tp": 2}),
        ("load", "plain", {"pp": 2, "tp": 2, "micro_batch": 2}),
        ("load", "plain", {"pp": 2, "virtual": 2, "dp_shard": 2, "zero": 2, "micro_batch": 1}),
    )
    run(2, ("load", "plain", {"pp": 2, "micro_batch": 2}))
    run(1, ("load", "plain", {}))


def test_a_pipeline_with_experts_loads_in_other_layouts(run):
    run(4, ("save", "moe", {"pp": 2, "dp_shard": 2, "ep": 2, "zero": 2, "micro_batch": 1}))
    run(
        2,
        ("load", "moe", {"tp": 2}),
        ("load", "moe", {"dp_replicate": 2}),
        ("load", "moe", {"dp_shard": 2, "ep": 2, "micro_batch": 1}),
    )
