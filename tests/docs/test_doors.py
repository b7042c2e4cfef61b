"""Programs import from doors only: the packages whose names are public."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dlrover
from dlrover import errors
from dlrover.original import names

ROOT = Path(__file__).parent.parent.parent
DOORS = {
    "dlrover.accelerate": {
        "Cluster", "Explanation", "Observation", "Prediction", "Residual", "Strategy", "Transformer",
        "calibrate", "predict", "search", "traced", "why_not", "AutoAccelerateResult", "auto_accelerate", "clip_grad_norm_",
    },
    "dlrover.accelerators": {
        "CPU", "RESOURCES", "VENDORS", "DeviceHealth", "DeviceUse", "Vendor", "pci_addresses", "present",
        "resources", "vendors",
    },
    "dlrover.brain": {
        "BrainClient", "Description", "NodeGroup", "Optimizer", "Range", "RegisterJob", "ReportOutcome",
        "ReportSamples", "Sample", "Shape", "Space", "request_id",
    },
    "dlrover.checkpoint": {"Checkpointer", "KeepBest", "KeepEvery", "KeepLast", "LoadRecord", "Shard"},
    "dlrover.data": {
        "Csv", "ElasticDataLoader", "ElasticDataset", "JsonLines", "Lines", "Message", "Parquet", "Records",
        "Stream", "Table", "TfRecords", "write_stream",
    },
    "dlrover.embedding": {
        "BloomAdmission", "ChanceAdmission", "CountAdmission", "EmbeddingOptimizer", "Expiry", "HashEmbedding",
        "HashEmbeddingBag", "HashTable", "Initializer", "RemoteTable", "RowOptimizer", "ServedTables", "Spill", "checkpoints",
        "open_table", "prefetched", "text_keys",
    },
    "dlrover.errors": {
        "CheckpointsLostError", "ConfigurationError", "DLRoverError", "DamagedJournalError", "ExitCode", "FencedError", "FormatError",
        "InfrastructureError", "MemberLostError", "NoRoomError", "ProtocolError", "RemoteError", "UserCodeError",
    },
    "dlrover.integrations.verl": {"Repair", "WorkerGroup", "install"},
    "dlrover.optim": {
        "AEDiT", "AGD", "AGD8bit", "AdamW8bit", "DiLoCo", "EDiT", "GroupAdagrad", "GroupAdam", "Penalty", "WSAM",
    },
    "dlrover.planning": {
        "Demand", "GIB", "MemorySample", "Option", "ServerSample", "ServerShape", "ServerSpace", "allocate",
        "fit_servers", "plan_servers", "prevent_oom", "sample_servers",
    },
    "dlrover.roles": {"Job", "Queue", "RoleGroup", "current_worker", "rpc", "weights"},
    "dlrover.tensorflow": {"dataset", "resilient"},
    "dlrover.training": {
        "ElasticDistributedSampler", "ElasticTrainer", "Replicas", "accumulation_steps", "activity", "restartable",
        "steps_left",
    },
}  # fmt: skip
NEEDS = {
    "ElasticDataset": "torch", "ElasticDataLoader": "torch", "ElasticTrainer": "torch",
    "ElasticDistributedSampler": "torch", "Replicas": "torch", "restartable": "torch", "Checkpointer": "torch", "LoadRecord": "torch", "Shard": "torch",
    "EmbeddingOptimizer": "torch", "HashEmbedding": "torch", "HashEmbeddingBag": "torch", "prefetched": "torch",
    "write_stream": "ray", "dataset": "tensorflow", "resilient": "tensorflow", "traced": "torch", "auto_accelerate": "torch", "AutoAccelerateResult": "torch", "clip_grad_norm_": "torch", "WorkerGroup": "verl", "Optimizer": "sqlalchemy",
    **dict.fromkeys(("AEDiT", "AGD", "AGD8bit", "AdamW8bit", "DiLoCo", "EDiT"), "torch"),
    **dict.fromkeys(("GroupAdagrad", "GroupAdam", "WSAM"), "torch"),
}  # fmt: skip
MODULES = {
    f"dlrover.integrations.{name}"
    for name in ("accelerate", "dcp", "deepspeed", "keras", "lightning", "megatron", "transformers")
}
"""Doors of their own, because each needs its library."""


def snippets() -> list[tuple[str, str]]:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    found = [
        (str(page.relative_to(ROOT)), block.replace(">>> ", ""))
        for page in pages
        for block in re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    programs = (ROOT / "examples").rglob("*.py")
    return found + [(str(path.relative_to(ROOT)), path.read_text()) for path in programs]


@pytest.mark.parametrize("door", DOORS)
def test_a_door_has_these_names(door: str) -> None:
    package = importlib.import_module(door)
    assert set(package.__all__) == DOORS[door]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018
    for name in DOORS[door]:
        if name not in NEEDS or importlib.util.find_spec(NEEDS[name]):
            assert getattr(package, name) is not None


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("missing", ["numpy", "torch", "xxhash"])
def test_a_door_whose_package_is_missing_names_what_to_install(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from dlrover.checkpoint import Checkpointer"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: dlrover.checkpoint.Checkpointer needs the package {missing}:"
        f" pip install 'dlrover[torch]>={dlrover.__version__}'."
    )


def test_docs_and_examples_import_from_doors_only() -> None:
    seen = 0
    for where, text in snippets():
        for line in re.findall(r"^\s*(?:from dlrover.*|import dlrover.*)$", text, re.MULTILINE):
            (node,) = ast.parse(line.strip()).body
            if isinstance(node, ast.ImportFrom):
                assert node.module is not None
                doors = (
                    {f"dlrover.{name.name}" for name in node.names}
                    if node.module == "dlrover"
                    else {node.module}
                )
                if node.module in DOORS:
                    assert {name.name for name in node.names} <= DOORS[node.module], (where, line)
            else:
                assert isinstance(node, ast.Import)
                doors = {name.name for name in node.names}
            originals = {module.name for module in names.MODULES}
            assert doors <= {*DOORS, *MODULES, *originals}, (where, line)
            seen += 1
    assert seen > 20


def test_every_error_is_public() -> None:
    classes = inspect.getmembers(errors, inspect.isclass)
    assert {name for name, kind in classes if kind.__module__ == errors.__name__} == DOORS[
        errors.__name__
    ]


def public(door: str) -> list[str]:
    """The names in the ``__all__`` of a module whose library may be missing."""
    home = ROOT / "src" / door.replace(".", "/")
    path = home / "__init__.py" if home.is_dir() else home.with_suffix(".py")
    found = [
        ast.literal_eval(node.value)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert len(found) == 1, f"{path} has no __all__"
    return found[0]


def test_each_door_has_a_page_and_a_line_in_the_list() -> None:
    pages = {f"dlrover.{page.stem}" for page in (ROOT / "docs/reference").glob("*.md")}
    assert pages == {*DOORS, *MODULES}
    listed = re.findall(
        r"^\| \[`([\w.]+)`\]\(reference/", (ROOT / "docs/api.md").read_text(), re.MULTILINE
    )
    assert len(listed) == len(pages)
    assert set(listed) == pages


@pytest.mark.slow
def test_the_site_can_be_built_and_has_each_public_name(tmp_path: Path) -> None:
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for door in (*DOORS, *MODULES):
        page = (tmp_path / "reference" / door.removeprefix("dlrover.") / "index.html").read_text()
        anchors = set(re.findall(r'<h\d id="([\w.]+)"', page))
        assert {f"{door}.{name}" for name in public(door)} <= anchors
