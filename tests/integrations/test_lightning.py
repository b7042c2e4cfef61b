"""Lightning with `FlashCheckpointIO`: a ModelCheckpoint at every step, ``ckpt_path="last"``."""

import contextlib
import importlib.util
import subprocess

import pytest

pytestmark = [
    pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning"),
]  # fmt: skip

LAST = 9


def test_a_killed_rank_continues_from_memory(training, undisturbed):
    training.run("lit.py", 5, LAST, 4, "last")
    assert training.loaded == (5, "memory")
    losses = training.losses
    assert len(losses) == LAST * 2
    assert "weights step=5.ckpt ['body.0.weight'" in training.output, "in a file of Lightning"
    assert losses == undisturbed.run("lit.py", -1, LAST, LAST, "none").losses


def test_files_stand_for_steps(training):
    before = training.run("lit.py", -1, 6, 4, "none", ranks=1)
    assert "files ['epoch=1-step=6.ckpt', 'last.ckpt']" in before.output, "old ones are removed"
    losses = before.losses
    training.end_saver()
    error = training.run("lit.py", -1, LAST, 1, "epoch=1-step=6.ckpt", ranks=1, fails=True)
    assert "epoch=1-step=6.ckpt is step 6" in error.output
    assert "the newest one is 4" in error.output
    after = training.run("lit.py", -1, LAST, 1, "last", ranks=1)
    assert "last.ckpt is step 6; the newest one is 4" in after.output
    assert training.loaded == (4, "storage")
    assert {key for key, loss in after.losses.items() if losses.get(key) == loss} == {
        (4, 0), (5, 0)
    }  # fmt: skip
    last = training.run("lit.py", -1, LAST + 1, 1, "epoch=2-step=9.ckpt", ranks=1)
    assert [*last.losses] == [(LAST, 0)]


def test_plain_ddp_is_refused(training):
    error = training.run("lit.py", -1, LAST, 1, "none", "plain-ddp", fails=True).output
    assert "use strategy=FlashDDPStrategy()" in error


@pytest.fixture
def full_disk(tmp_path):
    """A directory on a disk without room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_for_its_files_does_not_end_a_training(training, full_disk):
    training.directory.mkdir(parents=True)
    (training.directory / "files").symlink_to(full_disk)
    output = training.run("lit.py", -1, 2, 1, "none", ranks=1).output
    assert "last.ckpt was not written: No space left on device. Training goes on" in output
    assert (training.flash / "step-2" / "manifest.json").exists()
