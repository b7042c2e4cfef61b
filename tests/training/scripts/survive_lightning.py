"""A Trainer of Lightning that knows nothing of losses: directory."""

import os

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from survive_common import SAVE_EVERY, Log, Model, Rows, optimizer_of, schedule_of
from torch.utils.data import DataLoader, Subset


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, batch, index):
        loss = self.model(batch["x"], batch["labels"])["loss"]
        self.log("train", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.model(batch["x"], batch["labels"])["loss"], sync_dist=True)
        self.log("steps", float(self.trainer.global_step), sync_dist=True)

    def configure_optimizers(self):
        optimizer = optimizer_of(self)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule_of(optimizer), "interval": "step"},
        }


class Writing(Callback):
    seen = 0

    def on_train_batch_start(self, trainer, module, batch, index):
        log.saw(batch["index"])

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step > self.seen:
            self.seen = trainer.global_step
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            trainer.should_stop = not log.step(self.seen, module, rate)


log = Log()
saving = ModelCheckpoint(
    log.out / "saved",
    "{step}",
    monitor="val",
    save_top_k=3,
    save_last=True,
    every_n_train_steps=SAVE_EVERY,
)
trainer = pl.Trainer(
    max_epochs=1000, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp",
    default_root_dir=log.out, accumulate_grad_batches=2, gradient_clip_val=1.0, val_check_interval=2 * SAVE_EVERY,
    check_val_every_n_epoch=None, enable_progress_bar=False, enable_model_summary=False, logger=False,
    callbacks=[Writing(), saving, EarlyStopping("steps", mode="max", patience=2)],
)  # fmt: skip
module, rows = Module(), Rows()
trainer.fit(module, DataLoader(rows, 8, shuffle=True), DataLoader(Subset(rows, range(64)), 32))
if trainer.global_rank == 0:
    log.end(module.model)
    (log.out / "best").write_text(saving.best_model_path)
