"""Clocks of a job: no setting of the wall clock changes a duration."""

import time

import pytest

from dlrover._util import clocks


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_clock_goes_on_from_that_of_an_earlier_process(tmp_path, monkeypatch, step) -> None:
    wall = time.time
    first = clocks.kept_in(tmp_path / "clock")(0.0)
    last = first()
    monkeypatch.setattr(time, "time", lambda: wall() + step)
    second = clocks.kept_in(tmp_path / "clock")(last)
    assert second.offset == first.offset
    assert clocks.kept_in(tmp_path / "clock")(0.0)() == pytest.approx(time.time(), abs=5), (
        "another job begins with the time of then"
    )


@pytest.mark.parametrize("content", ["", "no JSON", '{"boot": "another one", "offset": 5.0}'])
def test_after_a_boot_a_clock_begins_with_the_wall_time(tmp_path, content) -> None:
    (tmp_path / "clock").write_text(content)
    last = time.time() - 100.0
    assert clocks.kept_in(tmp_path / "clock")(last)() == pytest.approx(time.time(), abs=5)
    ahead = time.time() + 1000.0
    (tmp_path / "clock").write_text(content)
    assert clocks.kept_in(tmp_path / "clock")(ahead)() >= ahead


def test_a_clock_runs_where_no_file_can_be(tmp_path, caplog) -> None:
    made = clocks.kept_in(tmp_path / "nowhere" / "clock")(0.0)
    assert made() == pytest.approx(time.time(), abs=5)
    assert "The job's clock is not noted" in caplog.text


def test_a_clock_runs_where_a_container_hides_the_boot(tmp_path, monkeypatch) -> None:
    def hidden() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(clocks, "boot_id", hidden)
    last = time.time() + 100.0
    assert clocks.kept_in(tmp_path / "clock")(last)() >= last
    assert not (tmp_path / "clock").exists()
