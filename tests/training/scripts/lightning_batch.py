"""A Trainer of Lightning with a global batch of 12 rows on any number of workers: directory, last epoch."""

import os
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from dlrover.training.batch import accumulation_steps
from dlrover.training.sampler import ElasticDistributedSampler

directory, last = Path(sys.argv[1]), int(sys.argv[2])
WORKERS = int(os.environ.get("WORLD_SIZE", "1"))


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def training_step(self, batch, index):
        return (self.body(batch)[:, 0] - batch.sum(1)).square().mean()

    def train_dataloader(self):
        return DataLoader(rows, batch_size=2, sampler=ElasticDistributedSampler(rows))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


rows = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
torch.manual_seed(1)
model = Model()
trainer = pl.Trainer(
    max_epochs=last, accelerator="cpu", devices=WORKERS, default_root_dir=directory, logger=False,
    strategy="ddp" if WORKERS > 1 else "auto", enable_progress_bar=False, enable_model_summary=False,
    accumulate_grad_batches=accumulation_steps(12, 2, WORKERS),
    callbacks=[ModelCheckpoint(directory, every_n_epochs=1, save_on_train_epoch_end=True, save_last=True)],
)  # fmt: skip
saved = directory / "last.ckpt"
trainer.fit(model, ckpt_path=str(saved) if saved.exists() else None)
if os.environ.get("RANK", "0") == "0":
    torch.save(model.state_dict(), directory / "end.pt")
