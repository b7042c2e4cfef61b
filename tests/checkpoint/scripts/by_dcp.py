"""FSDP1 by way of DCP's own functions: ``by_dcp.py save|load DIR WHERE``; loads on any number of ranks."""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.engine import tree
from dlrover.integrations.dcp import FlashReader, FlashWriter

warnings.simplefilter("ignore")
verb, directory, where = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(5, 11), torch.nn.Tanh(), torch.nn.Linear(11, 3))
model = FullyShardedDataParallel(plain, device_id=torch.device("cpu")) if size > 1 else plain
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model(torch.ones(2, 5)).sum().backward()
optimizer.step()
weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "step": 7, "text": ["any", {"object"}]}


def parts() -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, this rank's part, and what it should be: the content depends on the name alone."""
    found = []
    for key in sorted(weights):
        value = weights[key]
        whole = torch.randn(value.size(), generator=torch.Generator().manual_seed(len(key)))
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                box = shard.metadata
                cut = slices(box.shard_offsets, box.shard_sizes)
                found.append((key, shard.tensor, whole[cut]))
        elif isinstance(value, DTensor):
            box = tree.extent(value)
            found.append((key, value.to_local(), whole[slices(box.at, box.shape)]))
        else:
            found.append((key, value, whole))
    return found


def slices(at: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))


checkpointer = Checkpointer(directory, linger=60.0)
if verb == "save":
    for _, mine, content in parts():
        mine.detach().copy_(content)
    dcp.save(state, storage_writer=FlashWriter(checkpointer, 7, to=where))
    checkpointer.wait()
else:
    state["step"], state["text"] = 0, None
    reader = FlashReader(checkpointer)
    dcp.load(state, storage_reader=reader)
    assert (reader.record.step, reader.record.source) == (7, where), reader.record
    assert (state["step"], state["text"]) == (7, ["any", {"object"}])
    for key, mine, content in parts():
        assert torch.equal(mine, content), key
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    if rank == 0:
        print(f"equal on {size} ranks")  # noqa: T201
checkpointer.close()
dist.destroy_process_group()
