"""Disks that are full, read-only, limited, broken or gone: training goes on, and `wait` says what is missing."""

import json
import mmap
import os
import re
import resource
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.storage import dcp, storage
from dlrover.checkpoint.storage.stores import open_store
from dlrover.errors import InfrastructureError

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(90)]

MIB = 1 << 20
SAVER = """
import errno, os, sys
from dlrover.checkpoint.saver import saver
from dlrover.checkpoint.storage import faults, persist
flag, label = sys.argv[1:3]
def fail(passed):
    if passed == label and os.path.exists(flag):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
faults.hook = fail
persist.RETRY_DELAYS = (0.02, 0.05, 0.1)
sys.argv[0] = "dlrover.checkpoint.saver.saver"
saver.main(sys.argv[3:])
"""


def unfinished(directory: Path, step: int, session: int) -> Path:
    return directory / f".step-{step}.{session:016x}-{step}"


def start_saver(directory: Path, flag: Path = Path("/nowhere"), label: str = "") -> psutil.Process:
    """A saver that is quick to give up; it meets EIO at ``label`` while the file ``flag`` is there."""
    identity = storage.identity(open_store(directory))
    subprocess.run(
        [sys.executable, "-c", SAVER, str(flag), label, "--directory", str(directory),
         "--identity", identity, "--keep", "3", "--linger", "5"],
        check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    (process,) = directory.savers()
    return process


def filled(step: int, nbytes: int = 40000) -> dict:
    return {"w": torch.full((nbytes // 4,), float(step)), "step": step}


def make_read_only(path: Path) -> None:
    """As a disk becomes after an error; the saver's log, which is open, can still be written."""
    subprocess.run(["mount", "--bind", str(path), str(path)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(path)], check=True)


def unmount(path: Path) -> None:
    subprocess.run(["umount", "-l", str(path)], check=True)


def moved_disk(disk: Path) -> Path:
    return disk.with_name("elsewhere")


@pytest.fixture
def disk(directory) -> Iterator[Path]:
    """A checkpoint directory on a disk of 4 MiB."""
    directory.mkdir()
    tried = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)],
        capture_output=True, text=True, check=False,
    ) if shutil.which("mount") else None  # fmt: skip
    if tried is None or tried.returncode:
        pytest.skip(f"no disk can be mounted here: {tried.stderr.strip() if tried else 'no mount'}")
    yield directory
    directory.kill_savers()
    for path in (directory, moved_disk(directory)):
        while os.path.ismount(path):
            unmount(path)


def assert_lives(
    directory: Path,
    breaks: Callable[[], object],
    mends: Callable[[], object],
    reason: str,
    nbytes: int = 40000,
) -> None:
    """The same training on any bad disk: steps 1 and 5 are stored, 3 is not, and none is lost meanwhile."""
    checkpointer = Checkpointer(directory, linger=5.0)
    checkpointer.save(1, filled(1), to="storage")
    checkpointer.wait()
    breaks()
    checkpointer.save(2, filled(2))
    checkpointer.save(3, filled(3, nbytes), to="storage")
    checkpointer.save(4, filled(4))
    with pytest.raises(
        InfrastructureError, match=f"Step 3 was not stored in .*: {reason}"
    ) as caught:
        checkpointer.wait()
    assert "Step 1" not in str(caught.value)
    state = filled(0)
    record = checkpointer.load(state)
    assert (record.source, record.step, state["step"]) == ("memory", 4, 4)
    mends()
    checkpointer.save(5, filled(5), to="storage")
    checkpointer.wait()
    checkpointer.close()
    assert storage.steps(open_store(directory)) == [5, 1]
    assert storage.tracked(open_store(directory)).step == 5
    assert list(directory.glob(".*")) == [], "nothing half done is left"
    for process in directory.savers():
        process.kill()
    directory.until_no_saver()
    state = filled(0)
    checkpointer = Checkpointer(directory, linger=0.0)
    record = checkpointer.load(state)
    checkpointer.close()
    assert (record.source, record.step) == ("storage", 5)
    assert torch.equal(state["w"], filled(5)["w"])


def test_a_full_disk(disk):
    start_saver(disk)
    filler = disk / "somebody else's"
    assert_lives(
        disk,
        lambda: filler.write_bytes(bytes(3 * MIB)),
        filler.unlink,
        "No space left on device",
        nbytes=2 * MIB,
    )


@pytest.mark.parametrize(("nodes", "state"), [("one", "equal"), ("two", "sharded")])
def test_no_step_waits_for_a_full_disk(disk, forks, nodes, state):
    """Ranks wait for what others write: for equal tensors, and to publish. Nobody waits for what fails."""
    names = [disk]
    if nodes == "two":
        names = [disk / "a", disk / "b"]
        for name in names:
            name.symlink_to(disk)
    script = Path(__file__).parent / "scripts" / "filled.py"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = forks.ranks(2, script, disk, state, *names, env=env, timeout=80)
    assert max(map(float, re.findall(r'"longest": ([\d.e-]+)', output))) < 5.0
    (told,) = map(json.loads, re.findall(r'^\{.*"stored".*$', output, re.MULTILINE))
    assert "Step 6 was not stored" in told["problems"]
    assert told["stored"][0] == 36, "the storage is used again"
    warned = re.findall("^(Step .*)$", output, re.MULTILINE)
    assert sum("Training goes on, and later steps are tried." in line for line in warned) == len(
        names
    ), "one sentence on each node"


def test_a_step_that_never_fits_leaves_room_for_those_that_do(disk):
    start_saver(disk)
    assert_lives(disk, lambda: None, lambda: None, "No space left on device", nbytes=8 * MIB)


def test_a_disk_full_of_a_step_that_a_saver_had_yet_to_delete(disk):
    """There is room for one step more than are kept, and the saver has died between storing it and deleting another."""
    checkpointer = Checkpointer(disk, keep=4, linger=0.0)
    for step in (1, 2, 3, 4):
        checkpointer.save(step, filled(step, 900_000), to="storage")
        checkpointer.wait()
    checkpointer.close()
    disk.until_no_saver()
    start_saver(disk)
    checkpointer = Checkpointer(disk, linger=0.0)
    checkpointer.save(5, filled(5, 900_000), to="storage")
    checkpointer.wait()
    checkpointer.close()
    assert storage.steps(open_store(disk)) == [5, 4, 3]


def test_a_read_only_disk(disk):
    start_saver(disk)
    assert_lives(
        disk,
        lambda: make_read_only(disk),
        lambda: unmount(disk),
        "Read-only file system",
    )


def test_a_limit_on_the_size_of_files(directory):
    """Below the size of the memory that is there already: the limit is for that too."""
    process = start_saver(directory)
    none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert_lives(
        directory,
        lambda: process.rlimit(psutil.RLIMIT_FSIZE, (50000, none[1])),
        lambda: process.rlimit(psutil.RLIMIT_FSIZE, none),
        "File too large",
        nbytes=60000,
    )


@pytest.mark.parametrize("label", ["persist.begun", "persist.written", "persist.manifest"])
def test_a_disk_that_fails_for_a_while(directory, tmp_path, label):
    """The disk's error is made up, at a fault point; what follows from it is real."""
    flag = tmp_path / "broken"
    start_saver(directory, flag, label)
    assert_lives(directory, flag.touch, flag.unlink, "Input/output error")


def test_a_failure_that_passes_is_tried_again(directory, tmp_path):
    flag = tmp_path / "broken"
    start_saver(directory, flag, "persist.written")
    flag.touch()
    checkpointer = Checkpointer(directory, linger=0.0)
    checkpointer.save(1, filled(1), to="storage")
    log = next(directory.glob("saver-*.log"))
    end = time.monotonic() + 60  # the saver loads torch first
    while "Retrying in 0.02 s: Step 1" not in log.read_text():
        assert time.monotonic() < end, log.read_text()
    flag.unlink()
    checkpointer.wait()
    checkpointer.close()
    assert storage.steps(open_store(directory)) == [1]


def test_a_disk_that_is_not_mounted_any_more(disk):
    start_saver(disk)
    moved = moved_disk(disk)
    moved.mkdir()

    def disappear() -> None:
        subprocess.run(["mount", "--bind", str(disk), str(moved)], check=True)
        unmount(disk)

    def come_back() -> None:
        assert list(disk.iterdir()) == [], "nothing was written to what is under it"
        subprocess.run(["mount", "--bind", str(moved), str(disk)], check=True)
        unmount(moved)

    assert_lives(disk, disappear, come_back, "it is not the directory any more")


def test_a_disk_full_of_what_another_run_left_half_done(disk):
    start_saver(disk)
    left = unfinished(disk, 9, 1)
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(bytes(3 * MIB))
    an_hour_ago = time.time() - 3600
    for path in (left / "__0_0.distcp", left):
        os.utime(path, (an_hour_ago, an_hour_ago))
    checkpointer = Checkpointer(disk, linger=0.0)
    checkpointer.save(10, filled(10, 2 * MIB), to="storage")
    checkpointer.wait()
    checkpointer.close()
    assert storage.steps(open_store(disk)) == [10]


# ---- directories that cannot be written from the start


def test_a_checkpoint_can_be_read_from_a_read_only_disk(disk):
    checkpointer = Checkpointer(disk, linger=0.0)
    for step in (1, 2):
        checkpointer.save(step, filled(step), to="storage")
    checkpointer.wait()
    checkpointer.close()
    disk.until_no_saver()
    data = disk / "step-2" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-100])
    make_read_only(disk)
    state = filled(0)
    checkpointer = Checkpointer(disk, linger=0.0)
    record = checkpointer.load(state)
    checkpointer.close()
    assert (record.source, record.step, state["step"]) == ("storage", 1, 1)


def test_a_new_directory_on_a_bad_disk_is_refused_in_a_sentence(disk):
    make_read_only(disk)
    with pytest.raises(InfrastructureError, match=r"cannot be used: Read-only file system\."):
        Checkpointer(disk)
    with pytest.raises(InfrastructureError, match=r"cannot be used: Not a directory\."):
        Checkpointer("/dev/null/run")


def test_a_name_on_a_full_disk_leaves_nothing(disk):
    (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
    with pytest.raises(InfrastructureError, match="cannot be used: No space left on device"):
        storage.identity(open_store(disk))
    assert os.listdir(disk) == ["filler"]


# ---- memory


SMALL_SHM = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"], check=True)
import torch
from dlrover.checkpoint import Checkpointer
checkpointer = Checkpointer(sys.argv[1], linger=0.0)
state = {"w": torch.full((20_000_000,), 3.0)}
checkpointer.save(3, state)
state["w"].fill_(4.0)
checkpointer.save(4, state)
state["w"].zero_()
record = checkpointer.load(state)
assert (record.source, record.step) == ("memory", 4), record
assert bool((state["w"] == 4.0).all())
assert os.listdir("/dev/shm") == []
assert "torch.distributed.tensor" not in sys.modules, "a second of imports for a state that has no such tensor"
print("whole")
"""


def test_memory_is_not_bounded_by_a_small_dev_shm(directory):
    """As in a container by default: 64 MiB; the state and its two generations take 240 MB."""
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no mount namespace can be made here")
    ended = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", SMALL_SHM, str(directory)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.stdout == "whole\n", ended.stderr


MANY_SAVES = """
import os, sys, time
import psutil, torch
from pathlib import Path
from dlrover.checkpoint import Checkpointer
directory = Path(sys.argv[1])
checkpointer = Checkpointer(directory, linger=60.0)
def private(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10
saver = next(p.pid for p in psutil.process_iter(["cmdline"]) if str(directory) in (p.info["cmdline"] or ())
             and p.pid != os.getpid())
for step in range(1, 201):
    size = abs(10 - step % 20)
    state = {str(i): torch.full((100_000,), float(step)) for i in range(size + 1)}
    checkpointer.save(step, state, to="storage" if step % 4 == 0 else "memory")
    if step in (40, 200):
        checkpointer.wait()
        print(*(n for pid in (os.getpid(), saver) for n in (private(pid), len(os.listdir(f"/proc/{pid}/fd")))))
checkpointer.save(201, state, to="storage")
print("ready", flush=True)
time.sleep(60)
"""


def test_many_saves_take_no_more_memory_and_killing_all_leaves_nothing(directory, tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    training = subprocess.Popen(
        [sys.executable, "-c", MANY_SAVES, str(directory)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    with training:
        early, late, ready = (training.stdout.readline().split() for _ in range(3))
        training.kill()
        directory.kill_savers()
    directory.until_no_saver()
    assert ready == ["ready"]
    worker, worker_files, saver, saver_files = (
        int(after) - int(before) for before, after in zip(early, late, strict=True)
    )
    assert (worker_files, saver_files) == (0, 0)
    assert max(worker, saver) <= 8, f"MiB more: worker {worker}, saver {saver}; a state has 4"
    assert not [name for name in os.listdir("/dev/shm") if str(training.pid) in name]
    assert os.listdir(temporary) == []
    checkpointer = Checkpointer(directory, linger=0.0)
    state = {str(i): torch.zeros(100_000) for i in range(11)}
    assert checkpointer.load(state).step >= 200
    checkpointer.close()


# ---- large tensors


def test_torch_reads_a_tensor_of_more_than_4_gib(tmp_path):
    """The file has holes where the zeros are, and takes a few KiB."""
    size = (4 << 30) + (100 << 20)
    zeros = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    end = torch.arange(1024.0)
    zeros[-4096:] = end.numpy().tobytes()
    with memoryview(zeros) as data:
        head, tail = dcp.torch_file("float32", (size // 4,), data, 0)
    zeros.close()
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(head)
        file.seek(size - 4096, os.SEEK_CUR)
        file.write(end.numpy().tobytes() + tail)
    assert path.stat().st_blocks * 512 < MIB
    tensor = torch.load(path, mmap=True, weights_only=True)
    assert tensor.shape == (size // 4,)
    assert torch.equal(tensor[-1024:], end)
    assert not tensor[:1024].any()
    (data,) = (item for item in zipfile.ZipFile(path).infolist() if item.filename.endswith("/0"))
    assert data.file_size == data.compress_size == size
