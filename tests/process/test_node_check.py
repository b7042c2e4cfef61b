"""Nodes are really measured before they train: an injected fault is named, and the others train."""

import json
import os
import signal
import sys

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

CHECK = ("--local-nodes=4", "--network-check")


def injected(faults: str) -> dict[str, str]:
    return {"DLROVER_PROBE_FAULTS": faults, "DLROVER_CHECK_TIMEOUT": "90"}


def findings(launch, kind: str) -> list[tuple[tuple[int, ...], str, str]]:
    bodies = [event.body for event in launch.events_of(events.NodeCheckFinding)]
    return [(b.nodes, b.component, b.message) for b in bodies if b.kind == kind]


def check_processes(launch) -> list:
    return [p for p in launch.processes() if "dlrover.training.probes" in p.cmdline()]


def test_faulty_nodes_are_named_and_excluded(train) -> None:
    faults = {
        2: ("disk", "fail", "injected fault"),
        3: ("device", "die", "the check process ended: it was killed by SIGKILL"),
        4: ("network", "fail", "it does not reach nodes"),
    }
    env = injected(",".join(f"{node}:{part}:{what}" for node, (part, what, _) in faults.items()))
    options = (
        "--local-nodes=5",
        "--nnodes=2:5",
        "--network-check",
        "--rdzv-conf=scale_up_delay=60",
    )
    training = train(10, 0.1, *options, env=env)
    training.wait_for_step(1, 200)
    launch = training.launch
    found = {nodes: (part, words) for nodes, part, words in findings(launch, "fault")}
    lost = {event.body.node: event.body.reason for event in launch.events_of(events.NodeLost)}
    assert found.keys() == {(node,) for node in faults}
    assert lost.keys() == faults.keys()
    for node, (part, _, words) in faults.items():
        assert found[node,][0] == part
        assert words in found[node,][1]
        assert f"the node check names its {part}" in lost[node]
    assert launch.events_of(events.RoundCompleted)[0].body.nodes == 2
    launch.succeed(100)
    assert (training.losses[-1][0], training.losses[-1][2]) == (10, 2)


@pytest.mark.heavy
def test_a_slow_node_is_named_and_all_train(train) -> None:
    training = train(3, 0.0, *CHECK, env=injected("2:device:slow"))
    training.launch.succeed(100)
    (finished,) = training.launch.events_of(events.NodeCheckFinished)
    assert (finished.body.nodes, finished.body.excluded) == (4, 0)
    assert findings(training.launch, "fault") == []
    slow = [f for f in findings(training.launch, "slow") if f[1] == "device"]
    assert [nodes for nodes, _, _ in slow] == [(2,)]
    assert training.losses[-1][2] == 4
    assert not check_processes(training.launch)


def test_a_job_whose_nodes_are_all_at_fault_ends_with_the_reason(run) -> None:
    faults = ",".join(f"{node}:disk:fail" for node in range(12))
    options = ("--local-nodes=2", "--network-check")
    launch = run(*options, run.scripts / "hello.py", env=injected(faults))
    _, stderr = launch.end_with(ExitCode.INFRASTRUCTURE, 100)
    assert "the node check names its disk: injected fault" in stderr


def test_a_master_that_is_killed_during_a_check_finishes_it(run, train) -> None:
    training = train(3, 0.0, "--local-nodes=2", "--network-check")
    launch = training.launch
    launch.until(lambda: launch.events_of(events.NodeCheckStarted), 40, "a check")
    status = run.dlrover("status", "--job-dir", launch.job_dir)
    assert "checking nodes, round 1 of at most 4" in status.stdout
    (master,) = launch.wait_for("master")
    master.kill()
    launch.succeed(100)
    assert len(launch.events_of(events.MasterRecovered)) == 1
    assert len(launch.events_of(events.NodeCheckStarted)) == 1
    (finished,) = launch.events_of(events.NodeCheckFinished)
    assert finished.body.excluded == 0


def test_a_node_whose_worker_was_killed_is_checked_again(train) -> None:
    training = train(1000, 0.1, "--local-nodes=2", "--network-check")
    launch = training.launch
    training.wait_for_step(2, 80)
    assert len(launch.events_of(events.NodeCheckFinished)) == 1
    launch.of_kind("worker")[0].kill()
    launch.until(lambda: len(launch.events_of(events.NodeCheckFinished)) == 2, 60, "a second check")
    started = launch.events_of(events.NodeCheckStarted)[1]
    assert started.body.nodes == 1
    launch.process.send_signal(signal.SIGTERM)
    launch.wait(60)


@pytest.mark.parametrize("fault", [pytest.param("", marks=pytest.mark.heavy), "2:device:fail"])
def test_ranks_of_another_launcher_come_to_the_same_verdict(run, fault: str) -> None:
    program = ("--no-python", sys.executable, "-m", "dlrover.cli.main", "check")
    options = ("--nproc-per-node=4", f"--master-port={run.free_port()}")
    launch = run.torchrun(*options, *program, env=injected(fault))
    code = launch.wait(100)
    lines = launch.stdout.splitlines()
    if fault:
        assert code != 0
        # torchrun ends the others with the first rank that says it.
        assert f"fault: rank 2 ({os.uname().nodename}): device: injected fault" in lines
        assert not any("No node is at fault" in line for line in lines)
    else:
        assert code == 0, launch.stderr
        assert lines.count("No node is at fault of the 4 that were checked.") == 4
        rows = [line for line in lines if line.startswith("rank 3 ") and " memory " in line]
        assert len(rows) == 1


@pytest.mark.parametrize(("fault", "code"), [("", 0), ("0:memory:fail", 3)])
def test_one_machine_by_itself(run, fault: str, code: int) -> None:
    run.env |= injected(fault)
    done = run.dlrover("check", "--output", "json", timeout=90)
    assert done.returncode == code, done.stderr
    report = json.loads(done.stdout)
    assert report["healthy"] is (code == 0)
    components = {result["component"] for result in report["results"]["0"]}
    assert components == {"device", "memory", "disk", "network"}
    if fault:
        (finding,) = report["findings"]
        assert (finding["component"], finding["message"]) == ("memory", "injected fault")
