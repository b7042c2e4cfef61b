"""Jobs of the original's unified API."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.errors import ConfigurationError
from dlrover.original.unified import DLJobBuilder, RLJobBuilder

PACKAGES = str(Path(__file__).parents[2] / "packages" / "original" / "src")


def test_options_of_the_builder_are_those_of_roles() -> None:
    job = (
        DLJobBuilder().node_num(1).device_type("CPU").config({"lr": 1}).global_env({"A": "1"})
        .role("sft").train("train.main").nnodes(2).nproc_per_node(4).env({"B": "2"}).end()
        .role("data").run("data.py --n 1").total(3).resource(cpu=1, memory=64)
        .with_collocation("sft", "data").build()
    )  # fmt: skip
    common = {"failover": "instance", "config": {"lr": 1}, "collocate": "sft-data"}
    assert job.roles == {
        "sft": common | {"entry": "train.main", "kind": "elastic", "instances": 2, "processes": 4, "env": {"A": "1", "B": "2"}},
        "data": common | {"entry": "data.py --n 1", "kind": "simple", "instances": 3, "env": {"A": "1"},
                          "resources": {"cpu": 1, "memory": "64Mi"}},
    }  # fmt: skip


def test_the_trainer_of_an_rl_job_is_its_driver() -> None:
    made = RLJobBuilder().trainer("t.run").actor("a.run").total(2).rollout("r.run").build().roles
    assert {name: role["kind"] for name, role in made.items()} == {
        "TRAINER": "driver", "ACTOR": "elastic", "ROLLOUT": "simple",
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match="no actor"):
        RLJobBuilder().trainer("t.run").build()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_job_of_the_original_runs(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(
        "from dlrover.python.unified.api.runtime import DataQueue, current_worker\n"
        "def make():\n    DataQueue('q', True).put(current_worker().job_info.user_config['n'])\n"
        "def take():\n    open('taken', 'w').write(str(DataQueue('q', False).get(1)))\n"
    )
    (tmp_path / "main.py").write_text(
        "from dlrover.python.unified.api.builder import DLJobBuilder\n"
        "job = DLJobBuilder().node_num(1).device_per_node(1).config({'n': 7})"
        ".role('a').run('parts.make').end().role('b').run('parts.take').end().build()\n"
        "raise SystemExit(job.submit('pair'))\n"
    )
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "taken").read_text() == "[7]"


@pytest.mark.slow
@pytest.mark.torch
def test_the_packages_of_their_own_can_be_imported() -> None:
    code = (
        "import tfplus; from atorch.auto import auto_accelerate; from atorch.optimizers import AGD, WeightedSAM;"
        " from atorch.data import ElasticDataset; tfplus.GroupAdam, tfplus.get_kv_variable"
    )
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": PACKAGES}, check=True
    )
