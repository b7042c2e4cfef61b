"""The page for whoever runs the operator says what the files of an installation say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import dlrover
from tests.kubernetes.installed import kustomize

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
RECIPES_PAGE = (ROOT / "docs" / "inside-other-jobs.md").read_text()
MONITORING = ROOT / "deploy" / "monitoring"


def manifest() -> dict[str, Any]:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    content: dict[str, Any] = yaml.safe_load(block)
    return content


def test_the_monitor_finds_the_port_of_the_job_on_the_page() -> None:
    pytest.importorskip("httpx2")
    from dlrover.kubernetes.machine import objects
    from dlrover.kubernetes.resources import names, validation

    job = validation.parse(manifest())
    pod = objects.master_pod(job, "dlrover:1")
    monitor = yaml.safe_load((MONITORING / "podmonitor.yaml").read_text())["spec"]
    wanted = monitor["selector"]["matchLabels"]
    assert wanted.items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env["DLROVER_METRICS_PORT"] == str(ports[endpoint["port"]])
    label = re.sub(r"[./-]", "_", names.JOB_LABEL)
    sources = {one["targetLabel"]: one["sourceLabels"] for one in endpoint["relabelings"]}
    assert sources["job"] == [f"__meta_kubernetes_pod_label_{label}"]


def test_the_table_of_alerts_is_that_of_the_rules() -> None:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    found = [(r["alert"], r["labels"]["severity"]) for group in groups for r in group["rules"]]
    assert re.findall(r"^\| `(DLRover\w+)` \| (\w+) \|", PAGE, re.MULTILINE) == found


@pytest.mark.parametrize("page", [PAGE, RECIPES_PAGE], ids=["operations", "inside-other-jobs"])
def test_files_and_versions_on_a_page_are_there(page: str) -> None:
    for path in re.findall(r"\b(?:deploy|examples)/[\w./-]*\w", page):
        assert (ROOT / path).exists(), path
    for version in re.findall(r"(?<=:)\d+\.\d+\.\d+\w*", page):
        assert version == dlrover.__version__


def test_kustomize_makes_rules_monitor_and_board() -> None:
    made = {one["kind"]: one for one in kustomize("monitoring")}
    assert set(made) == {"PrometheusRule", "PodMonitor", "ConfigMap"}
    (text,) = made["ConfigMap"]["data"].values()
    assert json.loads(text) == json.loads((MONITORING / "board.json").read_text())
    assert made["ConfigMap"]["metadata"]["labels"] == {"grafana_dashboard": "1"}
