"""Random states through everything that keeps them: memory, storage, DCP and safetensors."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings, strategies as st
from random_trees import assert_same, blank, tensors, trees
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard as ShardPlacement, distribute_tensor

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.tools.convert import convert
from dlrover.checkpoint.tools.safetensorsfile import NAMES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:.*single process"),
]
many = settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
flat = st.dictionaries(st.text("abc", min_size=1, max_size=3), tensors, min_size=1, max_size=5)


@pytest.fixture
def checkpointer(directory) -> Iterator[Checkpointer]:
    with contextlib.closing(Checkpointer(directory, keep=2, linger=0.0)) as made:
        yield made


def test_memory(checkpointer: Checkpointer):
    @many
    @given(trees)
    def run(state):
        checkpointer.save(1, state)
        target = blank(state)
        assert checkpointer.load(target).source == "memory"
        assert_same(target, state)

    run()


def tied(values: dict) -> dict:
    """With a second name for the first tensor, and a module whose weights are tied."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    return {
        "values": values,
        "again": next(iter(values.values())),
        "module": dict(module.state_dict()),
    }


def test_storage_dcp_and_safetensors(checkpointer: Checkpointer, directory: Path, tmp_path: Path):
    @many
    @given(flat)
    def run(values):
        known = {
            key: t for key, t in values.items() if str(t.dtype).removeprefix("torch.") in NAMES
        }
        state = tied(known or {"a": torch.ones(2)})
        checkpointer.save(7, state, to="storage")
        checkpointer.wait()
        step = directory / "step-7"
        found = blank(state)
        dcp.load(found, checkpoint_id=step, no_dist=True)
        assert_same(found, state)
        for name in ("x.safetensors", "x.pt"):
            (tmp_path / name).unlink(missing_ok=True)
        convert(directory, tmp_path / "x.safetensors", "safetensors")
        convert(tmp_path / "x.safetensors", tmp_path / "x.pt", "torch")
        assert_same(
            blank_order(torch.load(tmp_path / "x.pt", weights_only=True)), blank_order(state)
        )

    run()


def blank_order(value):
    """The same with dicts in the order of their keys, which formats need not keep."""
    if isinstance(value, dict):
        return {key: blank_order(value[key]) for key in sorted(value)}
    return value


@pytest.fixture
def mesh(tmp_path: Path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_tensors_spread_over_a_mesh(mesh, directory: Path):
    placements = st.sampled_from([Replicate(), ShardPlacement(0), ShardPlacement(1)])
    wholes = st.tuples(st.integers(0, 5), st.integers(0, 5), placements)
    with contextlib.closing(Checkpointer(directory, keep=2, linger=0.0)) as checkpointer:

        @many
        @given(st.lists(wholes, min_size=1, max_size=4))
        def run(shapes):
            whole = [torch.randn(rows, columns) for rows, columns, _ in shapes]
            spread = [[placement] for _, _, placement in shapes]

            def make(made: list[torch.Tensor]) -> dict:
                pairs = enumerate(zip(made, spread, strict=True))
                return {str(n): distribute_tensor(tensor, mesh, p) for n, (tensor, p) in pairs}

            checkpointer.save(3, make(whole), to="storage")
            checkpointer.wait()
            target = make([torch.zeros_like(tensor) for tensor in whole])
            assert checkpointer.load(target).source == "memory"
            stored = make([torch.zeros_like(tensor) for tensor in whole])
            dcp.load(stored, checkpoint_id=directory / "step-3")
            for found in (target, stored):
                assert_same([part.full_tensor() for part in found.values()], whole)

        run()
