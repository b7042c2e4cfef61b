"""What a node tells of its accelerators: read from the output of a real program that is called like the tool."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import psutil
import pytest

from dlrover.accelerators import DeviceUse
from dlrover.agent import devices

IDLE = DeviceUse(0, 0, 0, "GPU-0a")
WAITS = DeviceUse(1, 100, 0, "GPU-1b")
COMPUTES = DeviceUse(2, 97, 41, "GPU-2c")
ALL = "0, GPU-0a, 0, 0\n1, GPU-1b, 100, 0\n2, GPU-2c, 97, 41\n"


def tool(directory: Path, text: str, then: str = "exit 0") -> dict[str, str]:
    """An environment in which ``nvidia-smi`` knows one query and prints a text."""
    path = directory / "nvidia-smi"
    path.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --query-gpu=index,uuid,utilization.gpu,utilization.memory ] || exit 2\n'
        '[ "$2" = --format=csv,noheader,nounits ] || exit 2\n'
        f"/bin/cat <<'END'\n{text}END\n{then}\n"
    )
    path.chmod(0o755)
    return {"PATH": str(directory)}


def use(env: dict[str, str], workers: int = 3) -> dict[int, DeviceUse]:
    return asyncio.run(devices.Devices(env).use(workers))


def test_each_worker_has_the_device_of_its_local_rank(tmp_path):
    assert use(tool(tmp_path, ALL)) == {0: IDLE, 1: WAITS, 2: COMPUTES}
    assert use(tool(tmp_path, ALL), workers=1) == {0: IDLE}


@pytest.mark.parametrize("visible", ["2,0", "GPU-2c, GPU-0a"])
def test_the_environment_says_which_devices_there_are(tmp_path, visible):
    env = tool(tmp_path, ALL) | {"CUDA_VISIBLE_DEVICES": visible}
    assert use(env) == {0: COMPUTES, 1: IDLE}


def test_what_the_tool_does_not_know_stays_unknown(tmp_path):
    env = tool(tmp_path, "0, GPU-0a, [N/A], [N/A]\n[Unknown Error]\n")
    assert use(env) == {0: DeviceUse(0, -1, -1, "GPU-0a")}
    env["CUDA_VISIBLE_DEVICES"] = "5,MIG-7"
    assert use(env) == {}


def test_a_node_without_a_tool_starts_no_process(tmp_path, monkeypatch):
    def refuse(*_args, **_more):
        raise AssertionError

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    assert use({"PATH": str(tmp_path)}) == {}
    assert use({}) == {}


def test_a_tool_that_fails_says_nothing(tmp_path):
    assert use(tool(tmp_path, "", "exit 9")) == {}
    (tmp_path / "nvidia-smi").write_text("no program")
    assert use({"PATH": str(tmp_path)}) == {}


def test_a_tool_that_never_ends_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "TOOL_TIME", 0.1)
    seconds = f"60.{os.getpid()}"
    own = devices.Devices(tool(tmp_path, "", f"exec /bin/sleep {seconds}"))
    began = time.monotonic()
    assert asyncio.run(own.use(1)) == {}
    assert time.monotonic() - began < 30
    tool(tmp_path, ALL)
    monkeypatch.undo()  # a tool that ends may take its time
    assert asyncio.run(own.use(1)) == {0: IDLE}
    assert not [p for p in psutil.process_iter(["cmdline"]) if seconds in (p.info["cmdline"] or ())]
