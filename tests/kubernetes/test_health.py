"""The operator's HTTP port: whether it lives, whether it is ready, and what it counts."""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from dlrover.errors import ConfigurationError
from dlrover.kubernetes.api.access import Access, Token
from dlrover.kubernetes.api.client import Client
from dlrover.kubernetes.operator import health
from dlrover.kubernetes.operator.health import HealthServer
from dlrover.kubernetes.operator.leader import Leader
from dlrover.kubernetes.operator.operator import Operator
from dlrover.kubernetes.operator.stats import BOUNDS, Durations
from dlrover.kubernetes.operator.workqueue import WorkQueue
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import Cluster
from tests.kubernetes.kubelet import Kubelet
from tests.services import free_port

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(text: str) -> dict[tuple[str, str], float]:
    """Samples by name and the values of their labels."""
    return {
        (sample.name, " ".join(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def serving() -> Operator:
    """An operator that knows no cluster."""
    client = Client(Access("https://127.0.0.1:1", "here", ssl.create_default_context(), Token("")))
    return Operator(client, None, "dlrover:latest", Leader(client, "here", "lease", "one"))


def test_durations_are_counted_in_the_buckets_below_which_they_are() -> None:
    durations = Durations()
    for seconds in (0.001, 0.002, 0.3, 1000.0):
        durations.add(seconds)
    buckets = dict(durations.buckets())
    assert (buckets["0.001"], buckets["0.0025"], buckets["0.5"]) == (1, 2, 3)
    assert (buckets[str(BOUNDS[-1])], buckets["+Inf"]) == (3, 4)
    assert durations.sum == 1000.303


def test_the_queue_tells_how_long_a_key_waited_since_it_was_first_added() -> None:
    async def story() -> None:
        waits = Durations()
        queue = WorkQueue(waits)
        queue.add("a")
        await asyncio.sleep(0.02)
        queue.add("a")
        assert queue.depth == 1
        await queue.get()
        assert (queue.depth, dict(waits.buckets())["+Inf"]) == (0, 1)
        assert waits.sum >= 0.02

    asyncio.run(story())


def test_a_connection_that_says_nothing_is_closed_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health._HealthHandler, "timeout", 0.1)

    async def story() -> None:
        server = HealthServer(serving(), "127.0.0.1", 0)
        before = threading.active_count()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /healthz HT")
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
            late = time.monotonic() + 10.0
            while threading.active_count() > before:
                assert time.monotonic() < late
                await asyncio.sleep(0.01)
        finally:
            await asyncio.to_thread(server.close)

    asyncio.run(story())
    assert capfd.readouterr().err == ""


def test_an_operator_that_stands_still_fails_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        server = HealthServer(serving(), "127.0.0.1", 0)
        try:
            assert await asyncio.to_thread(get, server.port, "/healthz") == (200, "ok\n")
            status, said = await asyncio.to_thread(get, server.port, "/readyz")
            assert (status, said) == (503, "The operator has not read its Lease yet.\n")
            assert (await asyncio.to_thread(get, server.port, "/"))[0] == 404
            monkeypatch.setattr(health, "ANSWER_TIMEOUT", 0.05)
            with ThreadPoolExecutor() as elsewhere:
                asked = elsewhere.submit(get, server.port, "/healthz")
                assert asked.result(30.0)[0] == 503  # nothing else runs on the loop meanwhile
            with pytest.raises(ConfigurationError, match=r"--http-port .* cannot be used on"):
                HealthServer(serving(), "127.0.0.1", server.port)
        finally:
            server.close()

    asyncio.run(story())


def test_the_page_has_every_metric() -> None:
    families = {f.name + "_total" * (f.type == "counter") for f in health.metrics(serving())}
    assert families == set(
        re.findall(r"^\| `(dlrover_operator_\w+)`", PAGE.read_text(), re.MULTILINE)
    )


def test_two_operators_are_ready_and_one_of_them_leads(
    control_plane: ControlPlane,
    namespace: str,
    tmp_path: Path,
    kubelet: Callable[..., Kubelet],
) -> None:
    cluster = Cluster(control_plane, namespace, tmp_path)
    kubelet()
    ports = free_port(), free_port()
    command = ["dlrover", "operator", "--namespace", namespace, "--kubeconfig", cluster.kubeconfig]
    processes = [subprocess.Popen([*command, "--http-port", str(port)]) for port in ports]

    def ready(port: int) -> bool:
        try:
            return get(port, "/readyz") == (200, "ok\n")
        except OSError:
            return False

    def counted() -> list[dict[tuple[str, str], float]]:
        return [samples(get(port, "/metrics")[1]) for port in ports]

    try:
        asyncio.run(cluster.until(lambda: all(map(ready, ports))))
        cluster.submit(["true"])
        asyncio.run(cluster.phase("Succeeded"))
        done = ("dlrover_operator_jobs", "Succeeded")
        asyncio.run(cluster.until(lambda: sum(one[done] for one in counted()) == 1))
        found = sorted(counted(), key=lambda one: one["dlrover_operator_leader", ""])
        assert [one["dlrover_operator_leader", ""] for one in found] == [0, 1]
        assert [one["dlrover_operator_queue_depth", ""] for one in found] == [0, 0]
        reconciles = [one["dlrover_operator_reconcile_duration_seconds_count", ""] for one in found]
        assert reconciles[0] == 0
        assert reconciles[1] >= 3
        assert found[1]["dlrover_operator_api_requests_total", "201 POST"] >= 6
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
