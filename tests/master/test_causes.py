"""The table of causes: rows of a user's file, facts about the node, and what is done about a cause."""

import re
import sys

import pytest

from dlrover.errors import ConfigurationError
from dlrover.master.diagnosis_rules import built_in, load, load_own, table
from dlrover.master.machine.diagnosis.diagnosis import root_cause
from dlrover.spec.failure import FACT_LIMIT, FACTS_LIMIT, Action, Failure, FailureKind, Origin, Rule
from tests.support.drivers import JobDriver


def diagnose(failure, own=()):
    return table(own).diagnose(failure)


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
    pytest.importorskip("re2")
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


def test_an_error_of_dlrover_itself_is_not_the_programs() -> None:
    error = "The master knows no data set data: it has lost its journal."
    frames = """Traceback (most recent call last):
  File "/home/me/train.py", line 12, in <module>
    for batch in data:
  File "/env/lib/python3.11/site-packages/dlrover/data/client.py", line 139, in take
    raise self._error
"""
    for kind in ("InfrastructureError", "FencedError", "ProtocolError"):
        name = f"dlrover.errors.{kind}"
        verdict = diagnose(
            failed(exception=name, message=error, traceback=f"{frames}{name}: {error}\n")
        )
        assert (verdict.origin, verdict.action) == (Origin.INFRASTRUCTURE, Action.RESTART)
    joins = frames.replace("data/client", "training/replicas/unchanged")
    late = "The program loaded x.pt; all ranks start again."
    name = "dlrover.errors.InfrastructureError"
    verdict = diagnose(failed(exception=name, message=late, traceback=f"{joins}{name}: {late}\n"))
    assert verdict.cause == "cannot_join"
    verdict = diagnose(failed(exception=name, message=late, traceback=f"{frames}{name}: {late}\n"))
    assert verdict.cause == "cannot_join"
    alone = "--survive: rank 3 has lost another rank of its row; the row starts again: x"
    rows = frames.replace("data/client", "training/replicas/rows")
    verdict = diagnose(failed(exception=name, message=alone, traceback=f"{rows}{name}: {alone}\n"))
    assert (verdict.cause, verdict.echo) == ("peer_lost", True)
    told = failed(exception="dlrover.errors.UserCodeError", message="x", traceback=frames)
    assert diagnose(told).origin is Origin.USER


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
    reports = [table(own).failed(first), table(own).failed(second)]
    assert (reports[0].verdict.echo, table().diagnose(first).echo) == (True, False)
    assert root_cause(reports).failure is second
    assert root_cause([table().failed(first), table().failed(second)]).failure is first


@pytest.mark.parametrize("kind", ["exception", "node"])
@pytest.mark.parametrize("field", ["text", "subject"])
def test_no_expression_of_the_users_holds_the_master(tmp_path, kind, field):
    """Python's own search takes for ever."""
    row = ROW | {"types": None, "kinds": [kind], "text": "", field: "(a+)+$"}
    own = load_own(str(written(tmp_path / "rules.toml", row)), {})
    long = failed(FailureKind(kind), exception="ValueError", message="a" * 5000 + "!")
    assert (diagnose(long, own).cause == "license_server") is (field == "subject")


def test_expressions_without_their_package_are_refused(tmp_path, monkeypatch):
    path = written(tmp_path / "rules.toml", ROW)
    plain = written(tmp_path / "plain.toml", ROW | {"text": None, "subject": None})
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(ConfigurationError, match=re.escape("pip install 'dlrover[rules]'")):
        load_own(str(path), {})
    assert len(load_own(str(plain), {})) == 1


def test_a_master_without_the_package_of_a_jobs_expressions_does_not_begin(monkeypatch):
    """Before, it failed at each report of a failure."""
    row = Rule(cause="x", origin=Origin.USER, title="x", advice="x", text="x")
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(ConfigurationError, match=re.escape("pip install 'dlrover[rules]'")):
        JobDriver(diagnosis_rules=(row,))


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
        ({"codes": [1, 256]}, "codes = [1, 256]; it takes exit codes, from 0 to 255"),
        ({"codes": [-9]}, "codes = [-9]; it takes exit codes, from 0 to 255"),
        ({"echo": 1}, "echo = 1; it takes true or false"),
        ({"signals": ["SIGFOO"]}, "signals = ['SIGFOO']; it takes names of signals, as SIGKILL is"),
        (
            {"cause": "License server"},
            "cause = 'License server'; it takes lower-case letters, digits",
        ),
        (
            {"text": "("},
            "text = '('; it takes a regular expression of RE2, and in this one: missing )",
        ),
        (
            {"facts": "*"},
            "facts = '*'; it takes a regular expression of RE2, and in this one: no arg",
        ),
        ({"text": "a{,3}"}, "{,3} stands for itself; a repetition is {0,3}"),
        ({"text": "(?=x)"}, "(?=x)'; it takes a regular expression of RE2, and in this one: inv"),
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
        ("# caf\xe9", "is not valid TOML: 'utf-8' codec"),
        (None, "cannot be read: No such file or directory; it takes a TOML file"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path, content, said):
    path = tmp_path / "rules.toml"
    if content is not None:
        path.write_text(content, encoding="latin-1")
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
    assert (diagnose(peer).cause, diagnose(peer).echo) == ("device_lost", False)
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


@pytest.mark.parametrize(
    "error",
    [
        "KeyError: 'throttle'",
        "AttributeError: 'Config' object has no attribute 'rdma_down'",
        "AssertionError: too many open files",
        "TypeError: f() got an unexpected keyword argument 'no_device'",
    ],
)
def test_the_words_of_a_mistake_in_the_users_own_file_do_not_matter(error):
    name, _, message = error.partition(": ")
    trace = f'Traceback (most recent call last):\n  File "/w/train.py", line 3, in f\n    g(x)\n{error}\n'
    mistake = failed(exception=name, message=message, traceback=trace)
    assert diagnose(mistake).origin is Origin.USER
    pytest.importorskip("re2")
    own = Rule(
        cause="ours", text=message.split()[-1], origin=Origin.INFRASTRUCTURE, title="", advice=""
    )
    assert diagnose(mistake, (own,)).cause == "ours"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("lines", [1600, 26_000])
def test_many_lines_of_usage_are_read_quickly(lines):
    text = "usage: x\n" * lines
    assert (
        diagnose(failed(FailureKind.EXIT, exit_code=2, stderr_tail=text)).cause == "bad_arguments"
    )
    told = diagnose(
        failed(FailureKind.EXIT, exit_code=2, stderr_tail=f"{text} [-h]\nx: error: no such file\n")
    )
    assert told.evidence == "x: error: no such file"


@pytest.mark.parametrize(
    ("text", "cause", "origin"),
    [
        ("RuntimeError: ibv_reg_mr_iova2 failed with error Cannot allocate memory", "fabric_error", Origin.INFRASTRUCTURE),
        ("UCX ERROR Please set max locked memory (ulimit -l)", "fabric_error", Origin.INFRASTRUCTURE),
        ("RuntimeError: CUDA error: invalid device ordinal", "launch_failure", Origin.UNKNOWN),
        ("RuntimeError: OS call failed or operation not supported on this OS", "launch_failure", Origin.UNKNOWN),
        ("PermissionError: [Errno 1] Operation not permitted: '/dev/nvidia0'", "driver_mismatch", Origin.INFRASTRUCTURE),
        ("ValueError: UNAVAILABLE: Error reading: CURL error", "network", Origin.INFRASTRUCTURE),
        ("OSError: Operation category READ is not supported in state standby", "network", Origin.INFRASTRUCTURE),
        ("RuntimeError: Found no NVIDIA driver on your system.", "driver_mismatch", Origin.INFRASTRUCTURE),
        ('docker: could not select device driver "".', "driver_mismatch", Origin.INFRASTRUCTURE),
        ("OSError: x is not a local folder and is not a valid model identifier", "exception", Origin.USER),
        ("run.sh: line 3: torchrunn: command not found", "command_missing", Origin.USER),
        ("In 'config': Could not find 'model/x'", "bad_arguments", Origin.USER),
    ],
)  # fmt: skip
def test_words_of_libraries_and_tools_are_known(text, cause, origin):
    name, _, message = text.partition(": ")
    if name.endswith("Error"):
        trace = f"""Traceback (most recent call last):
  File "/w/train.py", line 3, in f
    g(x)
  File "/env/lib/python3.11/site-packages/engine/core.py", line 3, in g
    h(x)
{text}
"""
        failure = failed(exception=name, message=message, traceback=trace)
    else:
        failure = failed(FailureKind.EXIT, exit_code=1, stderr_tail=text)
    verdict = diagnose(failure)
    assert (verdict.cause, verdict.origin) == (cause, origin)


ENDED = "rank 0 ended without an error"
LATE = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"
RESET = "[pair.cc:537] Read error [127.0.0.1]:28071: Connection reset by peer."


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (failed(exception="RuntimeError", message=RESET, node_facts=(ENDED,)), "peer_ended"),
        (failed(exception="RuntimeError", message=RESET), "peer_lost"),
        (failed(exception="RuntimeError", message=LATE, node_facts=(ENDED,)), "peer_ended"),
        (failed(exception="RuntimeError", message=LATE), "collective_timeout"),
        (
            failed(
                FailureKind.SIGNAL,
                signal=6,
                stderr_tail="Watchdog caught collective operation timeout",
                node_facts=(ENDED,),
            ),
            "peer_ended",
        ),
        (
            failed(exception="RuntimeError", message=RESET, node_facts=(ENDED, xid(79))),
            "device_lost",
        ),
        (failed(exception="KeyError", message="'x'", node_facts=(ENDED,)), "exception"),
        (failed(FailureKind.SIGNAL, signal=9, node_facts=(ENDED,)), "killed"),
    ],
)
def test_a_peer_that_ended_well_explains_a_lost_connection(failure: Failure, cause: str) -> None:
    assert diagnose(failure).cause == cause
