"""A Lightning Trainer with a ModelCheckpoint at every step; a rank dies before an optimizer's step."""

import logging
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from mortal import RANK, RANKS, die_once, tell

from dlrover.integrations.lightning import FlashCheckpointIO, FlashDDPStrategy

directory, deadly, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
storage_every, resume = int(sys.argv[4]), sys.argv[5]
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
if RANK == 0:
    logging.getLogger("dlrover.checkpoint.engine.checkpointer").setLevel(logging.INFO)


class Model(pl.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.body = torch.nn.Sequential(torch.nn.Linear(width, 17), torch.nn.Linear(17, 1))

    def training_step(self, batch, index):
        generator = torch.Generator().manual_seed(100 * self.global_step + RANK)
        batch = torch.randn(4, 8, generator=generator)
        loss = (self.body(batch)[:, 0] - batch.sum(1)).square().mean()
        tell(f"loss {self.global_step} {RANK} {loss.item():.17g}")
        return loss

    def on_before_optimizer_step(self, optimizer):
        if self.global_step == deadly:
            die_once(directory)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


pl.seed_everything(1)
flash = FlashCheckpointIO(directory / "flash", storage_every=storage_every)
files, weights = directory / "files", directory / "weights"
plain = "plain-ddp" in sys.argv
trainer = pl.Trainer(
    max_steps=last, accelerator="cpu", devices=RANKS, default_root_dir=directory, logger=False,
    strategy="ddp" if plain else FlashDDPStrategy() if RANKS > 1 else "auto",
    plugins=[flash], enable_progress_bar=False, enable_model_summary=False,
    callbacks=[
        ModelCheckpoint(files, every_n_train_steps=1, save_last=True),
        ModelCheckpoint(weights, every_n_train_steps=5, save_weights_only=True, filename="{step}"),
    ],
)  # fmt: skip
data = torch.utils.data.DataLoader(torch.zeros(RANKS * 4, 1))
path = "last" if resume == "last" else None if resume == "none" else str(files / resume)
trainer.fit(Model(), data, ckpt_path=path, weights_only=False)
tell(f"files {sorted(path.name for path in files.iterdir())}")
if RANK == 0:
    for path in weights.glob("*"):
        tell(f"weights {path.name} {[*torch.load(path)['state_dict']]}")
