"""Accelerate with dropout, shuffled data and a registered object; a rank dies between two steps."""

import logging
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from mortal import RANK, die_once, tell

from dlrover.integrations.accelerate import FlashAccelerator

directory, deadly, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
storage_every, seed = int(sys.argv[4]), int(sys.argv[5])
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
if RANK == 0:
    logging.getLogger("dlrover.checkpoint.engine.checkpointer").setLevel(logging.INFO)


class Seen:
    def __init__(self):
        self.numbers = set()

    def state_dict(self):
        return {"numbers": self.numbers}

    def load_state_dict(self, state):
        self.numbers = state["numbers"]


configuration = DataLoaderConfiguration(use_seedable_sampler="unseeded" not in sys.argv)
accumulated = 2 if "accumulated" in sys.argv else 1
accelerator = Accelerator(
    cpu=True, dataloader_config=configuration, gradient_accumulation_steps=accumulated
)
torch.manual_seed(seed)
model = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.Dropout(0.3), torch.nn.Linear(17, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
data = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
seen = Seen()
accelerator.register_for_checkpointing(seen)
if "hooked" in sys.argv:
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
flash = FlashAccelerator(accelerator, directory / "flash")
record = flash.load_state()
step = record.step if record is not None else 0
assert seen.numbers == set(range(step))
whole = len(loader) if "whole" in sys.argv and record is not None else 0
while step < last:
    epoch, batches = divmod(step, len(loader))
    batches, whole = batches or whole, 0  # the first epoch may be one of which nothing is left
    if "uncounted" not in sys.argv:
        loader.set_epoch(epoch)
    for batch in flash.skip_first_batches(loader, batches):
        with accelerator.accumulate(model):
            loss = (model(batch)[:, 0] - batch.sum(1)).square().mean()
            tell(f"loss {step} {RANK} {loss.item():.17g}@{batch.sum().item():.9g}")
            if step == deadly:
                die_once(directory)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen.numbers.add(step)
        step += 1
        flash.save_state(step, to="memory" if step % storage_every else "storage")
        if step == last:
            break
flash.close()
accelerator.end_training()
