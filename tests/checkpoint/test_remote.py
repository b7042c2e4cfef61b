"""Checkpoints at URLs: a real S3 server, its failures, and what other tools read."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from dlrover.checkpoint import Checkpointer, KeepBest
from dlrover.checkpoint.saver import protocol
from dlrover.checkpoint.storage import storage
from dlrover.checkpoint.storage.ranges import GAP, _neighbours
from dlrover.checkpoint.storage.stored_step import read_manifest
from dlrover.checkpoint.storage.stores import BAD, ByteRange, StorageAwayError, open_store
from dlrover.checkpoint.tools import tools
from dlrover.checkpoint.tools.convert import convert
from dlrover.checkpoint.tools.sources import FsspecReader
from dlrover.cli.ckpt import app
from dlrover.errors import ConfigurationError, InfrastructureError
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(90)]
if not importlib.util.find_spec("moto") or not importlib.util.find_spec("s3fs"):
    pytest.skip("moto and s3fs are not installed", allow_module_level=True)

BUCKET = f"bucket-{os.getpid()}"
"""Processes that run these tests at a time must not end one another's savers."""
DYING_SAVER = """
import os, signal, sys
from dlrover.checkpoint.saver import saver
from dlrover.checkpoint.storage import faults
label, budget = sys.argv[1], [int(sys.argv[2])]
def die(passed):
    if passed == label:
        if not budget[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        budget[0] -= 1
faults.hook = die
sys.argv[0] = "dlrover.checkpoint.saver.saver"
saver.main(sys.argv[3:])
"""
HASTY_SAVER = """
import sys
from dlrover.checkpoint.saver import saver
from dlrover.checkpoint.storage import persist
persist.RETRY_DELAYS = tuple(map(float, sys.argv[1].split(",")))
sys.argv[0] = "dlrover.checkpoint.saver.saver"
saver.main(sys.argv[2:])
"""


@pytest.fixture
def url(s3) -> Iterator[str]:
    yield f"s3://{BUCKET}/run"
    for process in savers():
        process.kill()


def savers() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "--identity" in words and any(f"{BUCKET}/run" in word for word in words):
                found.append(process)
    return found


def end_savers() -> None:
    for process in savers():
        process.kill()
    until(lambda: not savers(), 20, "the saver's end")


def start_saver(url: str, program: str, *words: str, keep: int = 3) -> None:
    identity = storage.identity(open_store(url))
    subprocess.run(
        [sys.executable, "-c", program, *words, "--directory", url,
         "--identity", identity, "--keep", str(keep), "--linger", "5"],
        check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def filled(step: int, size: int = 1000) -> dict:
    return {"w": torch.full((size,), float(step)), "b": torch.ones(3), "step": step}


def store_steps(url: str, *steps: int, keep: int = 3) -> None:
    checkpointer = Checkpointer(url, linger=0.0, keep=keep)
    for step in steps:
        checkpointer.save(step, filled(step), to="storage")
        checkpointer.wait()
    checkpointer.close()
    until(lambda: not savers(), 20, "the saver's end")


def load(url: str, step: int | None = None):
    state = filled(0)
    checkpointer = Checkpointer(url, linger=0.0)
    try:
        return checkpointer.load(state, step), state
    finally:
        checkpointer.close()


def objects(url: str) -> set[str]:
    return set(open_store(url).files(""))


# ---- what is stored


def test_a_step_comes_back_from_s3_and_from_memory(url):
    checkpointer = Checkpointer(url + "/", linger=5.0)
    assert checkpointer.load(filled(0)) is None
    checkpointer.save(1, filled(1), to="storage")
    checkpointer.wait()
    checkpointer.save(2, filled(2))
    checkpointer.close()
    record, state = load(url)
    assert (record.source, record.step, state["step"]) == ("memory", 2, 2)
    end_savers()
    record, state = load(url)
    assert (record.source, record.step, state["step"]) == ("storage", 1, 1)
    assert torch.equal(state["w"], filled(1)["w"])


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_torch_reads_a_step_at_a_url(url, tmp_path, kind):
    where = url if kind == "s3" else f"file://{tmp_path}/{BUCKET}/run"
    if kind == "file":
        (tmp_path / BUCKET).mkdir()
    store_steps(where, 7)
    state = filled(0)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=FsspecReader(f"{where}/step-7"), no_dist=True)
    assert state["step"] == 7
    assert torch.equal(state["w"], filled(7)["w"])
    if kind == "file":
        assert load(tmp_path / BUCKET / "run")[0].step == 7, "it is a directory, too"


def test_only_what_is_asked_for_is_read(url, monkeypatch):
    checkpointer = Checkpointer(url, linger=0.0)
    checkpointer.save(1, {"big": torch.ones(1 << 20), "small": torch.ones(5)}, to="storage")
    checkpointer.wait()
    checkpointer.close()
    until(lambda: not savers(), 20, "the saver's end")
    checkpointer = Checkpointer(url, linger=0.0)
    asked: list[int] = []
    read = checkpointer._store.read_range

    def noted(wanted: ByteRange) -> bytes:
        asked.append(wanted.nbytes)
        return read(wanted)

    monkeypatch.setattr(checkpointer._store, "read_range", noted)
    _, state = checkpointer.read(["small"])
    checkpointer.close()
    assert torch.equal(state["small"], torch.ones(5))
    assert asked == [20]


def test_large_tensors_are_read_by_several_requests(url, monkeypatch):
    monkeypatch.setattr("dlrover.checkpoint.storage.ranges.REQUEST", 1000)
    store_steps(url, 3)
    record, state = load(url)
    assert record.step == 3
    assert torch.equal(state["w"], filled(3)["w"])


def test_neighbours_are_read_together_and_distant_ranges_are_not():
    near, far = ByteRange("a", 100, 10), ByteRange("a", 110 + GAP + 1, 1)
    ranges = sorted([ByteRange("b", 0, 5), far, near, ByteRange("a", 0, 90)])
    assert _neighbours(ranges) == [[ByteRange("a", 0, 90), near], [far], [ByteRange("b", 0, 5)]]


def test_old_steps_are_deleted_and_a_step_can_be_stored_twice(url):
    store_steps(url, 1, 2, 3, 3, keep=2)
    assert storage.steps(open_store(url)) == [3, 2]
    assert not any(name.startswith("step-1/") for name in objects(url))
    place = read_manifest(open_store(url), "step-3").place
    assert place.endswith("-4"), "the first one counted until the second one was whole"
    record, state = load(url)
    assert (record.step, state["step"]) == (3, 3)
    store_steps(url, 4)
    folders = {name.split("/")[1] for name in objects(url) if name.startswith("step-3/")}
    assert len(folders) == 3, "manifest, metadata, and one folder"


def test_an_older_step_is_loaded_when_it_is_named(url):
    store_steps(url, 1, 2)
    record, state = load(url, step=1)
    assert (record.step, state["step"]) == (1, 1)
    with pytest.raises(ConfigurationError, match=r"step is 5, which is not stored .* is: 2, 1\."):
        load(url, step=5)


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.timeout(180)
def test_two_nodes_store_shards_and_others_load_them(url):
    """The two names of the protocol stand for two nodes: each has a saver of its own."""
    script = str(Path(__file__).parent / "scripts" / "sharded.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(verb: str, layout: str, ranks: int) -> str:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        nodes = [url, url.replace("s3:", "s3a:")]
        ended = subprocess.run(
            [sys.executable, *launcher, script, verb, layout, "storage", *nodes],
            env=env, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    run("save", "fsdp2", 4)
    end_savers()
    assert "equal on 2 ranks" in run("load", "tp", 2)


# ---- what goes wrong


@pytest.mark.parametrize(
    ("label", "step"),
    [
        pytest.param("persist.begun", 1, marks=pytest.mark.heavy),
        ("persist.written", 1),
        pytest.param("persist.manifest", 1, marks=pytest.mark.heavy),
        ("persist.renamed", 2),
        pytest.param("prune.begun", 2, marks=pytest.mark.heavy),
    ],
)
def test_a_saver_that_is_killed_while_it_stores_leaves_the_step_before(url, label, step, caplog):
    budget = 0 if label == "prune.begun" else 1
    start_saver(url, DYING_SAVER, label, str(budget), keep=1)
    checkpointer = Checkpointer(url, keep=1, linger=5.0)
    for number in (1, 2):
        checkpointer.save(number, filled(number), to="storage")
        if "It is started again" in caplog.text:
            step = 2  # it died before it had answered, so that another one was given the step
        with contextlib.suppress(InfrastructureError):
            checkpointer.wait()
    checkpointer.close()
    end_savers()
    record, state = load(url)
    assert (record.source, record.step, state["step"]) == ("storage", step, step)
    until(lambda: not savers(), 20, "the saver's end")
    store_steps(url, 9, keep=1)
    left = {name.split("/")[0] for name in objects(url)}
    assert left == {"checkpoint-id", "latest", "lease", "lease.worlds", "saved", "step-9"}, (
        "nothing half done is left"
    )


def test_a_server_that_is_away_for_a_while_stops_nobody(url, s3, tmp_path):
    start_saver(url, HASTY_SAVER, "1.0,2.0,4.0")
    checkpointer = Checkpointer(url, linger=5.0)
    checkpointer.save(1, filled(1), to="storage")
    checkpointer.wait()
    with s3.away():
        for step in (2, 3):
            began = time.monotonic()
            checkpointer.save(step, filled(step), to="storage" if step == 2 else "memory")
            assert time.monotonic() - began < 20.0
        log = tmp_path / protocol.log_file(url).name
        while "Retrying in" not in log.read_text():
            time.sleep(0.05)
    checkpointer.wait()
    checkpointer.close()
    assert storage.steps(open_store(url)) == [2, 1]


def test_a_server_that_stays_away_is_reported(url, s3):
    start_saver(url, HASTY_SAVER, "0.01,0.01,0.01")
    checkpointer = Checkpointer(url, linger=5.0)
    checkpointer.save(1, filled(1), to="storage")
    checkpointer.wait()
    checkpointer.save(2, filled(2))
    with s3.away():
        checkpointer.save(3, filled(3), to="storage")
        with pytest.raises(
            InfrastructureError, match=f"Step 3 was not stored in s3://{BUCKET}/run"
        ):
            checkpointer.wait()
        with pytest.raises(InfrastructureError, match="latest cannot be read"):
            checkpointer.load(filled(0))  # what is stored may be newer than memory
    assert checkpointer.load(filled(0)).source == "memory"
    checkpointer.close()
    end_savers()
    checkpointer = Checkpointer(url, linger=0.0)
    with (
        s3.away(),
        pytest.raises(InfrastructureError, match="cannot be read: Could not connect"),
    ):
        checkpointer.load(filled(0))
    checkpointer.close()
    assert load(url)[0].step == 1, "it was not taken for damaged"


def while_away(s3, store, name: str) -> None:
    """From now on the server is away whenever this file is read."""
    read = store.read

    def away(file: str) -> bytes:
        if file == name:
            with s3.away():
                return read(file)
        return read(file)

    store.read = away


def test_a_step_that_cannot_be_reached_is_neither_damaged_nor_passed_over(url, s3):
    store_steps(url, 1, 2)
    checkpointer = Checkpointer(url, linger=0.0)
    while_away(s3, checkpointer._store, "step-2/manifest.json")
    with pytest.raises(InfrastructureError, match=r"cannot be read: .*step-2/manifest.json"):
        checkpointer.load(filled(0))
    checkpointer.close()
    assert load(url)[0].step == 2


def test_the_best_step_is_not_deleted_because_its_metrics_cannot_be_read(url, s3):
    checkpointer = Checkpointer(url, linger=0.0)
    for step, loss in ((1, 0.1), (2, 0.5), (3, 0.7)):
        checkpointer.save(step, filled(step), to="storage", metrics={"loss": loss})
    checkpointer.wait()
    checkpointer.close()
    store = open_store(url)
    while_away(s3, store, "step-1/manifest.json")
    with pytest.raises(StorageAwayError):
        storage.prune(store, KeepBest(1, "loss"))
    assert storage.steps(open_store(url)) == [3, 2, 1]


def test_a_damaged_object_costs_its_step(url):
    store_steps(url, 1, 2)
    store = open_store(url)
    (name,) = (name for name in store.files("step-2") if name.endswith("__0_0.distcp"))
    data = bytearray(store.read(f"step-2/{name}"))
    data[data.index(filled(2)["w"].numpy().tobytes()) + 100] ^= 1
    store.write(f"step-2/{name}", bytes(data))
    state = filled(0)
    checkpointer = Checkpointer(url, linger=0.0)
    assert (checkpointer.load(state).step, state["step"]) == (1, 1)
    assert f"step-2/{BAD}" not in objects(url), "it was only read"
    checkpointer.save(3, state)
    checkpointer.close()
    assert f"step-2/{BAD}" in objects(url)
    assert [(item.step, item.state) for item in tools.listing(url)] == [(2, "bad"), (1, "complete")]


def test_what_is_in_memory_is_stored_when_a_worker_dies(url, forks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, torch; from dlrover.checkpoint import Checkpointer\n"
        "c = Checkpointer(sys.argv[1], linger=1.0, save_at_breakpoint=True)\n"
        "c.save(5, {'w': torch.full((1000,), 5.0), 'b': torch.ones(3), 'step': 5})\n"
        "os._exit(1)\n"
    )
    assert forks.start(program, url).wait(60) == 1
    until(lambda: not savers(), 20, "the saver's end")
    record, state = load(url)
    assert (record.source, record.step, state["step"]) == ("storage", 5, 5)
    assert not any(name.startswith(".breakpoint") for name in objects(url))


# ---- tools


def test_tools_work_on_a_url(url, tmp_path):
    store_steps(url, 1, 2, 3)

    def ckpt(*words: str) -> str:
        ended = CliRunner().invoke(app, words)
        assert ended.exit_code == 0, ended.output
        return ended.output

    assert ckpt("list", url).count("complete") == 3
    assert "w       float32  [1000]" in ckpt("show", url, "--step", "2")
    assert ckpt("verify", url, "--step", "all").count("is whole: 5 files") == 3
    assert "Deleted step 1" in ckpt("prune", url, "--keep", "2")
    file, copy = str(tmp_path / "x.pt"), url + "-copy"
    ckpt("convert", url, file, "--to", "torch", "--step", "2")
    assert torch.equal(torch.load(file, weights_only=True)["w"], filled(2)["w"])
    ckpt("convert", file, copy, "--to", "flash")
    assert tools.verify(copy, 2).whole
    ckpt("convert", copy, url + "-dcp", "--to", "dcp")
    ckpt("convert", url + "-dcp", str(tmp_path / "y.pt"), "--to", "torch", "--trusted")
    assert torch.load(tmp_path / "y.pt", weights_only=True)["step"] == 2
    with pytest.raises(ConfigurationError, match=f"s3://{BUCKET}/run-copy exists already"):
        convert(file, copy, "flash")
