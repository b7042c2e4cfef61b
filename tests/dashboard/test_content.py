"""What the page is told of a job: its logs, its data, its checkpoints, and the list of jobs."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import msgspec
import pytest

from dlrover.dashboard import actions, content, listing, logs, page
from dlrover.dashboard.inspect import queries
from dlrover.data.machine.queue import ShardQueue
from dlrover.errors import ConfigurationError
from dlrover.master.files import read_outcome
from dlrover.roles import Job
from dlrover.roles.spec import RolesConfig
from dlrover.spec.job import JobSpec
from dlrover.spec.jobdir import FORMAT, JobDir, MasterConfig
from dlrover.spec.outcome import Cause, Outcome
from dlrover.spec.requests.shards import DataSpec, Incarnation, OpenShards, Span, TakeShards


def made(path: Path, name: str, outcome: Outcome | None = None) -> JobDir:
    job_dir = JobDir(path)
    path.mkdir(parents=True)
    job_dir.job.write_bytes(msgspec.json.encode(MasterConfig(job=JobSpec(name=name, max_nodes=4))))
    if outcome is not None:
        job_dir.outcome.write_bytes(msgspec.json.encode(outcome))
    return job_dir


def test_the_list_has_every_job_and_earlier_run_once_and_finds_roles(tmp_path: Path) -> None:
    state = tmp_path / "state"
    ended = made(state / "jobs" / "a&b", "a&b", Outcome(exit_code=1, reason="It broke."))
    role = made(state / "jobs" / "rl" / "roles" / "actor", "actor")
    several = JobDir(state / "jobs" / "rl")
    roles = Job("rl").role("actor", "json.dumps").role("judge", "json.loads")
    several.roles.write_bytes(msgspec.json.encode(RolesConfig(job=roles.spec())))
    earlier = made(several.path / "run-1", "earlier")
    named = made(tmp_path / "elsewhere", "named")
    (state / "last").symlink_to(ended.path)
    (state / "jobs" / "empty").mkdir()
    (named.job).write_text("{damaged")
    found = listing.JobList([state], [named.path])
    rows = {row["name"]: row for row in found.jobs()}
    assert rows.keys() == {"a&b", "rl", "earlier", "elsewhere"}
    assert rows["rl"]["nodes"] == "2 roles"
    assert (rows["a&b"]["phase"], rows["a&b"]["reason"], rows["a&b"]["nodes"]) == (
        "failed",
        "It broke.",
        "1:4",
    )
    assert "cannot be read" in rows["elsewhere"]["problem"]
    assert "&" not in rows["a&b"]["id"]
    for job_dir in (ended, several, earlier, named):
        job = next(row["id"] for row in found.jobs() if row["dir"] == str(job_dir.path))
        assert found.find(job).path == job_dir.path  # type: ignore[union-attr]
    pages = listing.roles_pages(several, ["actor", "judge"])
    assert list(pages) == ["actor"], "the judge has not begun"
    assert found.find(pages["actor"]).path == role.path  # type: ignore[union-attr]
    assert found.find("../../etc") is None
    several.master.write_text(f'{{"address": "127.0.0.1:1", "pid": {2**62}}}')
    every = found.jobs()
    asyncio.run(listing.ask_masters(every))
    assert {row["phase"] for row in every} == {"failed", "interrupted"}
    silent = next(row for row in every if row["name"] == "rl")
    assert silent["reason"] == "its master does not answer at 127.0.0.1:1"


def test_the_list_ends_after_the_latest_jobs_and_says_so(tmp_path: Path) -> None:
    for number in range(4):
        job_dir = made(tmp_path / "jobs" / f"job-{number}", f"job-{number}")
        os.utime(job_dir.job, (1000 + number, 1000 + number))
    short, whole = listing.JobList([tmp_path], most=3), listing.JobList([tmp_path], most=4)
    assert [row["name"] for row in short.jobs()] == ["job-3", "job-2", "job-1"]
    assert short.more
    assert len(whole.jobs()) == 4
    assert not whole.more


def test_one_damaged_directory_leaves_the_other_jobs_in_the_list(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    made(jobs / "whole", "whole")
    job_dir = made(jobs / "damaged", "damaged")
    job_dir.job.write_bytes(b'{"format": %d, "job": {"name": "\xff"}}' % FORMAT)
    job_dir.outcome.write_bytes(b'{"reason": "\xff')
    job_dir.master.write_bytes(b'{"address": "\xff"}')
    running = made(jobs / "token", "token")
    running.master.write_text(f'{{"address": "127.0.0.1:1", "pid": {os.getpid()}}}')
    running.token.write_bytes(b"\xff")
    newer = made(jobs / "newer", "newer")
    newer.job.write_text('{"format": 99, "job": {}, "of": "later"}')
    (jobs / "circle").symlink_to("circle")
    (tmp_path / "last").symlink_to("last")
    made(Path(os.fsdecode(os.fsencode(jobs) + b"/no-text-\xff")), "no text")
    found = listing.JobList([tmp_path], [jobs / "circle"])
    rows = {row["name"]: row for row in found.jobs()}
    asyncio.run(listing.ask_masters(list(rows.values())))
    assert rows.keys() == {"whole", "damaged", "token", "newer"}
    assert {row["phase"] for row in rows.values()} == {"interrupted"}
    assert "cannot be read" in rows["damaged"]["problem"]
    assert "another version of DLRover" in rows["newer"]["problem"]
    msgspec.json.encode(rows)


def test_a_checkpoint_directory_with_a_damaged_name_is_a_problem_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job_dir = made(tmp_path / "job", "job")
    job_dir.checkpoints.write_text(f"\0\0\n{tmp_path}\n")
    damaged, other = content.of_checkpoints(job_dir)
    assert "null" in damaged["problem"]
    assert "null" not in other["problem"]


def test_damaged_events_and_outcomes_are_no_crash(tmp_path: Path) -> None:
    job_dir = made(tmp_path / "job", "job")
    job_dir.events.write_bytes(b"\xff\n")
    with pytest.raises(ConfigurationError, match="damaged"):
        queries.events(job_dir)
    job_dir.outcome.write_bytes(b'{"reason": "\xff')
    assert read_outcome(job_dir.outcome) is None


def test_each_cause_has_a_colour_of_its_own() -> None:
    sheet = page.style()
    names = [
        re.search(rf"\.c-{cause.value} {{ background: var\((--\w+)\)", sheet) for cause in Cause
    ]
    colours = [re.findall(rf"{found[1]}: (#\w+)", sheet) for found in names if found is not None]
    assert len(colours) == len(Cause)
    assert all(len(of) >= 2 for of in colours), "light and dark"
    assert len({of[0] for of in colours}) == len(Cause)


def test_only_log_files_of_the_job_are_shown(tmp_path: Path) -> None:
    job_dir = JobDir(tmp_path)
    worker = job_dir.logs / "run_x" / "attempt_0" / "0"
    worker.mkdir(parents=True)
    (worker / "stdout.log").write_text("hello")
    (worker / "error.json").write_text("{}")
    job_dir.master_log.write_text("log")
    job_dir.token.write_text("secret")
    names = {file["name"] for file in logs.names(job_dir)}
    assert names == {"master.log", "logs/run_x/attempt_0/0/stdout.log"}
    for name in ("token", "../token", "logs/../token", "/etc/passwd", ""):
        assert logs.find(job_dir, name) is None


def test_a_log_is_followed_over_cut_characters_and_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    data = "x" * (logs.TAIL + 5) + "ä"
    path.write_bytes(data.encode()[:-1])

    async def follow() -> list[dict[str, object]]:
        stream = logs.tail(path)
        found = [await anext(stream)]
        with path.open("ab") as file:
            file.write("ä".encode()[1:] + b"\n")
        found.append(await anext(stream))
        path.unlink()
        path.with_suffix(".new").write_text("again")
        path.with_suffix(".new").rename(path)
        found.append(await anext(stream))
        return [msgspec.json.decode(text.removeprefix("data: ")) for text in found]

    first, second, third = asyncio.run(follow())
    assert first["cut"]
    assert set(first["text"]) == {"x"}  # type: ignore[call-overload]
    assert second == {"text": "ä\n", "fresh": False, "cut": False}
    assert third == {"text": "again", "fresh": True, "cut": False}


def test_a_datasets_progress_is_that_of_its_epoch() -> None:
    queue = ShardQueue(DataSpec(name="d", size=100, epochs=3, shard=10))
    now = Incarnation(1, 0)
    queue.handle(OpenShards(queue.spec, "w", now), 0.0)
    queue.handle(TakeShards("d", "w", now, 1, want=2), 0.0)
    queue.handle(TakeShards("d", "w", now, 2, want=1, acknowledged=(Span(0, 0, 10),)), 0.0)
    shown = content._dataset(queue)
    (epoch,) = shown["partitions"]
    assert (shown["name"], shown["workers"], shown["stream"]) == ("d", 1, False)
    assert (epoch["end"], epoch["acknowledged"], epoch["leased"]) == (100, 10, 20)


def test_checkpoint_directories_are_listed_with_their_problems(tmp_path: Path) -> None:
    job_dir = JobDir(tmp_path)
    assert content.of_checkpoints(job_dir) == []
    job_dir.checkpoints.write_text(f"{tmp_path / 'gone'}\n")
    (found,) = content.of_checkpoints(job_dir)
    assert found["path"] == str(tmp_path / "gone")
    assert found["steps"] == []
    assert found["problem"]
    job_dir.checkpoints.write_bytes(b"/half of a charact\xc3")
    assert [found["path"] for found in content.of_checkpoints(job_dir)] == [
        "/half of a charact\ufffd"
    ]


@pytest.mark.parametrize(
    "body",
    [
        b'{"action":"stop","x":1}',
        b'{"action":"rm"}',
        b"[]",
        b'{"action":"drain"}',
        b'{"action":"drain","node":-1}',
        b'{"action":"scale","nodes":18446744073709551616}',
    ],
)
def test_an_action_is_one_that_is_known(body: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=actions.Action)
