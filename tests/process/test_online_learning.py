"""The example that learns from a stream: from the producer to the page, with a worker killed on the way."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.brokers import fresh, redis_port

__all__ = ["redis_port"]
pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(120)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "03_online_learning"
MESSAGES = 3000


def test_from_the_producer_to_the_page(run, tmp_path: Path, redis_port: int) -> None:
    url = f"redis://127.0.0.1:{redis_port}/0?stream={fresh()}"
    send = [sys.executable, EXAMPLE / "produce.py", url, "--messages", MESSAGES, "--rate", "800"]
    producer = subprocess.Popen([*map(str, send)], stdout=subprocess.DEVNULL)
    try:
        out = tmp_path / "out"
        options = ("--out", out, "--messages", MESSAGES, "--save-every", 10)
        launch = run("--standalone", "--nproc-per-node=2", EXAMPLE / "train.py", url, *options)
        run.until(lambda: "step 20:" in launch.stdout, 60, "step 20")
        launch.of_kind("worker")[1].kill()
        printed = launch.succeed(90)
        assert producer.wait(40) == 0
    finally:
        producer.kill()
        producer.wait()
    known = re.findall(r"begins after (\d+) messages", printed)
    assert [n == "0" for n in known] == [True, True, False, False]
    assert f"learned from {MESSAGES} messages" in printed
    right = re.findall(r"([\d.]+)% right lately", printed)
    assert float(right[-1]) > 75
    page = (out / "evaluation.html").read_text()
    assert f"learned from {MESSAGES:,} messages" in page
    assert "began 2 times" in page
    assert page.count('class="start"/>') == 1
    assert page.count(",") > 60, "the curve"
