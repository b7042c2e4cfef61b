"""Stored steps as an operator sees them: listed, described, verified, deleted; and the verbs for it."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch

import dlrover
from dlrover.checkpoint.engine import tree
from dlrover.checkpoint.engine.copying import Copier
from dlrover.checkpoint.engine.tree import Shard
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import memory
from dlrover.checkpoint.saver.memory import Generation
from dlrover.checkpoint.storage import persist, storage
from dlrover.checkpoint.storage.persist import PersistJob, RankPart
from dlrover.checkpoint.storage.stored_step import StoredStep
from dlrover.checkpoint.storage.stores import open_store
from dlrover.checkpoint.tools import tools
from dlrover.cli import main
from dlrover.errors import ConfigurationError, ExitCode, InfrastructureError

pytestmark = pytest.mark.torch


def unfinished(directory: Path, step: int, session: int) -> Path:
    return directory / f".step-{step}.{session:016x}-{step}"


def source(state: dict) -> RankPart:
    """A state in memory, as a saver holds it."""
    copier = Copier()
    packed = copier.layout(tree.flatten(state))
    fd = os.memfd_create("test")
    os.ftruncate(fd, memory.capacity_for(packed))
    generation = Generation(fd)
    os.close(fd)
    copier.copy(torch.frombuffer(generation.data, dtype=torch.uint8))
    layout = msgspec.msgpack.decode(packed.encoded, type=layouts.Layout)
    return RankPart(
        generation.tensor_bytes, layout, memory.compute_sums(generation, layout.entries)
    )


def store(directory: Path, step: int, *states: dict) -> None:
    """A step of as many ranks as there are states."""
    directory.mkdir(exist_ok=True)
    sources = {rank: source(state) for rank, state in enumerate(states)}
    clock = threading.Event()
    pause = lambda seconds: clock.wait(seconds) and None  # noqa: E731
    save = SaveId(0, step, step, 1)
    persist.persist(PersistJob(open_store(directory), save, len(states), sources, pause, 10.0))


def state(rank: int, step: int) -> dict:
    """Row 0 to 2 of "w" on rank 0, the others on rank 1."""
    rows = torch.arange(10.0).view(5, 2).split([3, 2])[rank]
    return {
        "model": {"w": Shard(rows, (5, 2), (3 * rank, 0)), "bias": torch.full((4,), float(step))},
        "rng": torch.tensor([rank], dtype=torch.uint8),
        "groups": [{"lr": 0.1, "params": [0, 1]}],
        "step": step,
    }


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original") / "checkpoints"
    for step in (10, 20, 30):
        store(directory, step, state(0, step), state(1, step))
    return directory


@pytest.fixture
def stored(original: Path, tmp_path: Path) -> Path:
    """Three steps of two ranks; each test has its own copy."""
    return shutil.copytree(original, tmp_path / "checkpoints")


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)


def flip_tensor(directory: Path, path: tuple, rank: int = 0) -> str:
    """Change a byte of a tensor; the name of its file."""
    with StoredStep(open_store(directory), "") as step:
        (found,) = (tensor for tensor in step.index(rank).tensors if tensor.path == path)
    flip(directory / found.file, found.offset)
    return found.file


def cli(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The exit code of ``dlrover ckpt WORDS``."""
    monkeypatch.setattr(sys, "argv", ["dlrover", "ckpt", *map(str, words)])
    try:
        return main.main()
    except SystemExit as end:
        return int(end.code or 0)


# ---- list and show


def test_steps_are_listed_newest_first_with_what_can_be_seen_of_them(stored: Path):
    store(stored, 40, state(0, 40), state(1, 40))
    storage.quarantine(open_store(stored), 40)
    unfinished(stored, 50, 1).mkdir()
    os.truncate(stored / "step-20" / "__0_0.distcp", 10)
    (stored / "saver-host.log").touch()
    found = tools.listing(stored)
    assert [(item.name, item.state, item.latest) for item in found] == [
        (".step-50.0000000000000001-50", "unfinished", False),
        ("step-40.bad", "bad", False),
        ("step-30", "complete", False),
        ("step-20", "damaged", False),
        ("step-10", "complete", False),
    ]
    assert storage.tracked(open_store(stored)).step == 40
    whole = found[2]
    sizes = [file.stat().st_size for file in (stored / "step-30").iterdir()]
    assert (whole.ranks, whole.files, whole.nbytes) == (2, len(sizes), sum(sizes))
    assert whole.time == (stored / "step-30" / "manifest.json").stat().st_mtime


def test_the_newest_stored_one_is_marked(stored: Path):
    assert [item.step for item in tools.listing(stored) if item.latest] == [30]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "is no directory"),
        ("checkpoints/latest", "is no directory"),
        ("", "holds no step"),
        ("checkpoints/step-10", "is one step; name .*checkpoints"),
    ],
)
def test_what_is_no_checkpoint_directory_is_refused(
    stored: Path, name: str, message: str, monkeypatch, capsys
):
    path = stored.parent / name
    for verb in (
        ["list"],
        ["show"],
        ["verify"],
        ["verify", "--step", "all"],
        ["prune", "--keep", 1],
    ):
        assert cli(monkeypatch, *verb, path) == ExitCode.USAGE
        printed = capsys.readouterr()
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1
    with pytest.raises(ConfigurationError, match=message):
        tools.listing(path)


def test_a_step_is_described_over_all_ranks(stored: Path):
    found = tools.describe(stored, 10)
    assert [(t.name, t.dtype, t.shape, t.parts, t.nbytes, t.differs) for t in found.tensors] == [
        ("model.w", "float32", (5, 2), 2, 40, False),
        ("model.bias", "float32", (4,), 1, 16, False),
        ("rng", "uint8", (1,), 1, 1, True),
    ]
    assert found.values == ["groups.0.lr", "groups.0.params", "step"]
    assert (found.ranks, found.elements, found.nbytes) == (2, 15, 57)
    assert found.stored_nbytes == tools.listing(stored)[-1].nbytes


def test_a_step_is_chosen(stored: Path):
    assert tools.chosen(stored, None) == 30
    assert tools.chosen(stored, 10) == 10
    with pytest.raises(ConfigurationError, match="no step 11; there is: 30, 20, 10"):
        tools.chosen(stored, 11)


# ---- verify


def snapshot(directory: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_whole_step_is_whole_and_nothing_is_changed(stored: Path):
    before = snapshot(stored)
    found = tools.verify(stored, 30)
    assert found.whole
    assert (found.problems, found.unknown) == ([], [])
    assert (found.files, found.nbytes) == (
        tools.listing(stored)[0].files,
        tools.listing(stored)[0].nbytes,
    )
    assert snapshot(stored) == before


def problems(directory: Path) -> set[tuple[str, str, str]]:
    found = tools.verify(directory, 30)
    assert found.whole == (not found.problems)
    return {(item.file, item.tensor, item.problem) for item in found.problems}


@pytest.mark.parametrize(("path", "rank"), [(("model", "w"), 1), (("model", "bias"), 0)])
def test_a_damaged_tensor_is_named(stored: Path, path: tuple, rank: int):
    file = flip_tensor(stored / "step-30", path, rank)
    assert problems(stored) == {(file, ".".join(path), "its bytes differ from their checksum")}


@pytest.mark.parametrize("file", ["__0_0.distcp", "__0_1.distcp", ".metadata", "rank-0.index"])
def test_a_byte_that_is_of_no_tensor_counts_too(stored: Path, file: str):
    flip(stored / "step-30" / file, 10)
    ((named, tensor, problem),) = problems(stored)
    assert (named, tensor) == (file, "")
    assert "differs from" in problem


def test_a_file_that_is_cut_off_names_what_was_in_it(stored: Path):
    file = stored / "step-30" / "__1_0.distcp"
    size = file.stat().st_size
    os.truncate(file, 10)
    lost = "its bytes differ from their checksum"
    assert problems(stored) == {
        (file.name, "", f"has 10 bytes, not {size}"),
        (file.name, "model.w", lost),
        (file.name, "rng", lost),
    }


def test_a_file_that_is_gone_names_what_was_in_it(stored: Path):
    (stored / "step-30" / "__1_0.distcp").unlink()
    assert problems(stored) == {
        ("__1_0.distcp", "", "cannot be read: No such file or directory"),
        ("__1_0.distcp", "model.w", "is lost with its file"),
        ("__1_0.distcp", "rng", "is lost with its file"),
    }


@pytest.mark.parametrize("content", [None, b"{"])
def test_a_manifest_that_cannot_be_read(stored: Path, content: bytes | None):
    path = stored / "step-30" / "manifest.json"
    path.unlink() if content is None else path.write_bytes(content)
    ((file, tensor, problem),) = problems(stored)
    assert (file, tensor) == ("manifest.json", "")
    assert "cannot be read" in problem
    assert tools.chosen(stored, None) == 30, "the newest one, whole or not"


def test_a_step_under_another_name(stored: Path):
    (stored / "step-10").rename(stored / "step-31")
    (found,) = tools.verify(stored, 31).problems
    assert found.problem == "is that of step 10"


def test_files_that_do_not_belong_to_the_step_are_told_and_do_no_harm(stored: Path):
    (stored / "step-30" / "notes.txt").touch()
    found = tools.verify(stored, 30)
    assert found.whole
    assert found.unknown == ["notes.txt"]


def test_names_that_are_not_utf_8_are_shown_to_people_and_to_programs(stored: Path, monkeypatch):
    (stored / "step-30" / os.fsdecode(b"caf\xe9")).write_text("theirs")
    (stored / os.fsdecode(b"step-30\xe9")).mkdir()
    for form in ("text", "json"):
        assert cli(monkeypatch, "list", stored, "-o", form) == 0
        assert cli(monkeypatch, "verify", stored, "-o", form) == 0
    assert tools.verify(stored, 30).unknown == ["caf\\xe9"]
    assert "step-30\\xe9" in {item.name for item in tools.listing(stored)}


def test_a_part_that_nobody_saved_is_missed(tmp_path: Path):
    store(tmp_path / "c", 30, state(0, 30))
    assert problems(tmp_path / "c") == {
        ("manifest.json", "model.w", "it is incomplete: 6 of its 10 elements were saved")
    }


def test_verify_says_so_and_leaves_with_3(stored: Path, monkeypatch, capsys):
    file = flip_tensor(stored / "step-20", ("model", "w"))
    assert cli(monkeypatch, "verify", stored) == 0
    assert "Step 30 is whole" in capsys.readouterr().out
    assert cli(monkeypatch, "verify", stored, "--step", "20") == ExitCode.INFRASTRUCTURE
    printed = capsys.readouterr().out
    assert "Step 20 is damaged" in printed
    assert f"  {file}, tensor model.w: its bytes differ" in printed
    assert cli(monkeypatch, "verify", stored, "--step", "all", "-o", "json") == 3
    assert [(item["step"], item["whole"]) for item in json.loads(capsys.readouterr().out)] == [
        (30, True), (20, False), (10, True)
    ]  # fmt: skip
    assert cli(monkeypatch, "verify", stored, "--step", "x") == ExitCode.USAGE


# ---- prune


def test_the_newest_steps_are_kept(stored: Path):
    before = snapshot(stored)
    planned = tools.prune(stored, 1, dry_run=True)
    assert snapshot(stored) == before
    done = tools.prune(stored, 1)
    assert planned.deleted == done.deleted
    assert ([item.step for item in done.deleted], done.kept) == ([20, 10], [30])
    assert sorted(os.listdir(stored)) == ["latest", "step-30"]
    assert tools.prune(stored, 1).deleted == []


def test_the_newest_whole_step_is_kept_whatever_its_age(stored: Path):
    for step in (30, 20):
        flip_tensor(stored / f"step-{step}", ("model", "bias"))
    done = tools.prune(stored, 1)
    assert ([item.step for item in done.deleted], done.kept) == ([20], [30, 10])
    assert done.newest_whole == 10
    assert sorted(os.listdir(stored)) == ["latest", "step-10", "step-30"]


def test_nothing_is_deleted_where_nothing_is_whole(stored: Path):
    for step in (30, 20, 10):
        flip_tensor(stored / f"step-{step}", ("model", "bias"))
    with pytest.raises(InfrastructureError, match=r"No step in .* is whole"):
        tools.prune(stored, 1)
    assert storage.steps(open_store(stored)) == [30, 20, 10]


def test_what_was_put_aside_or_is_being_written_stays(stored: Path):
    storage.quarantine(open_store(stored), 10)
    unfinished(stored, 40, 1).mkdir()
    assert [item.step for item in tools.prune(stored, 1).deleted] == [20]
    assert {"step-10.bad", ".step-40.0000000000000001-40", "step-30"} < set(os.listdir(stored))


def test_a_step_that_cannot_be_deleted(stored: Path, monkeypatch):
    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(InfrastructureError, match=r"step-20 cannot be used: Read-only file system"):
        tools.prune(stored, 1)


def test_prune_says_what_it_deletes_and_refuses_to_delete_all(stored: Path, monkeypatch, capsys):
    assert cli(monkeypatch, "prune", stored, "--keep", 0) == ExitCode.USAGE
    assert "--keep is 0; at least 1" in capsys.readouterr().err
    assert cli(monkeypatch, "prune", stored, "--keep", 2, "--dry-run") == 0
    assert "Would delete step 10, " in capsys.readouterr().out
    assert cli(monkeypatch, "prune", stored, "--keep", 2) == 0
    assert "Deleted step 10, " in capsys.readouterr().out
    assert cli(monkeypatch, "prune", stored, "--keep", 2, "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["kept"] == [30, 20]


# ---- the verbs


def test_list_and_show_for_people_and_for_programs(stored: Path, monkeypatch, capsys):
    assert cli(monkeypatch, "list", stored) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "30", "20", "10"]
    assert lines[1].endswith("complete, latest")
    assert cli(monkeypatch, "list", stored, "--output", "json") == 0
    assert [item["step"] for item in json.loads(capsys.readouterr().out)] == [30, 20, 10]
    assert cli(monkeypatch, "show", stored, "--step", 10) == 0
    printed = capsys.readouterr().out
    assert ["model.w", "float32", "[5,", "2]", "2", "40", "B"] in map(
        str.split, printed.splitlines()
    )
    assert "groups.0.lr" in printed
    assert cli(monkeypatch, "show", stored, "--output", "json") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 30


@pytest.mark.slow
def test_the_verbs_load_nothing_heavy_until_they_run():
    code = (
        "import sys, dlrover.cli.main; assert not {'torch', 'numpy', 'xxhash'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, dlrover.checkpoint.tools.tools; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_without_the_extra_a_sentence_says_what_to_install(tmp_path: Path):
    code = (
        "import sys; sys.modules['xxhash'] = None; sys.argv = ['dlrover', 'ckpt', 'list', '.']\n"
        "from dlrover.cli.main import main; sys.exit(main())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == ExitCode.USAGE
    assert ended.stderr == (
        "dlrover: dlrover ckpt needs the package xxhash:"
        f" pip install 'dlrover[torch]>={dlrover.__version__}'.\n"
    )
