"""The error file of a worker: any program may write it."""

import json

import pytest

from dlrover.agent.workers.failures import recorded_error


@pytest.mark.parametrize(
    ("time", "expected"),
    [("1.5", 1.5), ("NaN", 0.0), ("-Infinity", 0.0), ('"inf"', 0.0), ("[]", 0.0)],
)
def test_a_time_that_is_no_number_counts_as_none(tmp_path, time: str, expected: float) -> None:
    """The master refuses a report with such a time, so the job would never hear of the failure."""
    file = tmp_path / "error.json"
    recorded = json.dumps({"message": {"message": "ValueError: x", "extraInfo": {"time": 0}}})
    file.write_text(recorded.replace('"time": 0', f'"time": {time}'))
    error = recorded_error(file)
    assert (error.type, error.message, error.time) == ("ValueError", "x", expected)
