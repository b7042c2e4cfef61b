"""What a program loaded is known at its next start."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from dlrover.agent.workers.logs import RunLogs
from dlrover.agent.workers.modules import ModuleList
from dlrover.agent.workers.workers import WorkerGroup
from dlrover.spec.job import Entry, LaunchSpec


def spec(target: str) -> LaunchSpec:
    return LaunchSpec(entry=Entry.SCRIPT, target=target)


LISTED = '{"names": ["json"], "own": {}}'


def listed(directory: Path, text: str = LISTED) -> Path:
    path = directory / "modules.json"
    path.write_text(text)
    return path


def test_a_list_is_found_by_the_same_program_only(tmp_path: Path) -> None:
    launch = spec("train.py")
    modules = ModuleList(tmp_path / "cache", launch, "/bin/python", "")
    assert modules.find() == ""
    modules.keep(listed(tmp_path))
    found = Path(ModuleList(tmp_path / "cache", launch, "/bin/python", "").find())
    assert found.read_text() == LISTED
    assert found.stat().st_mode & 0o077 == 0
    others = [
        (spec("other.py"), "/bin/python", ""),
        (msgspec.structs.replace(launch, entry=Entry.MODULE), "/bin/python", ""),
        (launch, "/usr/bin/python", ""),
        (launch, "/bin/python", "/packages"),
    ]
    for other in others:
        assert ModuleList(tmp_path / "cache", *other).find() == ""


def test_a_newer_list_replaces_an_older_one_and_one_that_is_unfit_is_deleted(
    tmp_path: Path,
) -> None:
    modules = ModuleList(tmp_path / "cache", spec("train.py"), "/bin/python", "")
    modules.keep(listed(tmp_path))
    modules.keep(listed(tmp_path, '{"names": [], "own": {}}'))
    assert Path(modules.find()).read_text() == '{"names": [], "own": {}}'
    modules.forget()
    modules.forget()
    assert modules.find() == ""


@pytest.mark.parametrize("entry", [Entry.COMMAND, Entry.SCRIPT])
def test_nothing_is_kept_for_a_command_or_without_a_cache(tmp_path: Path, entry: Entry) -> None:
    launch = msgspec.structs.replace(spec("train.py"), entry=entry)
    cache = tmp_path / "cache" if entry is Entry.COMMAND else None
    modules = ModuleList(cache, launch, "/bin/python", "")
    modules.keep(listed(tmp_path))
    assert modules.find() == ""
    assert os.listdir(tmp_path) == ["modules.json"]


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    modules = ModuleList(tmp_path / "cache", spec("train.py"), "/bin/python", "")
    modules.keep(listed(tmp_path))
    assert modules.find() == ""


def test_a_spare_that_cannot_keep_the_list_starts_without_it(tmp_path: Path) -> None:
    launch = spec("train.py")
    logs = RunLogs(launch, tmp_path)
    workers = WorkerGroup(launch, {}, logs, "host")
    logs.directory.rmdir()
    workers.preload(LISTED.encode())
