"""A Hugging Face Trainer with dropout, shuffled data and accumulated gradients; a rank dies in a step."""

import logging
import sys
from pathlib import Path

import torch
from mortal import RANK, die_once, tell
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from dlrover.integrations.transformers import FlashCallback

directory, deadly, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
forgetful, early = "forgetful" in sys.argv, "early" in sys.argv
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
if RANK == 0:
    logging.getLogger("dlrover.checkpoint.engine.checkpointer").setLevel(logging.INFO)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )
        self.step = 0

    def forward(self, x, labels):
        loss = (self.body(x)[:, 0] - labels).square().mean()
        if self.training:
            tell(f"loss {self.step} {RANK} {loss.item():.17g}@{x.sum().item():.9g}")
        return {"loss": loss}


class Fate(TrainerCallback):
    def on_substep_end(self, args, state, control, model, **_):
        model.step += 1
        if state.global_step == deadly:
            die_once(directory)

    def on_step_begin(self, args, state, control, model, **_):
        model.step = 2 * state.global_step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop |= state.global_step == last


torch.manual_seed(1)
data = [{"x": torch.randn(8), "labels": torch.randn(())} for _ in range(48)]
flash = FlashCallback(directory / "flash")
trainer = Trainer(
    model=Model(),
    args=TrainingArguments(
        output_dir=str(directory / "out"), max_steps=10, per_device_train_batch_size=3,
        gradient_accumulation_steps=2, logging_steps=1, use_cpu=True, report_to=[], seed=3,
        disable_tqdm=True, learning_rate=0.01, save_steps=4, save_total_limit=1,
        save_strategy="no" if early else "steps", eval_strategy="epoch" if early else "steps", eval_steps=3,
        metric_for_best_model="loss",
    ),
    train_dataset=data,
    eval_dataset=data[:6],
    callbacks=[Fate(), flash, *([EarlyStoppingCallback(1, 100.0)] if early else [])],
)  # fmt: skip
trainer.train(resume_from_checkpoint=None if forgetful else flash.resume())
if RANK == 0:
    logged = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    tell(f"logged {logged} epoch {trainer.state.epoch}")
