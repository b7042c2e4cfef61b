"""A pipeline of Ray Data whose rows a training on the same cluster reads while it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

pytestmark = [
    pytest.mark.slow, pytest.mark.long, pytest.mark.torch, pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("default"),  # Ray's own
]  # fmt: skip
WAIT = 200.0
ROWS, PARTS = 1950, 40
PIPELINE = """
import sys, time
import numpy as np, ray
from dlrover.data import write_stream

def prepare(rows):
    time.sleep(0.3)
    return {"n": rows["id"] - 50, "image": np.ones((len(rows["id"]), 2, 3), np.float32)}

ray.init(sys.argv[1], log_to_driver=False)
rows = ray.data.range(2000, override_num_blocks=40).map_batches(prepare, batch_size=None)
print("rows:", write_stream(rows.filter(lambda row: row["n"] >= 0), sys.argv[2]))
"""
"""Its first part has no rows."""


def test_each_row_counts_once_though_the_driver_a_task_and_a_worker_are_killed(
    run, ray_cluster
) -> None:
    folder, out = run.directory / "rows", run.directory / "out"
    out.mkdir()
    (run.directory / "pipeline.py").write_text(PIPELINE)
    command = [sys.executable, run.directory / "pipeline.py", ray_cluster.address]
    started: list[subprocess.Popen[str]] = []

    def pipeline() -> subprocess.Popen[str]:
        started.append(subprocess.Popen(
            [*command, f"parquet://{folder}"], env=ray_cluster.env, stdout=subprocess.PIPE, text=True
        ))  # fmt: skip
        return started[-1]

    def parts() -> int:
        return len([*folder.glob("part-*")])

    script = run.scripts / "count_stream.py"
    launch = run(
        *ray_cluster.options(2, rdzv_id="rows"), script, out, f"parquet://{folder}", ROWS, 0.05
    )
    launch.until((out / "steps-0").exists, WAIT, "a step")
    try:
        driver = pipeline()
        launch.until(lambda: parts() > 3, WAIT, "parts")
        launch.until(lambda: ray_cluster.titled("ReadRange"), WAIT, "a task")
        ray_cluster.titled("ReadRange")[0].kill()
        before = parts()
        launch.until(lambda: parts() > before + 3, WAIT, "parts after the death of a task")
        driver.kill()
        driver.wait()
        before = parts()
        assert before < PARTS - 1, "the pipeline was killed on its way"
        driver = pipeline()
        ray_cluster.workers()[0].kill()
        launch.until(lambda: parts() > before, WAIT, "parts of another program")
        launch.succeed(WAIT)
        for program in (driver, pipeline()):  # the second has nothing to do
            assert program.communicate(timeout=WAIT)[0].split()[-2:] == ["rows:", str(ROWS)]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert Counter(json.loads((out / "counts").read_text())) == {1: ROWS}

    from dlrover.data import Parquet

    rows = list(Parquet(folder))
    assert [row["n"] for row in rows] == list(range(ROWS))
    assert rows[7]["image"] == [[1.0] * 3] * 2
