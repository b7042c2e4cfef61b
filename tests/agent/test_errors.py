"""The error file of a worker: any program may write it."""

import json

import pytest

from dlrover.agent.workers.failures import RecordedError, recorded_error


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


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecordedError("SystemExit", "3"), 3),
        (RecordedError("SystemExit", "no data"), 1),
        (RecordedError("SystemExit", "256"), 1),
        (RecordedError("SystemExit", "-1"), 255),
        (RecordedError("SystemExit", "9" * 5000), 1),
        (RecordedError("ValueError", "3"), 1),
        (RecordedError(), 1),
    ],
)
def test_a_program_leaves_with_the_code_that_it_gave(error: RecordedError, code: int) -> None:
    assert error.exit_code == code
