"""The examples that need other libraries: each loses a worker on the way, and goes on."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(400)]

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = (
    *("--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--corpus-mb", "1"),
    *("--global-batch-size", "12", "--lr", "0.01", "--steps", "40"),
)


def run(script, out, *args):
    ended = subprocess.run(
        [
            sys.executable, "-m", "dlrover.cli.run.run", "--standalone", "--nproc-per-node", "2",
            "--max-restarts", "1", str(EXAMPLES / script), "--out", str(out), *args,
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Restart 1" in ended.stderr
    return ended.stdout


@pytest.mark.parametrize("engine", ["deepspeed", "lightning"])
def test_char_gpt(engine, tmp_path):
    pytest.importorskip(engine)
    printed = run("02_char_gpt/engines.py", tmp_path, "--engine", engine, *TINY, "--die-at", "25")
    assert float(printed.split("step 40: loss ")[1][:5]) < 4.5


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("way", [(), ("--fsdp",)])
def test_llama(way, tmp_path):
    printed = run("11_llama/train.py", tmp_path, *way, "--die-at", "15")
    assert "resumed" in printed
    assert float(printed.split("loss ")[-1][:5]) < 4.5
    assert "after 30 steps" in printed
