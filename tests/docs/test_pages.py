"""What the pages state about the code is what the code says, and their links lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
import pytest
import typer.main

import dlrover
from dlrover import config
from dlrover.agent.workers.environment import worker_environment
from dlrover.cli import main
from dlrover.cli.host.doctor import examine
from dlrover.cli.host.probe import collect
from dlrover.cli.run import arguments
from dlrover.errors import ExitCode
from dlrover.master.diagnosis_rules import built_in, table
from dlrover.spec import events
from dlrover.spec.failure import Action, Failure, FailureKind, Origin, Verdict
from dlrover.spec.job import Entry, LaunchSpec, Limits
from dlrover.spec.node import NodeStatus
from dlrover.spec.world import World

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("examples/**/*.md")])

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(name: str) -> str:
    return (DOCS / name).read_text()


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def code_spans(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def rows(page: str, first: str) -> list[list[str]]:
    """The cells of the table whose first column is headed ``first``."""
    table = re.search(rf"^\| {re.escape(first)} \|.*\n\| ?---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert table is not None, f"no table is headed {first}"
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table[1].splitlines()]


# ---- tables


def docs_tables() -> ModuleType:
    pytest.importorskip("prometheus_client")  # the page of metrics is written by it
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "scripts/docs_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    ["settings.md", "events.md", "job-directory.md", "goodput.md", "metrics.md", "diagnosis.md"],
)
def test_generated_tables_are_those_of_the_code(name: str) -> None:
    page = text_of(name)
    assert "<!-- table: " in page
    assert page == docs_tables().updated(page), "run python scripts/docs_tables.py"


def test_generated_tables_have_a_row_for_each_setting_and_event() -> None:
    settings, happened = text_of("settings.md"), text_of("events.md")
    for name in config.setting_names():
        assert f"\n| `{name}` |" in settings
    for kind in get_args(events.EventBody):
        assert f"\n| `{kind.__struct_config__.tag}` |" in happened


def test_exit_codes_are_those_of_the_code() -> None:
    documented = {
        name.upper().replace(" ", "_"): int(code.partition(" ")[0])
        for code, name, *_ in rows(text_of("exit-codes.md"), "Code")
    }
    assert documented == {code.name: code.value for code in ExitCode}


def test_the_doctor_page_has_each_topic_in_the_order_of_the_code(tmp_path: Path) -> None:
    found = [finding.topic for finding in examine(collect({}, tmp_path))]
    assert [topic for topic, *_ in rows(text_of("doctor.md"), "Topic")] == found


def failed(kind: FailureKind, **facts: Any) -> Verdict:
    return table().diagnose(
        Failure(id="1", kind=kind, node_id=0, rank=0, local_rank=0, round=1, **facts)
    )


def raised(error: str, message: str = "") -> Verdict:
    return failed(FailureKind.EXCEPTION, exception=error, message=message)


def killed(number: int, **facts: Any) -> Verdict:
    return failed(FailureKind.SIGNAL, signal=number, **facts)


def left_with(code: int, stderr: str = "", **facts: Any) -> Verdict:
    return failed(FailureKind.EXIT, exit_code=code, stderr_tail=stderr, **facts)


CALL = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 3, in f\n    sys.exit(7)\n'


VERDICTS = {
    "cannot be compiled": [raised("SyntaxError"), raised("ImportError"), raised("NameError")],
    "rejects its arguments": [left_with(2, "usage: train.py\ntrain.py: error: unknown\n")],
    "not found or not executable": [left_with(126), left_with(127)],
    "own files raise": [raised("ValueError"), raised("AssertionError")],
    "calls `sys.exit`": [left_with(7, exception="SystemExit", traceback=CALL)],
    "without a known cause": [raised("EngineError"), left_with(7)],
    "out of memory on the device": [raised("OutOfMemoryError", "CUDA out of memory")],
    "killed by SIGKILL": [killed(signal.SIGKILL)],
    "for want of memory": [killed(signal.SIGKILL, oom_killed=True)],
    "SIGTERM from outside": [killed(signal.SIGTERM)],
    "to a peer is lost": [
        raised("RuntimeError", "Connection reset by peer"),
        raised("DistBackendError", "the watchdog gave up"),
    ],
    "a collective times out": [killed(signal.SIGABRT, stderr_tail="Watchdog caught a timeout")],
    "the disk is full": [
        raised("OSError", "[Errno 28] No space left on device"),
        raised("OSError", "[Errno 98] Address already in use"),
    ],
    "a hardware error": [raised("RuntimeError", "uncorrectable ECC error encountered")],
    "SIGSEGV, SIGABRT": [killed(signal.SIGSEGV), killed(signal.SIGABRT)],
}
"""By words of a row of the table of verdicts: failures that it speaks of."""


def test_verdicts_are_those_of_the_code() -> None:
    found = rows(text_of("failures.md"), "What happened")
    assert len(found) == len(VERDICTS) + 1  # a lost node is no failure of a worker
    for (words, verdicts), (what, fault, restarted) in zip(VERDICTS.items(), found, strict=False):
        assert words in what
        for verdict in verdicts:
            undetermined = "yes, until it [comes back](diagnosis.md#whose-fault)"
            own = {
                Origin.USER: "`--max-restarts` times",
                Origin.INFRASTRUCTURE: "yes",
                Origin.UNKNOWN: undetermined,
            }[verdict.origin]
            if verdict.action is Action.RELAUNCH:
                own = "yes, without the node"
            hopeless = "no: it would fail in the same way"
            assert (fault, restarted) == (
                verdict.origin.value,
                hopeless if verdict.hopeless else own,
            )


# ---- names and values


@cache
def literals() -> str:
    """All texts in the source, one a line; what is filled in is an ellipsis."""
    found = [re.sub(r"\{\w+\}", "…", rule.title) for rule in built_in()]
    for path in Path(dlrover.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(_constant(part) for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"\{\w+\}", "…", node.value))
    return "\n".join(" ".join(text.split()) for text in found)


def _constant(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "…"


def messages() -> Iterator[str]:
    for part in re.split(r"^## ", text_of("troubleshooting.md"), flags=re.MULTILINE)[1:]:
        for cells in rows(part, "Message"):
            yield from re.findall(r"`([^`]+)`", cells[0])


@pytest.mark.parametrize("message", list(messages()))
def test_messages_are_those_of_the_code(message: str) -> None:
    parts = [part.strip() for part in message.split("…")]
    assert max(map(len, parts)) >= 8, "too little to be found by"
    assert [part for part in parts if part not in literals()] == []


@cache
def options() -> set[str]:
    """Every option of our commands, and of others that the pages speak of."""
    parser = arguments.build_parser({})
    found = {flag for action in parser._actions for flag in action.option_strings}
    group = typer.main.get_command(main.app)
    commands = [group, *group.commands.values()]
    commands += [verb for part in commands[1:] for verb in getattr(part, "commands", {}).values()]
    for command in commands:
        for parameter in command.params:
            found |= {*parameter.opts, *parameter.secondary_opts}
    originals = {"--conf", "--evaluator_num", "--enable_auto_scaling"}
    return {*found, *originals, "--help", "--rdzv-*"}


@pages
def test_options_in_the_text_exist(page: Path) -> None:
    spans = [s for s in code_spans(page.read_text()) if not s.startswith(("mkdocs", "pytest"))]
    named = {flag for span in spans for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)}
    if "examples" in page.parts:  # those of the example itself
        program = page.parent / "train.py"
        script = program.read_text() if program.exists() else ""
        named -= set(re.findall(r'"(--[\w-]+)"', script))
    named -= {"--shm-size"}
    assert named <= options()


@pages
def test_variables_in_the_text_exist(page: Path) -> None:
    known = {f"DLROVER_{name}" for name in config.OTHER_VARIABLES}
    known |= {f"DLROVER_{name.upper()}" for name in config.setting_names()}
    # of the tests themselves
    known |= {"DLROVER_APIEXTENSIONS_SERVER", "DLROVER_REAL_KUBELET", "DLROVER_TEST_IMAGES"}
    assert set(re.findall(r"DLROVER_[A-Z_]*[A-Z]", page.read_text())) <= known


def test_the_page_of_settings_has_every_variable_and_every_key_of_torchrun() -> None:
    page = text_of("settings.md")
    for name in config.OTHER_VARIABLES:
        assert f"| `DLROVER_{name}` |" in page
    for name in (*config.TORCH_RDZV_KEYS, *config.ALIASES):
        assert f"`{name}`" in page


@pages
def test_defaults_in_the_text_are_those_of_the_code(page: Path) -> None:
    stated = re.findall(
        r"`(\w+)`(?: restarts)?(?: \(|, )(\d+(?:\.\d+)?)\b", prose(page.read_text())
    )
    for name, value in stated:
        if name in Limits.__struct_fields__:
            assert float(value) == getattr(Limits(), name), name


@pages
def test_settings_on_a_command_line_are_accepted(page: Path) -> None:
    text = page.read_text()
    for pairs in re.findall(r"--rdzv-conf ([\w=,.]+)", text):
        config.settings({}, rdzv_conf=dict(pair.split("=") for pair in pairs.split(",")))
    for variable, value in re.findall(r"\b(DLROVER_[A-Z_]+)=(\d[\w.]*)", text):
        config.settings({variable: value})


def test_the_workers_environment_has_what_the_page_for_torchrun_names() -> None:
    page = text_of("from-torchrun.md")
    named = re.search(r"- The workers' environment: (.*?) and the\n", page, re.DOTALL)
    assert named is not None
    launch = LaunchSpec(entry=Entry.SCRIPT, target="train.py")
    world = World(
        round=1, restart_count=0, node_rank=0, node_count=1, first_rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=1,
    )  # fmt: skip
    present = worker_environment(launch, world, 0, {}, "error.json").keys()
    assert {name for name in present if not name.startswith("TORCH")} == set(code_spans(named[1]))


def test_architecture_names_the_layers_and_the_states_of_a_node() -> None:
    page = text_of("architecture.md")
    drawn = next(block for block in blocks(page, "text") if "spec" in block)
    layers = [re.split(r"\s{2,}", line)[0] for line in drawn.splitlines()]
    contracts: Any = msgspec.toml.decode((ROOT / "pyproject.toml").read_bytes())
    agreed = contracts["tool"]["importlinter"]["contracts"][0]["layers"]
    # A layer in brackets is one that may be absent.
    present = (
        " | ".join(p for p in layer.split(" | ") if not p.startswith("(")) for layer in agreed
    )
    assert layers == [layer for layer in present if layer]
    states = page[page.index("A node is *pending*") :].partition("\n\n")[0]
    assert set(re.findall(r"\*(\w+)\*", states)) == {status.value for status in NodeStatus}


def test_architecture_names_files_that_exist() -> None:
    page = text_of("architecture.md")
    trips = page[page.index("## Four trips") :].partition("## Terms")[0]
    files = [span for span in code_spans(trips) if span.endswith(".py")]
    assert len(files) > 40
    assert [file for file in files if not (ROOT / "src/dlrover" / file).is_file()] == []


# ---- snippets


@pages
def test_snippets_are_valid(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    for block in blocks(text, "toml"):
        (tmp_path / "file.toml").write_text(block)
        config.settings({}, str(tmp_path / "file.toml"))
    for block in blocks(text, "json"):
        json.loads(block)
    for block in blocks(text, "python"):
        compile(block, page.name, "exec")


def test_the_event_in_the_page_of_events_can_be_read() -> None:
    (line,) = blocks(text_of("events.md"), "json")
    event = msgspec.json.decode(line, type=events.Event)
    assert msgspec.json.decode(msgspec.json.encode(event)) == json.loads(line)


# ---- links


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text()), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        assert not anchor or anchor in anchors(file), link


@pytest.mark.parametrize("page", [*PAGES, *sorted(DOCS.glob("zh/*.md"))], ids=str)
def test_no_page_installs_the_originals_package(page: Path) -> None:
    """A package index has a ``dlrover`` of the original's; pages install a checkout or wheels."""
    installs = re.findall(r"pip install [^`\n]*", page.read_text())
    named = [each for each in installs if re.search(r"(?<![\w/.])dlrover\b", each)]
    assert [each for each in named if "--no-index" not in each] == []
