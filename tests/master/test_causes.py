"""The table of causes: rows of a user's file, facts about the node, and what is done about a cause."""

import re

import pytest

from dlrover.errors import ConfigurationError
from dlrover.master.diagnosis import diagnose, is_echo, root_cause
from dlrover.master.diagnosis_rules import built_in, load, load_own
from dlrover.spec.failure import FACT_LIMIT, FACTS_LIMIT, Action, Failure, FailureKind, Origin
from dlrover.spec.rules import Rule

ROW = {
    "cause": "license_server",
    "types": ["LicenseError"],
    "text": "no license (left)",
    "origin": "infrastructure",
    "title": "got no license ({subject})",
    "advice": "Ask for more.",
    "subject": "license (\\w+)",
}


def written(path, *rows, head=""):
    """A file with ``rows``; a value of None leaves the field out."""
    text = head
    for row in rows:
        text += "[[rule]]\n"
        text += "".join(f"{k} = {toml(v)}\n" for k, v in row.items() if v is not None)
    path.write_text(text)
    return path


def toml(value):
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return str(value).lower() if isinstance(value, (bool, int)) else f"'{value}'"


def failed(kind=FailureKind.EXCEPTION, **facts):
    numbers = {"id": "1", "node_id": 3, "rank": 1, "local_rank": 1, "round": 0}
    return Failure(**(numbers | {"kind": kind} | facts))


# ---- rows of the user's


def test_the_users_rows_are_tried_first(tmp_path):
    own = load_own(str(written(tmp_path / "rules.toml", ROW)), {"license_server": 2})
    known = failed(exception="app.LicenseError", message="no license left")
    verdict = diagnose(known, own)
    assert (verdict.cause, verdict.origin) == ("license_server", Origin.INFRASTRUCTURE)
    assert verdict.title == "rank 1 got no license (left) on node 3: no license left"
    assert diagnose(known).cause == "exception"
    assert diagnose(failed(exception="LicenseError", message="expired"), own).cause == "exception"


@pytest.mark.parametrize(
    ("named", "kinds"),
    [
        ({}, {"exception", "exit", "signal"}),
        ({"types": ("LicenseError",)}, {"exception"}),
        ({"codes": (7,)}, {"exit"}),
        ({"signals": ("SIGBUS",), "types": ("OSError",)}, {"exception", "signal"}),
        ({"types": ("OSError",), "kinds": (FailureKind.SPAWN,)}, {"spawn"}),
    ],
)
def test_a_row_is_for_the_kinds_that_it_speaks_of(named, kinds):
    row = Rule(cause="x", origin=Origin.USER, title="x", advice="x", **named)
    assert {kind.value for kind in FailureKind if row.is_for(kind)} == kinds


def test_the_users_rows_decide_about_echoes_too(tmp_path):
    own = load(written(tmp_path / "rules.toml", ROW | {"echo": True}))
    first = failed(exception="LicenseError", message="no license left", time=1.0)
    second = failed(id="2", exception="ValueError", time=2.0)
    assert (is_echo(first, own), is_echo(first)) == (True, False)
    assert root_cause([first, second], own) is second
    assert root_cause([first, second]) is first


def test_without_a_file_there_are_no_rows_of_the_user():
    assert load_own("", {}) == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"origin": "network"},
            "origin = 'network'; it takes one of user code, infrastructure, un",
        ),
        (
            {"action": "reboot"},
            "action = 'reboot'; it takes one of restart, restart_fresh, relaunch",
        ),
        (
            {"kinds": ["crash"]},
            "kinds = ['crash']; it takes a list, each entry one of exception, exit",
        ),
        ({"types": "OSError"}, "types = 'OSError'; it takes a list, each entry a text"),
        ({"codes": ["x"]}, "codes = ['x']; it takes a list, each entry a whole number"),
        ({"echo": 1}, "echo = 1; it takes true or false"),
        ({"signals": ["SIGFOO"]}, "signals = ['SIGFOO']; it takes names of signals, as SIGKILL is"),
        (
            {"cause": "License server"},
            "cause = 'License server'; it takes lower-case letters, digits",
        ),
        ({"text": "("}, "text = '('; it takes a regular expression, and in this one: missing )"),
        ({"facts": "*"}, "facts = '*'; it takes a regular expression, and in this one: nothing"),
        (
            {"title": "{who} failed"},
            "title = '{who} failed'; it takes words and {error}, {code}, {",
        ),
        ({"advice": "{"}, "advice = '{'; it takes words and {error}"),
        ({"colour": "red"}, "colour = 'red'; it is not a field; the fields are cause, kinds"),
        ({"advice": None}, "has no advice; each row takes cause, origin, title, advice"),
    ],
)
def test_a_wrong_row_is_refused_in_one_sentence(tmp_path, change, said):
    path = written(tmp_path / "rules.toml", ROW, ROW | change)
    with pytest.raises(ConfigurationError, match=re.escape(said)) as caught:
        load(path)
    assert str(caught.value).startswith(f"diagnosis_rules {path}: row 2")
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("rule = 1", "holds rule; it takes rows that begin with [[rule]]"),
        ("", "holds nothing; it takes rows"),
        ("[[rules]]\ncause = 'x'", "holds rules; it takes rows"),
        ("rule = [1]", "row 1 is 1; it takes a table of fields"),
        ("[[rule", "is not valid TOML: "),
        (None, "cannot be read: No such file or directory; it takes a TOML file"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path, content, said):
    path = tmp_path / "rules.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=re.escape(said)) as caught:
        load_own(str(path), {})
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("budgets", "said"),
    [
        ({"eec": 1}, "cause_budgets names eec, which is not a cause"),
        ({"ecc": -1}, "ecc = -1: must be"),
    ],
)
def test_a_budget_must_be_for_a_cause_that_exists(budgets, said):
    with pytest.raises(ConfigurationError, match=said):
        load_own("", budgets)


def test_our_own_rows_pass_the_same_examination():
    assert len(built_in()) > 60


# ---- facts about the node


def xid(number: int) -> str:
    return f"NVRM: Xid (PCI:0000:44:00): {number}, pid=1, name=python, something"


@pytest.mark.parametrize(
    ("number", "cause", "action"),
    [
        (79, "device_lost", Action.RELAUNCH),
        (74, "nvlink", Action.RELAUNCH),
        (149, "nvlink", Action.RELAUNCH),
        (48, "ecc", Action.RELAUNCH),
        (95, "ecc", Action.RELAUNCH),
        (119, "xid_hardware", Action.RELAUNCH),
        (13, "xid_application", Action.RESTART),
        (31, "xid_application", Action.RESTART),
        (7, "launch_failure", Action.RESTART),
        (790, "launch_failure", Action.RESTART),
    ],
)
def test_an_xid_decides_by_its_number(number, cause, action):
    message = "CUDA error: unspecified launch failure"
    verdict = diagnose(
        failed(exception="AcceleratorError", message=message, node_facts=(xid(number),))
    )
    assert (verdict.cause, verdict.action) == (cause, action)
    if cause != "launch_failure":
        assert verdict.evidence == xid(number)


def test_a_fact_explains_only_what_it_can_have_caused():
    lost = (xid(79),)
    peer = failed(exception="RuntimeError", message="Connection closed by peer", node_facts=lost)
    assert (diagnose(peer).cause, is_echo(peer)) == ("device_lost", False)
    assert (
        diagnose(failed(exception="KeyError", message="'x'", node_facts=lost)).cause == "exception"
    )
    assert diagnose(failed(FailureKind.SIGNAL, signal=15, node_facts=lost)).cause == "terminated"


def test_the_kernels_word_on_an_out_of_memory_kill_counts():
    line = "Out of memory: Killed process 7 (python) total-vm:1kB"
    verdict = diagnose(failed(FailureKind.SIGNAL, signal=9, node_facts=("x", line)))
    assert (verdict.cause, verdict.action, verdict.evidence) == (
        "host_oom",
        Action.MORE_MEMORY,
        line,
    )
    assert diagnose(failed(FailureKind.SIGNAL, signal=9)).cause == "killed"


def test_a_record_holds_a_bounded_number_of_facts():
    many = failed(node_facts=tuple("y" * 1000 for _ in range(100))).bounded()
    assert len(many.node_facts) == FACTS_LIMIT
    assert {len(fact) for fact in many.node_facts} == {FACT_LIMIT}


# ---- what a verdict says beside its words


def test_a_failure_that_would_come_again_stops():
    verdict = diagnose(failed(exception="SyntaxError"))
    assert (verdict.action, verdict.hopeless, verdict.echo) == (Action.STOP, True, False)


def test_a_crash_asks_for_processes_that_loaded_nothing():
    assert diagnose(failed(FailureKind.SIGNAL, signal=11)).action is Action.RESTART_FRESH


def test_a_lost_node_is_named_by_its_number():
    lost = failed(FailureKind.NODE, message="it sent no heartbeat for 60 s", hostname="h7")
    assert diagnose(lost).title == "node 3 (h7) was lost: it sent no heartbeat for 60 s"
    assert diagnose(lost).cause == "node_lost"
