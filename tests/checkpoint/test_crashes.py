"""Processes that die and bits that flip: what is loaded is the newest whole step, or an error."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.saver.memory import Generation
from dlrover.checkpoint.storage import faults, storage
from dlrover.checkpoint.storage.formats import FORMAT
from dlrover.checkpoint.storage.stores import open_store
from dlrover.errors import ConfigurationError, InfrastructureError
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(90)]

SAVES = """
import os, signal, sys
import torch
from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.storage import faults
from pathlib import Path
directory, label = Path(sys.argv[1]), sys.argv[2]
checkpointer = Checkpointer(directory, linger=5.0)
state = {"w": torch.full((1000,), 1.0), "step": 1}
checkpointer.save(1, state)
state["w"].fill_(2.0); state["step"] = 2
checkpointer.save(2, state, to="storage")
checkpointer.wait()
state["w"].fill_(3.0); state["step"] = 3
def die(passed):
    if passed == label:
        os.kill(os.getpid(), signal.SIGKILL)
faults.hook = die
checkpointer.save(3, state)
"""
FAULTY_SAVER = """
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

LITTLE_MEMORY = """
import contextlib, os, sys
from dlrover.checkpoint.saver import ranks, saver
limit = int(sys.argv[1])
def available():
    held = 0
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "dlrover-checkpoint" in os.readlink(entry.path):
                held += os.stat(entry.path).st_blocks * 512
    return limit - held
ranks.available_memory = available
sys.argv[0] = "dlrover.checkpoint.saver.saver"
saver.main(sys.argv[2:])
"""


def fresh() -> dict:
    return {"w": torch.zeros(1000), "step": 0}


def filled(step: int) -> dict:
    return {"w": torch.full((1000,), float(step)), "step": step}


def load(directory: Path, state: dict | None = None, linger: float = 5.0):
    """What a new process would get: the record, and the state."""
    state = fresh() if state is None else state
    checkpointer = Checkpointer(directory, linger=linger)
    try:
        return checkpointer.load(state), state
    finally:
        checkpointer.close()


def assert_step(state: dict, step: int) -> None:
    assert state["step"] == step
    assert torch.equal(state["w"], torch.full((1000,), float(step)))


def end_saver(directory: Path) -> None:
    for process in directory.savers():
        process.kill()
    directory.until_no_saver()


def start_faulty_saver(directory: Path, label: str, budget: int = 0) -> None:
    start_saver(directory, FAULTY_SAVER, label, str(budget))


def start_saver(directory: Path, program: str, *words: str) -> None:
    identity = storage.identity(open_store(directory))
    subprocess.run(
        [sys.executable, "-c", program, *words, "--directory", str(directory),
         "--identity", identity, "--keep", "2", "--linger", "5"],
        check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("label", "step"), [("save.begun", 2), ("save.copied", 2), ("save.committed", 3)]
)
def test_a_worker_that_dies_in_a_save_leaves_the_last_whole_step(
    directory, forks, tmp_path, label, step
):
    (tmp_path / "saves.py").write_text(SAVES)
    assert forks.start(tmp_path / "saves.py", directory, label).wait(60) == -signal.SIGKILL
    record, state = load(directory, linger=0.0)
    assert (record.source, record.step) == ("memory", step)
    assert_step(state, step)


@pytest.mark.parametrize(
    ("label", "step"),
    [
        ("persist.begun", 1),
        ("persist.written", 1),
        ("persist.manifest", 1),
        ("persist.renamed", 2),
        ("persist.tracked", 2),
    ],
)
def test_a_saver_that_dies_while_it_persists_leaves_a_whole_step(directory, label, step, caplog):
    start_faulty_saver(directory, label, budget=1)
    checkpointer = Checkpointer(directory, linger=5.0)
    checkpointer.save(1, filled(1), to="storage")
    checkpointer.wait()
    checkpointer.save(2, filled(2), to="storage")
    if "started again" in caplog.text:
        step = 2  # the saver died before it had answered: the step was saved once more, with the next saver
        checkpointer.wait()
    elif step == 1:
        with pytest.raises(InfrastructureError, match="Step 2 was not stored: the saver ended"):
            checkpointer.wait()
    else:
        checkpointer.wait()
    checkpointer.save(3, filled(3))
    record, state = load_again(checkpointer)
    assert (record.source, record.step) == ("memory", 3), "training goes on with a new saver"
    checkpointer.close()
    end_saver(directory)
    record, state = load(directory)
    assert (record.source, record.step) == ("storage", step)
    assert_step(state, step)


def load_again(checkpointer: Checkpointer):
    state = fresh()
    return checkpointer.load(state), state


def test_a_saver_that_dies_between_saves_is_started_again(directory):
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, filled(1))
    end_saver(directory)
    checkpointer.save(2, filled(2), to="storage")
    checkpointer.wait()
    checkpointer.close()
    end_saver(directory)
    assert_step(load(directory)[1], 2)


def test_a_saver_that_ends_takes_no_step_along_that_it_has_stored_and_pruned(directory):
    checkpointer = Checkpointer(directory, keep=1)
    for step in (1, 2, 3):
        checkpointer.save(step, filled(step), to="storage")
        until(lambda step=step: storage.steps(open_store(directory)) == [step])
    end_saver(directory)
    checkpointer.save(4, filled(4))
    checkpointer.wait()
    checkpointer.close()


def test_a_saver_that_was_stopped_goes_on_for_the_next_worker(directory):
    saved = {"w": torch.full((1000,), 5.0)}
    checkpointer = Checkpointer(directory, linger=60.0)
    checkpointer.save(5, saved)
    checkpointer.close()
    for process in directory.savers():
        process.suspend()
    checkpointer = Checkpointer(directory, linger=0.0)
    state = {"w": torch.zeros(1000)}
    assert checkpointer.load(state).source == "memory"
    assert torch.equal(state["w"], saved["w"])
    checkpointer.close()


def test_storage_then_memory_at_once_loses_nothing(directory):
    checkpointer = Checkpointer(directory, keep=10)
    for step in range(1, 31):
        checkpointer.save(step, filled(step), to="storage" if step % 10 == 0 else "memory")
    checkpointer.wait()
    assert storage.steps(open_store(directory)) == [30, 20, 10]
    checkpointer.close()
    for step in (10, 20, 30):
        read = fresh()
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(read, checkpoint_id=directory / f"step-{step}", no_dist=True)
        assert_step(read, step)


def test_only_the_newest_are_kept_by_a_saver_without_torch(directory):
    checkpointer = Checkpointer(directory, keep=2)
    for step in range(1, 5):
        checkpointer.save(step, filled(step), to="storage")
        checkpointer.wait()
    (saver,) = directory.savers()
    assert not [file for file in saver.memory_maps() if "libtorch" in file.path]  # no import of it
    checkpointer.close()
    assert storage.steps(open_store(directory)) == [4, 3]
    assert storage.tracked(open_store(directory)).step == 4


def flip_memory(directory: Path, step: int) -> None:
    """Flip one bit of a step in the saver's memory."""
    (process,) = directory.savers()
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        if not entry.is_symlink():  # closed since it was listed
            continue
        if f"dlrover-checkpoint-{FORMAT}-0" in os.readlink(entry):
            fd = os.open(entry, os.O_RDWR)
            generation = Generation(fd)
            os.close(fd)
            header = generation.header()
            if header is not None and header.save.step == step:
                assert_summed(generation, header)
                generation.data[5] ^= 16
                return  # each generation has two descriptors
    raise AssertionError(f"step {step} is not in memory")


def assert_summed(generation, header) -> None:
    end = time.monotonic() + 10
    while generation.sums(header) is None:
        assert time.monotonic() < end, "no checksums"


def test_damaged_memory_is_found_and_the_older_step_taken(directory):
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, filled(1))
    checkpointer.save(2, filled(2))
    flip_memory(directory, 2)
    record, state = load_again(checkpointer)
    assert (record.source, record.step) == ("memory", 1)
    assert_step(state, 1)
    flip_memory(directory, 1)
    with pytest.raises(InfrastructureError, match="in memory is damaged"):
        load_again(checkpointer)
    checkpointer.close()


def two_stored(directory: Path) -> None:
    checkpointer = Checkpointer(directory, linger=0.0)
    for step in (1, 2):
        checkpointer.save(step, filled(step), to="storage")
    checkpointer.wait()
    checkpointer.close()
    directory.until_no_saver()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped data": lambda step: flip(step / "__0_0.distcp"),
    "truncated data": lambda step: os.truncate(step / "__0_0.distcp", 2000),
    "missing data": lambda step: (step / "__0_0.distcp").unlink(),
    "flipped index": lambda step: flip(step / "rank-0.index"),
    "missing index": lambda step: (step / "rank-0.index").unlink(),
    "manifest that is no JSON": lambda step: (step / "manifest.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_storage_is_put_aside_and_the_older_step_taken(directory, damage):
    two_stored(directory)
    DAMAGES[damage](directory / "step-2")
    record, state = load(directory, linger=0.0)
    assert (record.source, record.step) == ("storage", 1)
    assert_step(state, 1)
    assert (directory / "step-2").is_dir(), "it was only read"
    directory.until_no_saver()
    DAMAGES[damage](directory / "step-1")
    for _ in range(2):
        with pytest.raises(InfrastructureError, match=r"can be loaded \(step 2 was stored\)"):
            load(directory, linger=0.0)


def test_nothing_saved_is_a_fresh_start(directory):
    record, state = load(directory)
    assert record is None
    assert_step(state, 0)


def test_a_state_that_does_not_fit_is_an_error_and_nothing_is_put_aside(directory):
    two_stored(directory)
    with pytest.raises(ConfigurationError, match="the checkpoint has not: extra"):
        load(directory, {**fresh(), "extra": 1})
    assert storage.steps(open_store(directory)) == [2, 1]


def test_a_directory_that_was_removed_does_not_come_back_from_memory(directory):
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, filled(1))
    checkpointer.close()
    for entry in directory.iterdir():
        entry.unlink(missing_ok=True)  # the saver may replace one just now
    assert load(directory)[0] is None


def test_storage_that_fails_is_reported_and_does_not_stop_training(directory):
    checkpointer = Checkpointer(directory)
    checkpointer.load(fresh())
    (directory / "step-1").write_text("in the way")
    (directory / f".step-1.{checkpointer._joined.session:016x}-1").write_text("in the way")
    checkpointer.save(1, filled(1), to="storage")
    for step in range(2, 6):
        checkpointer.save(step, filled(step), to="storage" if step == 3 else "memory")
    with pytest.raises(InfrastructureError, match="Step 1 was not stored in"):
        checkpointer.wait()
    assert storage.steps(open_store(directory)) == [3]
    checkpointer.close()


def test_states_that_grow_and_shrink_and_nothing_is_left(directory):
    before, threads = fds(), threading.active_count()
    checkpointer = Checkpointer(directory, linger=0.0)
    for step in range(1, 12):
        state = {str(i): torch.full((1 + step % 4, 9000), float(step)) for i in range(step)}
        checkpointer.save(step, state)
        got = {key: torch.zeros_like(value) for key, value in state.items()}
        assert checkpointer.load(got).step == step
        assert all(torch.equal(got[key], state[key]) for key in state)
    checkpointer.close()
    directory.until_no_saver()
    assert fds() == before
    assert threading.active_count() <= threads


def fds() -> list[str]:
    """Each descriptor counts: other tests may have left one of the same name."""
    gc.collect()  # what those have left may go at any moment
    names = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sorted(name for name in names if "memfd" in name or "socket" in name)


def test_bad_arguments_are_refused(directory):
    for keywords, words in [({"keep": 0}, "keep is 0"), ({"linger": -1.0}, "linger is -1")]:
        with pytest.raises(ConfigurationError, match=words):
            Checkpointer(directory, **keywords)
    for path in ("", None):
        with pytest.raises(
            ConfigurationError, match=r"path is .*; it must name a directory or a URL"
        ):
            Checkpointer(path)
    with pytest.raises(ConfigurationError, match=r"path is .*; its bytes must be UTF-8"):
        Checkpointer(os.fsdecode(b"caf\xe9"))
    checkpointer = Checkpointer(directory, linger=0.0)
    with pytest.raises(ConfigurationError, match="to is 'disk'"):
        checkpointer.save(1, fresh(), to="disk")
    with pytest.raises(ConfigurationError, match="step is -1"):
        checkpointer.save(-1, fresh())
    checkpointer.save(4, fresh(), to="memory")
    for step in (5.0, "6", None, torch.tensor([7, 8]), 2**63, 2**64):
        with pytest.raises(ConfigurationError, match="must be a whole number"):
            checkpointer.save(step, fresh())
    assert checkpointer.load(fresh()).step == 4, "a refused save costs no step in memory"
    checkpointer.close()


def test_a_step_may_be_a_number_of_numpy_or_of_a_tensor(directory):
    with contextlib.closing(Checkpointer(directory, linger=0.0)) as checkpointer:
        for step in (np.int64(3), torch.tensor(4)):
            checkpointer.save(step, fresh(), to="storage")
            assert checkpointer.load(fresh()).step == int(step)


def test_faults_are_off():
    assert faults.hook is None


def test_a_saver_that_dies_while_it_prunes_leaves_the_new_step(directory):
    start_faulty_saver(directory, "prune.begun")
    checkpointer = Checkpointer(directory, keep=2)
    for step in (1, 2, 3):
        checkpointer.save(step, filled(step), to="storage")
        checkpointer.wait()
    checkpointer.close()
    end_saver(directory)
    record, state = load(directory)
    assert (record.source, record.step) == ("storage", 3)
    assert_step(state, 3)


def test_with_memory_for_one_generation_one_is_kept(directory, caplog):
    start_saver(directory, LITTLE_MEMORY, str(300 << 10))
    checkpointer = Checkpointer(directory, linger=0.0)
    large = {"w": torch.zeros(50_000), "step": 0}
    for step in range(1, 4):
        large["w"].fill_(step)
        large["step"] = step
        checkpointer.save(step, large, to="storage" if step == 2 else "memory")
    assert "one generation only" in caplog.text
    checkpointer.wait()
    assert storage.steps(open_store(directory)) == [2]
    found = {"w": torch.zeros(50_000), "step": 0}
    assert checkpointer.load(found).source == "memory"
    assert found["step"] == 3
    assert torch.equal(found["w"], large["w"])
    checkpointer.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_without_memory_for_a_generation_only_steps_for_storage_are_saved(
    directory, caplog, overlap, monkeypatch
):
    start_saver(directory, LITTLE_MEMORY, "1000")
    checkpointer = Checkpointer(directory, linger=0.0, overlap=overlap)
    state = {"w": torch.zeros(50_000).to(torch.bfloat16), "none": torch.empty(0), "step": 0}
    state["tied"] = state["w"]
    for step in range(1, 4):
        state["w"].fill_(step)
        state["step"] = step
        checkpointer.save(step, state, to="storage" if step == 2 else "memory")
        assert storage.steps(open_store(directory)) == ([2] if step > 1 else [])
    assert caplog.text.count("MiB more for 1 generation; 0 MiB are available") == 1
    checkpointer.wait()
    record = checkpointer.load(state)
    assert (record.source, record.step, state["step"]) == ("storage", 2, 2)
    assert torch.equal(state["w"], torch.full((50_000,), 2.0, dtype=torch.bfloat16))
    monkeypatch.setattr("dlrover.checkpoint.storage.persist.RETRY_DELAYS", (0.01,))
    (directory / "checkpoint-id").rename(directory / "gone")
    checkpointer.save(4, state, to="storage")
    with pytest.raises(InfrastructureError, match=r"Step 4 was not stored in .*not the directory"):
        checkpointer.wait()
    checkpointer.close()


def test_a_state_that_has_outgrown_memory_comes_from_storage(directory):
    start_saver(directory, LITTLE_MEMORY, str(300 << 10))
    checkpointer = Checkpointer(directory, linger=0.0)
    checkpointer.save(1, filled(1))
    assert checkpointer.load(filled(0)).source == "memory"
    for step in (2, 3, 4):
        checkpointer.save(step, {"w": torch.full((500_000,), float(step))}, to="storage")
    state = {"w": torch.zeros(500_000)}
    record = checkpointer.load(state)
    assert (record.source, record.step) == ("storage", 4)
    assert torch.equal(state["w"], torch.full((500_000,), 4.0))
    assert storage.steps(open_store(directory)) == [4, 3, 2]
    checkpointer.close()
