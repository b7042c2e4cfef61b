"""The program of the page about TensorFlow, in a job and alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]
PAGE = (Path(__file__).parents[2] / "docs" / "tensorflow.md").read_text()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    block = re.search(r"Save this as `train.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    path = tmp_path / "train.py"
    path.write_text(block[1].replace("STEPS = 2000", "STEPS = 400"))
    return path


def test_the_program_in_a_job(run, program: Path) -> None:
    line = re.search(r"^dlrover-run (.*) train.py$", PAGE, re.MULTILINE)
    assert line is not None
    launch = run(*line[1].split(), "--shutdown-timeout=5", program, cwd=program.parent)
    assert "step 400: 0.9" in launch.succeed(200)


def test_the_program_alone(program: Path) -> None:
    command = [sys.executable, program.name]
    shown = subprocess.run(
        command, cwd=program.parent, capture_output=True, text=True, timeout=200, check=False
    )
    assert "step 400: 0.9" in shown.stdout, shown.stderr[-3000:]
