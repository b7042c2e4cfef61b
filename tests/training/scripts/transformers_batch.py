"""A Trainer of Transformers with a global batch of 12 rows on any number of workers: directory, last step."""

import os
import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from dlrover.training.batch import accumulation_steps

directory, last = Path(sys.argv[1]), int(sys.argv[2])
WORKERS = int(os.environ.get("WORLD_SIZE", "1"))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def forward(self, x, labels):
        return {"loss": (self.body(x)[:, 0] - labels).square().mean()}


generator = torch.Generator().manual_seed(0)
rows = [{"x": x, "labels": x.sum()} for x in torch.randn(96, 8, generator=generator)]
torch.manual_seed(1)
model = Model()
arguments = TrainingArguments(
    output_dir=str(directory),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=accumulation_steps(12, 2, WORKERS),
    max_steps=last,
    save_steps=5,
    learning_rate=0.01,
    lr_scheduler_type="constant",
    optim="sgd",
    dataloader_drop_last=True,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
saved = sorted(directory.glob("checkpoint-*"))
Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=bool(saved))
if os.environ.get("RANK", "0") == "0":
    torch.save(model.state_dict(), directory / "end.pt")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # otherwise a rank can abort as it ends, as others leave
