"""The original's trainer and DeepSpeed checkpointer, in the manner of its examples."""

import os
import sys

import torch

way, out = sys.argv[1:]
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
dies = first and os.environ["RANK"] == "1"


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index % 7)), "labels": torch.tensor(float(index % 7))}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x).squeeze(-1) - labels).pow(2).mean()}


if way == "hf":
    from transformers import TrainerCallback, TrainingArguments

    from dlrover.trainer.torch.flash_checkpoint.hf_trainer import FlashCkptTrainer

    class Mortal(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if dies and state.global_step == 5:
                os._exit(1)

    arguments = TrainingArguments(
        out, max_steps=8, per_device_train_batch_size=4, save_steps=3, save_total_limit=2, report_to="none",
        disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = FlashCkptTrainer(
        model=Model(), args=arguments, train_dataset=Data(), callbacks=[Mortal()]
    )
    last = trainer.get_last_checkpoint()
    result = trainer.train(resume_from_checkpoint=last or None)
    trainer.wait_latest_checkpoint()
    print(f"{'resumed' if last else 'trained'} to {result.global_step}", flush=True)
else:
    import deepspeed

    from dlrover.trainer.torch.flash_checkpoint.deepspeed import DeepSpeedCheckpointer, StorageType

    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=Model(), config=config)
    checkpointer = DeepSpeedCheckpointer(engine, out + "/checkpoints")
    path, client_state = checkpointer.load_checkpoint(out + "/checkpoints")
    begun = engine.global_steps
    while engine.global_steps < 8:
        batch = torch.utils.data.default_collate([Data()[i] for i in range(4)])
        engine.backward(engine(**batch)["loss"])
        engine.step()
        step = engine.global_steps
        if dies and step == 5:
            os._exit(1)
        storage = StorageType.DISK if step % 3 == 0 else StorageType.MEMORY
        checkpointer.save_checkpoint(
            out + "/checkpoints", str(step), {"step": step}, storage_type=storage
        )
    checkpointer.wait_latest_checkpoint()
    print(f"{'resumed' if begun else 'trained'} from {begun} with {client_state}", flush=True)
