"""Shards and an FSDP model in the manner of the original's examples."""

import os
import sys

import torch
import torch.distributed as dist
from atorch.data.elastic_dataset import ElasticDataset
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from dlrover.python.elastic_agent.sharding.client import IndexShardingClient, ShardingClient
from dlrover.python.elastic_agent.tensorflow.hooks import ElasticDataShardReportHook
from dlrover.trainer.tensorflow.reader.file_reader import FileReader
from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer, StorageType

out, phase = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()


def note(what, values):
    with open(f"{out}/{what}-{rank}", "a") as file:
        file.writelines(f"{value}\n" for value in values)


class Squares(ElasticDataset):
    def __init__(self):
        super().__init__("squares", 50, 4, 2, True)

    def read_sample(self, index):
        return index, index * index


def shards():
    client = ShardingClient(
        "rows",
        batch_size=4,
        num_epochs=2,
        dataset_size=50,
        shuffle=True,
        num_minibatches_per_shard=2,
    )
    hook = ElasticDataShardReportHook(client)
    while True:
        shard = client.fetch_shard()
        if not shard:
            break
        note("shards", range(shard.start, shard.end))
        for _ in range(shard.start, shard.end, 4):
            hook.after_run(None, None)

    indices = IndexShardingClient(
        dataset_name="indices",
        batch_size=5,
        num_epochs=1,
        dataset_size=40,
        storage_type="text",
        shuffle=True,
    )
    try:
        while True:
            note("indices", [indices.fetch_sample_index()])
            indices.report_batch_done(1)
    except StopIteration:
        pass

    dataset = Squares()
    for numbers, squares in DataLoader(dataset, batch_size=4, num_workers=2):
        assert (numbers**2 == squares).all()
        note("dataset", numbers.tolist())
        dataset.report_batch_done(len(numbers))

    reader = FileReader(f"{out}/table.csv", batch_size=3)
    for line in reader.iterator():
        note("lines", [line])
        reader.data_shard_client.report_batch_done(1)


def fsdp():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
    if phase == "first":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = FsdpShardCheckpointer(f"{out}/fsdp")
    extra = checkpointer.load_checkpoint(model, optimizer)
    if phase == "first":
        assert extra == {}
        for step in range(1, 4):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.save_checkpoint(
                step, model, optimizer, {"step": step}, storage_type=StorageType.DISK
            )
        checkpointer.wait_latest_checkpoint()
    whole = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    moments = [
        getattr(m, "full_tensor", lambda m=m: m)()
        for m in (s["exp_avg"] for s in optimizer.state.values())
    ]
    if rank == 0:
        torch.save((whole, moments, extra), f"{out}/fsdp-{phase}.pt")


if phase == "first":
    shards()
fsdp()
dist.barrier()
os.write(1, b"done\n")
