"""The board and the alert rules name what the master exports, and say what they mean to say."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.services import program

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
WORDS = {
    *("and", "or", "unless", "ignoring", "on", "by", "without", "bool", "group_left"),
    *("sum", "rate", "increase", "changes", "label_values"),
}
"""Of the language of expressions, what board and rules use."""
LABELS = {"job", "instance", "cause", "status", "origin"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, set[str]]]:
    """Each metric of a master, with the values that its labels have."""
    pytest.importorskip("prometheus_client")
    from dlrover.master.journal.file import FileJournal
    from dlrover.master.journal.history import History
    from dlrover.master.service import Master
    from dlrover.master.views.metrics import metrics

    directory = tmp_path_factory.mktemp("master")
    found: dict[str, dict[str, set[str]]] = {}
    journal, history = FileJournal(directory / "journal"), History(directory / "events")
    with contextlib.closing(journal), contextlib.closing(history):
        for family in metrics(Master(journal, history)):
            for sample in family.samples:
                labels = found.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    labels.setdefault(label, set()).add(value)
    return found


def rules(name: str = "alerts.yaml") -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((MONITORING / name).read_text())
    return document.get("spec", document)


def board() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((MONITORING / "board.json").read_text())
    return document


def expressions() -> Iterator[str]:
    """Every expression of the rules and of the board."""
    for group in rules()["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    content = board()
    for panel in content["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in content["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    yield from (annotation["expr"] for annotation in content["annotations"]["list"])


def faults(expression: str, exported: dict[str, dict[str, set[str]]]) -> list[str]:
    """What an expression names that nobody exports, and brackets that do not close."""
    found = []
    for metric, matchers in re.findall(r"([a-z_]\w*)\{([^}]*)\}", expression):
        for label, value in re.findall(r'(\w+)="([^"]*)"', matchers):
            known = exported.get(metric, {}).get(label)
            if label in ("job", "instance"):
                continue
            if known is None or value not in known:
                found.append(f'{metric}{{{label}="{value}"}}')
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", expression)
    names = set(re.findall(r"[a-zA-Z_]\w*", bare)) - WORDS - LABELS
    found += sorted(names - set(exported))
    closed = re.sub(r"[^()]", "", expression)
    while "()" in closed:
        closed = closed.replace("()", "")
    return found + ([f"brackets: {expression}"] if closed else [])


def test_every_metric_and_label_is_exported(exported: dict[str, dict[str, set[str]]]) -> None:
    found = list(expressions())
    assert len(found) > 15
    assert [fault for one in found for fault in faults(one, exported)] == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(dlrover_steps_total[5m]) == 0", "dlrover_steps_total"),
        ('dlrover_job_nodes{status="asleep"} > 0', 'dlrover_job_nodes{status="asleep"}'),
        ("sum(dlrover_incident_open", "brackets: sum(dlrover_incident_open"),
    ],
)
def test_a_wrong_expression_would_be_found(
    exported: dict[str, dict[str, set[str]]], expression: str, fault: str
) -> None:
    assert faults(expression, exported) == [fault]


def test_every_metric_of_the_code_is_on_the_board(
    exported: dict[str, dict[str, set[str]]],
) -> None:
    text = json.dumps(board())
    assert [name for name in exported if name not in text] == []


def test_the_prometheus_operator_gets_the_same_rules() -> None:
    assert rules("rules.yaml")["groups"] == rules()["groups"]


def test_each_alert_says_which_job_and_what_to_do() -> None:
    for group in rules()["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("critical", "warning", "info")
            assert "$labels.job" in rule["annotations"]["summary"]
            assert rule["annotations"]["description"].endswith(".")


OPERATOR = "operator-alerts.yaml"


def test_alerts_about_the_operator_name_what_it_exports() -> None:
    pytest.importorskip("prometheus_client")
    from dlrover.kubernetes.operator.health import metrics
    from dlrover.kubernetes.operator.stats import Stats

    class Idle:
        stats, waiting = Stats(), 0

        @staticmethod
        def phases() -> Iterator[str]:
            return iter(())

    Idle.stats.called("GET", "200")
    names = {sample.name for family in metrics(Idle()) for sample in family.samples}  # type: ignore[arg-type]
    for group in rules(OPERATOR)["groups"]:
        for rule in group["rules"]:
            assert set(re.findall(r"dlrover_operator_\w+", rule["expr"])) <= names
            assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_the_board_is_laid_out_without_overlaps() -> None:
    taken: set[tuple[int, int]] = set()
    numbers = [panel["id"] for panel in board()["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in board()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells


# ---- with Prometheus's own tool, where there is one


FIRES = {
    "DLRoverJobDoesNotRecover": {
        "dlrover_incident_open": "1x120",
        "dlrover_job_steps_total": "50x120",
    },
    "DLRoverJobMakesNoSteps": {
        "dlrover_incident_open": "0x120",
        "dlrover_job_steps_total": "50x120",
        'dlrover_job_nodes{status="running"': "2x120",
    },
    "DLRoverJobWaitsForNodes": {'dlrover_job_nodes{status="pending"': "1x120"},
    "DLRoverJobGoodputIsLow": {
        'dlrover_job_seconds_total{cause="productive"': "0+20x240",
        'dlrover_job_seconds_total{cause="rendezvous"': "0+40x240",
        "dlrover_job_steps_total": "0+10x240",
    },
    "DLRoverJobRestartsOften": {
        'dlrover_job_restarts_total{origin="user_code"': "0+0.05x240",
        'dlrover_job_restarts_total{origin="infrastructure"': "0+0.1x240",
    },
    "DLRoverProgramFails": {'dlrover_job_restarts_total{origin="user_code"': "0x30 1x90"},
}
"""Series for which each alert has to fire at their end; by the minute."""
HEALTHY = {
    "dlrover_incident_open": "0x240",
    "dlrover_job_steps_total": "0+60x240",
    'dlrover_job_nodes{status="running"': "2x240",
    'dlrover_job_nodes{status="pending"': "0x240",
    'dlrover_job_seconds_total{cause="productive"': "0+110x240",
    'dlrover_job_seconds_total{cause="rendezvous"': "0+10x240",
    'dlrover_job_restarts_total{origin="user_code"': "0x240",
    'dlrover_job_restarts_total{origin="infrastructure"': "0x100 1x140",
}


def unit_test(series: dict[str, str], *alerts: str) -> dict[str, Any]:
    """A unit test of promtool that fails for each of the alerts that fires at the end of the series."""
    minutes = 240 if any("240" in values or "140" in values for values in series.values()) else 90
    own = 'job="digits",instance="here"'
    written = [
        {"series": f"{name},{own}}}" if "{" in name else f"{name}{{{own}}}", "values": values}
        for name, values in series.items()
    ]
    expected = [
        {"eval_time": f"{minutes}m", "alertname": name, "exp_alerts": []} for name in alerts
    ]
    return {"interval": "1m", "input_series": written, "alert_rule_test": expected}


@pytest.fixture(scope="module")
def promtool() -> str:
    return program("promtool")


def test_promtool_takes_the_rules(promtool: str) -> None:
    done = subprocess.run(
        [promtool, "check", "rules", MONITORING / "alerts.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def fired(
    promtool: str, directory: Path, case: dict[str, Any], file: str = "alerts.yaml"
) -> set[str]:
    """The alerts that fire in a unit test of promtool."""
    path = directory / "unit.yaml"
    content = {"rule_files": [str(MONITORING / file)], "tests": [case]}
    path.write_text(yaml.safe_dump(content))
    done = subprocess.run(
        [promtool, "test", "rules", path], capture_output=True, text=True, check=False
    )
    found = set(re.findall(r'alertname="(\w+)"', done.stdout + done.stderr))
    assert bool(found) == bool(done.returncode), done.stdout + done.stderr
    return found


@pytest.mark.parametrize("alert", sorted(FIRES))
def test_an_alert_fires_for_its_cause(promtool: str, tmp_path: Path, alert: str) -> None:
    assert fired(promtool, tmp_path, unit_test(FIRES[alert], alert)) == {alert}


def test_no_alert_fires_for_a_healthy_job(promtool: str, tmp_path: Path) -> None:
    alerts = [rule["alert"] for group in rules()["groups"] for rule in group["rules"]]
    assert sorted(alerts) == sorted(FIRES)
    assert fired(promtool, tmp_path, unit_test(HEALTHY, *alerts)) == set()


@pytest.mark.parametrize(
    ("series", "alerts"),
    [
        ({}, {"DLRoverOperatorHasNoLeader"}),
        ({"dlrover_operator_leader": "0x90"}, {"DLRoverOperatorHasNoLeader"}),
        ({"dlrover_operator_reconcile_errors_total": "0+3x90"}, {"DLRoverOperatorCannotDecide"}),
        ({"dlrover_operator_queue_depth": "40x90"}, {"DLRoverOperatorIsBehind"}),
        ({"dlrover_operator_queue_depth": "0x20 40 0x70"}, set()),
    ],
)
def test_alerts_about_the_operator_fire_for_their_causes(
    promtool: str, tmp_path: Path, series: dict[str, str], alerts: set[str]
) -> None:
    leads = {"dlrover_operator_leader": "1x90"} if series else {}
    known = [rule["alert"] for group in rules(OPERATOR)["groups"] for rule in group["rules"]]
    case = unit_test({**leads, **series}, *known)
    assert fired(promtool, tmp_path, case, OPERATOR) == alerts
