"""Brains that are processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

TOKEN = "the-token-of-the-brain"


class Process(NamedTuple):
    """A Brain that runs."""

    process: subprocess.Popen[str]
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"DLROVER_BRAIN_TOKEN": TOKEN} | more


@contextlib.contextmanager
def brain(database: str, port: int = 0, *options: str) -> Iterator[Process]:
    """Run ``dlrover brain serve``; it is killed at the end if it still runs."""
    command = [sys.executable, "-m", "dlrover.cli.main", "brain", "serve", "--port", str(port),
               "--output", "json", *options]  # fmt: skip
    process = subprocess.Popen(
        command,
        env=environment(DLROVER_BRAIN_DATABASE=database),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield Process(process, json.loads(line)["port"])
    finally:
        process.kill()
        process.communicate()
