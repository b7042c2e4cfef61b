"""Between formats: every pair, every type, bit by bit; shards become whole; what cannot be kept is named."""

import json
import math
import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from itertools import product
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dlrover.checkpoint.engine import tree
from dlrover.checkpoint.engine.copying import Copier
from dlrover.checkpoint.engine.tree import DTYPES, Shard
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver import memory
from dlrover.checkpoint.saver.memory import Generation
from dlrover.checkpoint.storage import persist, storage
from dlrover.checkpoint.storage.persist import PersistJob, RankPart
from dlrover.checkpoint.storage.stored_step import StoredStep
from dlrover.checkpoint.storage.stores import open_store
from dlrover.checkpoint.tools import safetensorsfile, tools
from dlrover.checkpoint.tools.convert import convert
from dlrover.cli import main
from dlrover.errors import ConfigurationError, ExitCode, InfrastructureError

safetensors = pytest.importorskip("safetensors")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
FORMATS = ("dcp", "safetensors", "torch", "flash")
SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt"}
UNKNOWN_TO_SAFETENSORS = {"complex32", "complex128"}


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


def file_of(directory: Path, state: dict, name: str = "state.pt") -> Path:
    """The state as ``torch.save`` writes it."""
    torch.save(state, directory / name)
    return directory / name


def read(path: Path, directory: Path) -> dict:
    """A checkpoint of any format as ``torch.load`` gives it."""
    target = directory / f"{path.name}.read.pt"
    convert(path, target, "torch", trusted=True)
    return torch.load(target, weights_only=True)


def equal(one: object, other: object) -> bool:
    """Whether two states are the same, bit by bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return not one.numel() or torch.equal(*(t.view(-1).view(torch.uint8) for t in (one, other)))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return repr(one) == repr(other)


def as_dcp_keeps_it(value: object) -> object:
    """Keys are text, and an empty dict is only known where it is in a list."""
    if isinstance(value, dict):
        kept = {str(key): as_dcp_keeps_it(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item != {}}
    return [as_dcp_keeps_it(item) for item in value] if isinstance(value, list) else value


def bits(dtype: str, *shape: int) -> torch.Tensor:
    """Any bits, also those of numbers that are none."""
    count = math.prod(shape) * layouts.ITEM_BYTES[dtype]
    generator = torch.Generator().manual_seed(count)
    content = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    content = content & 1 if dtype == "bool" else content
    return content.view(DTYPES[dtype]).view(shape)


def state_of(dtypes: set[str]) -> dict:
    tied = torch.arange(6.0).view(2, 3)
    return {
        "model": {
            "embed.weight": tied,
            "head.weight": tied,
            "types": {name: bits(name, 2, 3) for name in sorted(dtypes)},
            "scalars": {name: bits(name) for name in sorted(dtypes)},
            "empty": {name: torch.empty((0, 4), dtype=DTYPES[name]) for name in sorted(dtypes)},
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}],
        },
        "plain": {
            "none": None, "yes": True, "big": 2**90, "negative": -5, "text": 'é "$tensor"', "bytes": b"\0\xff",
            "floats": [float("nan"), float("-inf"), -0.0, 1e-310], "nested": [(1, [2, (3,)]), ()],
            "$tensor": "no tag", "pair": (1, torch.ones(2)), "list": [torch.zeros(1), 7], "gap": [{}, {"a": 1}],
            "count": Counter({3: 2, "x": float("inf")}),
        },
        "step": 40,
    }  # fmt: skip


# ---- pairs


@pytest.mark.parametrize(("one", "other"), list(product(FORMATS, FORMATS)))
def test_every_pair_of_formats_keeps_every_bit(tmp_path: Path, one: str, other: str):
    through_safetensors = "safetensors" in (one, other)
    state = state_of(DTYPES.keys() - (UNKNOWN_TO_SAFETENSORS if through_safetensors else set()))
    first, second = (tmp_path / f"{n}{SUFFIXES.get(to, '')}" for n, to in enumerate((one, other)))
    convert(file_of(tmp_path, state), first, one)
    done = convert(first, second, other, trusted=True)
    found = read(second, tmp_path)
    assert equal(found, as_dcp_keeps_it(state) if "dcp" in (one, other) else state)
    assert done.step == (40 if "flash" in (one, other) else None)
    tied = [found["model"][key] for key in ("embed.weight", "head.weight")]
    assert tied[0].data_ptr() == tied[1].data_ptr(), "tied tensors are kept once"


def test_the_types_that_safetensors_cannot_hold_are_named(tmp_path: Path):
    assert DTYPES.keys() - safetensorsfile.NAMES.keys() == UNKNOWN_TO_SAFETENSORS
    for dtype in UNKNOWN_TO_SAFETENSORS:
        path = file_of(tmp_path, {"a": {"b": bits(dtype, 2)}})
        with pytest.raises(ConfigurationError, match=rf"tensor a\.b has the type {dtype}, which"):
            convert(path, tmp_path / "x.safetensors", "safetensors")
    assert os.listdir(tmp_path) == ["state.pt"]


# ---- what other tools read and write


def test_dcp_reads_what_is_converted(tmp_path: Path):
    state = {"w": torch.arange(6.0).view(2, 3), "groups": [{"lr": 0.1}], "empty": torch.empty(0)}
    convert(file_of(tmp_path, state), tmp_path / "dcp", "dcp")
    assert sorted(os.listdir(tmp_path / "dcp")) == [".metadata", "__0_0.distcp", "__0_1.distcp"]
    found = {"w": torch.zeros(2, 3), "groups": [{"lr": 0.0}], "empty": torch.empty(0)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert equal(found, state)


@pytest.mark.filterwarnings("ignore:.*single process")
def test_what_dcp_writes_is_converted(tmp_path: Path):
    state = state_of({"float32", "bfloat16", "float8_e4m3fn", "int64"})
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert equal(read(tmp_path / "dcp", tmp_path), as_dcp_keeps_it(state))


def test_safetensors_reads_what_is_converted(tmp_path: Path):
    state = {"model": {"a": torch.ones(3, dtype=torch.bfloat16), "b": bits("int64", 2)}, "step": 7}
    convert(file_of(tmp_path, state), tmp_path / "x.safetensors", "safetensors")
    from safetensors.torch import load_file

    found = load_file(tmp_path / "x.safetensors")
    assert equal(found, {f"model.{key}": tensor for key, tensor in state["model"].items()})
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        metadata = file.metadata()
    size = int.from_bytes((tmp_path / "x.safetensors").read_bytes()[:8], "little")
    header = json.loads((tmp_path / "x.safetensors").read_bytes()[8 : 8 + size])
    assert (8 + size) % 8 == header["model.b"]["data_offsets"][0] % 8 == 0, "aligned"
    assert metadata.keys() == {"format", safetensorsfile.TREE}
    assert json.loads(metadata[safetensorsfile.TREE]) == {
        "model": {"a": {"$tensor": "model.a"}, "b": {"$tensor": "model.b"}}, "step": 7
    }  # fmt: skip


def test_what_safetensors_writes_is_converted(tmp_path: Path):
    from safetensors.torch import save_file

    state = {"layer.0.weight": torch.ones(2, 2), "bias": torch.zeros(2, dtype=torch.float16)}
    save_file(state, tmp_path / "x.safetensors", {"format": "pt"})
    assert equal(read(tmp_path / "x.safetensors", tmp_path), state)
    save_file(state, tmp_path / "y.safetensors", {"format": "pt", "epoch": "3"})
    assert equal(
        read(tmp_path / "y.safetensors", tmp_path), {**state, "__metadata__": {"epoch": "3"}}
    )


def test_files_that_torch_wrote_in_its_old_format(tmp_path: Path):
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert equal(read(tmp_path / "old.pt", tmp_path), {"a": torch.ones(2)})


def test_views_are_saved_without_what_they_are_views_of(tmp_path: Path):
    large = torch.arange(100_000.0).view(100, 1000)
    conjugate = torch.tensor([1 + 2j, 3j]).conj()
    views = {"rows": large[3:5], "columns": large[:, 2], "conjugate": conjugate}
    path = file_of(tmp_path, views)
    for to in FORMATS:
        target = tmp_path / f"{to}{SUFFIXES.get(to, '')}"
        convert(path, target, to)
        found = read(target, tmp_path)
        assert all(torch.equal(found[key], views[key]) for key in views)
        files = target.rglob("*") if target.is_dir() else [target]
        assert sum(file.stat().st_size for file in files) < 40_000


def test_the_metadata_of_dcp_is_read_only_if_it_is_trusted(tmp_path: Path):
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"cbuiltins\nexec\n(Vraise SystemExit\ntR.")
    with pytest.raises(
        ConfigurationError, match=r"\.metadata is a pickle.*trusted=True .*--trusted"
    ):
        convert(tmp_path / "dcp", tmp_path / "x", "flash")
    with pytest.raises(SystemExit):
        convert(tmp_path / "dcp", tmp_path / "x", "flash", trusted=True)


def test_a_file_that_a_dcp_directory_lacks(tmp_path: Path):
    convert(file_of(tmp_path, {"w": torch.ones(2)}), tmp_path / "dcp", "dcp")
    (tmp_path / "dcp" / "__0_0.distcp").unlink()
    with pytest.raises(
        InfrastructureError, match=r"w in .*__0_0\.distcp cannot be read: No such file"
    ):
        convert(tmp_path / "dcp", tmp_path / "x", "flash", trusted=True)
    assert sorted(os.listdir(tmp_path)) == ["dcp", "state.pt"]


# ---- steps


def two_ranks() -> tuple[dict, dict, dict]:
    """What each of two ranks has, and all of it."""
    rows, columns = torch.arange(35.0).view(7, 5), torch.arange(6, dtype=torch.bfloat16).view(1, 6)
    scalar, empty = torch.tensor(2.0), torch.empty(0, 3)
    states = []
    for rank, (first, count) in enumerate(((0, 4), (4, 3))):
        part = Shard(rows[first : first + count], (7, 5), (first, 0))
        side = Shard(columns[:, 3 * rank : 3 * rank + 3], (1, 6), (0, 3 * rank))
        states.append(
            {
                "model": {"rows": part, "tied": part, "columns": side, "bias": torch.ones(3)},
                "scalar": scalar,
                "empty": Shard(empty, (0, 3), (0, 0), 0),
                "rng": torch.tensor([rank]),
                "loss": 0.5 + rank,
                "same": float("nan"),
            }
        )
    model = {"rows": rows, "tied": rows, "columns": columns, "bias": torch.ones(3)}
    whole = {"model": model, "scalar": scalar, "empty": empty}
    return *states, {**whole, "rng": torch.tensor([0]), "loss": 0.5, "same": float("nan")}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    store(tmp_path / "sharded", 40, *two_ranks()[:2])
    return tmp_path / "sharded"


@pytest.mark.parametrize("to", FORMATS)
def test_shards_are_put_together_and_what_differs_is_told(sharded: Path, tmp_path: Path, to: str):
    target = tmp_path / f"x{SUFFIXES.get(to, '')}"
    done = convert(sharded, target, to)
    found = read(target, tmp_path)
    assert equal(found, two_ranks()[2])
    assert found["model"]["rows"].data_ptr() == found["model"]["tied"].data_ptr()
    assert sorted(done.differing) == ["loss", "rng"]
    assert done.tensors == 7
    if to == "flash":
        assert [(item.step, item.ranks, item.state) for item in tools.listing(target)] == [
            (40, 1, "complete")
        ]
        assert tools.verify(target, 40).whole


def test_ranks_that_hold_other_keys_are_joined(tmp_path: Path):
    stages = [
        {"model": {f"layer{rank}": torch.full((2,), float(rank))}, "step": 1} for rank in range(2)
    ]
    store(tmp_path / "stages", 1, *stages)
    found = read(tmp_path / "stages", tmp_path)
    assert equal(found["model"], {"layer0": torch.zeros(2), "layer1": torch.ones(2)})


def test_a_part_that_is_not_there_is_named(tmp_path: Path):
    store(tmp_path / "half", 1, two_ranks()[0])
    with pytest.raises(
        InfrastructureError, match=r"tensor model\.rows is incomplete: 20 of its 35 elements"
    ):
        convert(tmp_path / "half", tmp_path / "x.pt", "torch")


def test_parts_of_which_ranks_have_other_content(tmp_path: Path):
    states = [{"w": Shard(torch.full((2,), float(rank)), (2,), (0,), 0)} for rank in range(2)]
    store(tmp_path / "c", 1, *states)
    with pytest.raises(ConfigurationError, match="same part of the tensor w, with other content"):
        convert(tmp_path / "c", tmp_path / "x.pt", "torch")


def test_a_step_is_picked(tmp_path: Path):
    for step in (1, 2):
        store(tmp_path / "c", step, {"value": step})
    assert convert(tmp_path / "c", tmp_path / "new.pt", "torch").step == 2
    assert convert(tmp_path / "c", tmp_path / "old.pt", "torch", 1).step == 1
    assert torch.load(tmp_path / "old.pt", weights_only=True) == {"value": 1}
    assert convert(tmp_path / "c" / "step-1", tmp_path / "its.pt", "torch").step == 1
    with pytest.raises(ConfigurationError, match="no step 3; there is: 2, 1"):
        convert(tmp_path / "c", tmp_path / "x.pt", "torch", 3)
    with pytest.raises(ConfigurationError, match="--step is 2; the source is step 1"):
        convert(tmp_path / "c" / "step-1", tmp_path / "x.pt", "torch", 2)


def test_a_step_gets_a_number(tmp_path: Path):
    path = file_of(tmp_path, {"step": 5})
    assert convert(path, tmp_path / "a", "flash").step == 5
    assert convert(path, tmp_path / "b", "flash", 9).step == 9
    assert [storage.steps(open_store(tmp_path / name)) for name in "ab"] == [[5], [9]]
    assert convert(file_of(tmp_path, {"step": "x"}), tmp_path / "c", "flash").step == 0
    with pytest.raises(ConfigurationError, match="--step is 9; neither"):
        convert(path, tmp_path / "d", "dcp", 9)


# ---- what is refused


def test_an_existing_destination_stays_as_it_is(tmp_path: Path):
    path = file_of(tmp_path, {"a": 1})
    (tmp_path / "there").mkdir()
    for name, to in product(("there", "state.pt"), FORMATS):
        with pytest.raises(ConfigurationError, match="exists already"):
            convert(path, tmp_path / name, to)
    with pytest.raises(ConfigurationError, match="none is no directory"):
        convert(path, tmp_path / "none" / "x", "torch")
    assert sorted(os.listdir(tmp_path)) == ["state.pt", "there"]


@pytest.mark.parametrize("to", FORMATS)
def test_a_damaged_source_leaves_nothing_behind(sharded: Path, tmp_path: Path, to: str):
    step = sharded / "step-40"
    with StoredStep(open_store(step), "") as stored:
        (found,) = (t for t in stored.index(1).tensors if t.path == ("model", "columns"))
    content = bytearray((step / found.file).read_bytes())
    content[found.offset] ^= 1
    (step / found.file).write_bytes(content)
    with pytest.raises(InfrastructureError, match=r"tensor model\.columns .* is damaged"):
        convert(sharded, tmp_path / "x", to)
    assert os.listdir(tmp_path) == ["sharded"]


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:.*single process")
def test_objects_in_files_are_refused_and_not_run(tmp_path: Path):
    state = {"a": Evil(tmp_path / "made")}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for path in (file_of(tmp_path, state), tmp_path / "dcp"):
        with pytest.raises(ConfigurationError, match=r"(cannot be kept|can read): .*mkdir"):
            convert(path, tmp_path / "x", "flash", trusted=True)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ([1, 2], ConfigurationError, "holds a list; it must be a dict"),
        ({"a": {"size": torch.Size([1])}}, ConfigurationError, r"a\.size is a torch\.Size"),
        ({"a": {(1, 2): 3}}, ConfigurationError, r"a has the key \(1, 2\)"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, ConfigurationError, r"a\.b"),
    ],
)
def test_what_cannot_be_kept_is_named(tmp_path: Path, content, error, message):
    path = file_of(tmp_path, content)
    for to in ("dcp", "safetensors", "flash"):
        with pytest.raises(error, match=message):
            convert(path, tmp_path / "x", to)
    assert os.listdir(tmp_path) == ["state.pt"]


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x/.metadata", "c/manifest.json"])
def test_sources_that_are_none(tmp_path: Path, name: str):
    with pytest.raises(ConfigurationError, match="does not exist"):
        convert(tmp_path / name, tmp_path / "y", "flash")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"nonsense, nonsense")
    path = tmp_path / name if name.startswith("x.") else (tmp_path / name).parent
    with pytest.raises((ConfigurationError, InfrastructureError), match=r"cannot|can read"):
        convert(path, tmp_path / "y", "flash", trusted=True)
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("to", FORMATS)
def test_a_destination_without_room_gets_a_sentence(tmp_path: Path, to: str):
    path = file_of(tmp_path, {"w": torch.ones(100_000)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(InfrastructureError, match=r"x cannot be written: .*File too large"):
            convert(path, tmp_path / "x", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["state.pt"]


def test_a_tree_that_does_not_fit_its_file(tmp_path: Path):
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    for tensors, said in (
        ({"a": torch.ones(1)}, '{"b":{"$tensor":"b"}}'),
        ({"a": torch.ones(1)}, "{}"),
    ):
        save_file(tensors, path, {safetensorsfile.TREE: said})
        with pytest.raises(InfrastructureError, match=r"dlrover\.tree"):
            convert(path, tmp_path / "y", "torch")


# ---- the verb, and what it is for


def test_the_verb(sharded: Path, tmp_path: Path, monkeypatch, capsys):
    def run(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["dlrover", "ckpt", "convert", *map(str, words)])
        try:
            return main.main()
        except SystemExit as end:
            return int(end.code or 0)

    assert run(sharded, tmp_path / "a.pt", "--to", "torch") == 0
    printed = capsys.readouterr().out
    assert "7 tensors of step 40, " in printed
    assert "loss, rng" in printed or "rng, loss" in printed
    assert run(sharded, tmp_path / "b", "--to", "flash", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 40
    assert run(sharded, tmp_path / "b", "--to", "flash") == ExitCode.USAGE
    assert "exists already" in capsys.readouterr().err
    assert run(sharded, tmp_path / "c", "--to", "zip") == ExitCode.USAGE


@pytest.mark.slow
@pytest.mark.parametrize("to", ["safetensors", "flash", "dcp"])
def test_only_a_tensor_at_a_time_is_in_memory(tmp_path: Path, to: str):
    """16 tensors of 16 MiB, read from DCP: the process grows by a few of them."""
    state = {f"t{number}": torch.full((4 << 20,), float(number)) for number in range(16)}
    convert(file_of(tmp_path, state), tmp_path / "dcp", "dcp")
    code = (
        "import resource, sys; from pathlib import Path; from dlrover.checkpoint.tools.convert import convert\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); convert(Path('dcp'), Path('x.safetensors'), sys.argv[1], trusted=True); print(peak() - before)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, to], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert int(ended.stdout) * 1024 < 6 * (16 << 20)


SCRIPT = Path(__file__).parent / "scripts" / "sharded.py"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.timeout(180)
def test_what_four_ranks_saved_is_loaded_by_others_after_a_conversion(directory, tmp_path: Path):
    def run(verb: str, layout: str, path: Path, ranks: int) -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith("DLROVER_")}
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        ended = subprocess.run(
            [sys.executable, *launcher, str(SCRIPT), verb, layout, "storage", str(path)],
            env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    saved, single = type(directory)(directory / "a"), type(directory)(directory / "b")
    directory.mkdir()
    run("save", "tp x dp", saved, 4)
    saved.stop_saver()
    done = convert(saved, tmp_path / "x.safetensors", "safetensors")
    assert done.differing == ["rng"]
    convert(tmp_path / "x.safetensors", single, "flash")
    assert "equal on 2 ranks" in run("load", "fsdp2", single, 2)
