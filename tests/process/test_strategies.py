"""A job whose strategy follows its size, with workers killed; the losses are those of one process."""

import psutil
import pytest

from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(240)]


def steps(directory) -> list[tuple[int, int, int, float]]:
    file = directory / "steps"
    lines = file.read_text().splitlines() if file.exists() else []
    words = [line.split() for line in lines if len(line.split()) == 4]
    return [(int(step), int(ranks), int(data), float(loss)) for step, ranks, data, loss in words]


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes", [(3, 1, 2), pytest.param((4, 2, 3), marks=pytest.mark.heavy)], ids=str
)
def test_the_strategy_follows_the_size_and_the_losses_stay(run, forks, tmp_path, sizes) -> None:
    count, program = 140, run.scripts / "any_size.py"
    first, second, third = sizes
    alone, elastic = tmp_path / "alone", tmp_path / "elastic"
    alone.mkdir()
    elastic.mkdir()
    launch = run(
        f"--nnodes=1:{first}", f"--local-nodes={first}", "--nproc-per-node=1", "--save-at-breakpoint",
        program, elastic, count, 0.15,
    )  # fmt: skip

    def trains_on(ranks: int, more: int = 3) -> None:
        done = len(steps(elastic))
        launch.until(
            lambda: sum(each[1] == ranks for each in steps(elastic)[done:]) >= more, 90, f"steps on {ranks}"
        )  # fmt: skip

    trains_on(first)
    psutil.Process(min(launch.pids("worker"))).kill()
    trains_on(first)
    assert run.dlrover("scale", "--job-dir", launch.job_dir, "--nodes", second).returncode == 0
    trains_on(second)
    assert run.dlrover("scale", "--job-dir", launch.job_dir, "--nodes", third).returncode == 0
    launch.succeed(120)
    forks.ranks(1, program, alone, str(count), "0", env=run.env)
    wanted = {step: loss for step, _, _, loss in steps(alone)}
    found = steps(elastic)
    assert {ranks for _, ranks, _, _ in found} == {*sizes}
    assert all(data == ranks for _, ranks, data, _ in found), "the strategy has the world's size"
    assert {step for step, _, _, _ in found} == set(range(1, count + 1)) == wanted.keys()
    assert max(abs(loss - wanted[step]) / wanted[step] for step, _, _, loss in found) < 1e-5
    chosen = [event.body for event in launch.events_of(events.StrategyChosen)]
    assert [each.ranks for each in chosen] == [first, first, second, third]
    assert chosen[0].reason == "it is the fastest that fits, as predicted"
