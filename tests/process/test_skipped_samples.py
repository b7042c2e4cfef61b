"""Samples that cannot be read, and one that kills its reader: skipped and reported."""

from __future__ import annotations

import pytest

from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


def test_what_cannot_be_read_is_told_in_the_events_and_at_the_end(run, tmp_path) -> None:
    script = run.scripts / "poison.py"
    launch = run("--standalone", "--max-restarts=3", script, tmp_path, terminal=True)
    launch.succeed()
    told = [event.body for event in launch.events_of(events.SamplesSkipped)]
    single = {(body.start, body.stop, body.error) for body in told if body.stop == body.start + 1}
    assert single == {(33, 34, "record 33: ValueError: rotten")}
    (shard,) = (body for body in told if body.stop > body.start + 1)
    assert (shard.data, shard.partition, shard.start, shard.stop) == ("data", 0, 50, 60)
    assert "the worker was killed by SIGSEGV, 2 times with them" in shard.error
    assert len(launch.events_of(events.RestartDecided)) == 2
    got = sorted(map(int, (tmp_path / "got-2").read_text().split()))
    assert got == [n for n in range(100) if n != 33 and not 50 <= n < 60]
    last = launch.stderr[launch.stderr.rindex("The job succeeded") :]
    assert (
        last.count("A sample of the data set data is skipped: record 33: ValueError: rotten.") == 1
    )
    assert last.count("10 samples of the data set data are skipped: the worker was killed by") == 1
