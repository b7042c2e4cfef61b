"""Two ranks that train with ``--auto-tunning``, and say what it did: ``tuned.py OUT [MEMORY]``.

With MEMORY, the first rank has room for 6 samples and the other for 12; else the device is asked.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import uncompiled  # noqa: F401 - nothing here is compiled
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dlrover.data.dataloader import ElasticDataLoader
from dlrover.planning import tuning
from dlrover.training import memory
from dlrover.training.sampler import ElasticDistributedSampler
from dlrover.training.trainer import ElasticTrainer

dist.init_process_group("gloo")
rank = dist.get_rank()
memory.STEPS = 3


class Memory:
    """Counters as of a device on which a sample takes 10 bytes."""

    device = "test"

    def begin(self) -> None:
        pass

    def measured(self, size: int) -> tuning.Memory:
        return tuning.Memory({size: 10 * size}, 0, (70, 140)[rank])


if len(sys.argv) > 2:
    memory.DeviceMemory = Memory
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1).double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(480, 4, dtype=torch.float64)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = ElasticDistributedSampler(dataset)
trainer = ElasticTrainer(model, optimizer, sampler, global_batch_size=40, micro_batch_size=2)
workers = 2 * rank  # one rank reads far ahead of the other
loader = ElasticDataLoader(dataset, batch_sampler=trainer.batches, num_workers=workers)
sizes = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        sizes.append(len(x))
        trainer.backward(torch.nn.functional.mse_loss(model(x), y))
        trainer.step()
result = {
    "sizes": sizes,
    "weights": model.module.weight.tolist(),
    "loader": loader._readers is not None,
}
Path(sys.argv[1], f"rank-{os.environ['RANK']}").write_text(json.dumps(result))
dist.destroy_process_group()
