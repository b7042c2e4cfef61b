"""Ports of servers that tests start: no other program gets one between the search and the start."""

from __future__ import annotations

from pathlib import Path

from tests.services import free_port


def test_a_port_that_was_found_free_is_none_that_the_kernel_gives() -> None:
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    found = {free_port() for _ in range(100)}
    assert not found & {*range(int(given[0]), int(given[1]) + 1)}
    assert len(found) > 90, "two tests that start servers at once choose others"
