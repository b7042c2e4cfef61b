"""Probes: what is measured, what cannot be, and what becomes of a check process that hangs or dies."""

import asyncio
import os
import socket
import sys

import pytest

from dlrover import accelerators
from dlrover.spec.check import CheckOrder, Component, ProbeResult, ProbeState
from dlrover.training.probes import runner
from dlrover.training.probes.process import CheckProcess
from dlrover.training.probes.runner import NO_TORCH, InjectedFaults, Runner
from dlrover.training.probes.wire import Began, Finished, Probe, ProbeReply


def order(members: tuple[int, ...] = (0,), **fields: object) -> CheckOrder:
    known = {"check": 1, "round": 1, "seconds": 30.0, "local": True, "members": members}
    return CheckOrder(**(known | fields))


def carry_out(probe: Probe, directory, environ=None) -> list[object]:
    said: list[object] = []
    Runner(accelerators.CPU, directory, environ or {}, said.append).probe(probe)
    return said


def without_torch(probe: Probe, directory) -> list[ProbeResult]:
    said: list[object] = []
    runner = Runner(accelerators.CPU, directory, {}, said.append)
    runner._has_torch = False
    runner.probe(probe)
    return [reply.result for reply in said if isinstance(reply, ProbeReply)]


@pytest.mark.slow
def test_without_pytorch_less_is_checked(tmp_path):
    results = without_torch(Probe(order((0, 1)), 0), tmp_path)
    states = {r.component: (r.state, r.message) for r in results}
    assert states[Component.DEVICE] == states[Component.NETWORK] == (ProbeState.SKIPPED, NO_TORCH)
    assert states[Component.MEMORY] == states[Component.DISK] == (ProbeState.OK, "")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_takes_nothing_is_a_fault_of_the_disk(tmp_path):
    with pytest.raises(FileNotFoundError):
        runner.disk(tmp_path / "gone")


def test_an_order_for_the_network_alone_measures_nothing_else(tmp_path):
    said = carry_out(Probe(order((0,), local=False), 0), tmp_path)
    assert said == [Finished()]


@pytest.mark.slow
def test_each_probe_says_that_it_begins_and_for_how_long(tmp_path):
    environ = {"DLROVER_PROBE_FAULTS": "7:device:fail"}
    said = carry_out(Probe(order((7,), seconds=60.0), 7), tmp_path, environ)
    began = [reply for reply in said if isinstance(reply, Began)]
    assert [reply.component for reply in began] == [
        Component.DEVICE,
        Component.MEMORY,
        Component.DISK,
    ]
    assert sum(reply.seconds for reply in began) < 60.0
    failed = said[1].result
    assert (failed.state, failed.message) == (ProbeState.FAILED, "injected fault")


def test_faults_strike_only_the_node_and_component_that_they_name():
    environ = {"DLROVER_PROBE_FAULTS": "1:disk:fail,2:memory:slow"}
    InjectedFaults(environ, 2).strike(Component.DISK)
    InjectedFaults(environ, 1).strike(Component.MEMORY)
    with pytest.raises(OSError, match="injected"):
        InjectedFaults(environ, 1).strike(Component.DISK)
    result = ProbeResult(component=Component.MEMORY, figure=10.0, unit="GB/s")
    assert InjectedFaults(environ, 2).slowed(result).figure == 2.0
    assert InjectedFaults(environ, 1).slowed(result) is result
    assert InjectedFaults({}, 1).slowed(result) is result


def probe(orders, faults: str = "") -> list[tuple[ProbeResult, ...]]:
    """What check processes answer to orders for nodes 0, 1, ..., all at the same time."""

    async def main() -> list[tuple[ProbeResult, ...]]:
        env = {**os.environ, "DLROVER_PROBE_FAULTS": faults}
        processes = [CheckProcess(["--directory", "/tmp"], env) for _ in orders]
        try:
            asked = [
                p.probe(o, node) for node, (p, o) in enumerate(zip(processes, orders, strict=True))
            ]
            return list(await asyncio.gather(*asked))
        finally:
            pids = [p.pid for p in processes if p.pid]
            for process in processes:
                process.kill()
            assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]

    return asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [("hang", "it did not end within 1 s"), ("die", "it was killed by SIGKILL")],
)
def test_a_probe_that_does_not_end_or_dies_is_named(how, words):
    (results,) = probe([order(seconds=3.0)], f"0:device:{how}")
    last = results[-1]
    assert (last.component, last.state) == (Component.DEVICE, ProbeState.FAILED)
    assert words in last.message


@pytest.mark.slow
def test_a_check_process_that_cannot_run_is_a_fault_of_the_agent(monkeypatch):
    monkeypatch.setattr(sys, "executable", sys.executable + "-gone")
    (results,) = probe([order()])
    assert [(r.component, r.state) for r in results] == [(Component.AGENT, ProbeState.FAILED)]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(90)
def test_two_nodes_measure_the_network_between_them():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    told = order((0, 1), local=False, store_addr="127.0.0.1", store_port=port, seconds=60.0)
    for results in probe([told, told]):
        (result,) = results
        assert (result.component, result.state) == (Component.NETWORK, ProbeState.OK), result
        assert result.unit == "ms"
        assert 0 < result.figure < 10_000


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(90)
def test_a_node_that_does_not_come_is_a_fault_of_the_network():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    told = order((0, 1), local=False, store_addr="127.0.0.1", store_port=port, seconds=12.0)
    first, second = probe([told, told], "1:network:fail")
    assert second[0].message == "injected fault"
    assert first[0].message == "node 1 did not come within 4 s"
