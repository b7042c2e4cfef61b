"""DeepSpeed with one of its ZeRO stages; a rank dies between two of its optimizer's steps."""

import logging
import sys
from pathlib import Path

import deepspeed
import torch
from mortal import RANK, die_once, tell

from dlrover.integrations.deepspeed import attach

directory, deadly, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
stage, storage_every = int(sys.argv[4]), int(sys.argv[5])
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
if RANK == 0:
    logging.getLogger("dlrover.checkpoint.engine.checkpointer").setLevel(logging.INFO)

deepspeed.init_distributed("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.Tanh(), torch.nn.Linear(17, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    lr_scheduler=schedule,
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    },
)
flash = None
if "plain" not in sys.argv:
    flash = attach(engine, directory / "flash", storage_every=storage_every, trusted=True)
folder, client = engine.load_checkpoint(str(directory / "out"))
if folder is not None:
    assert client["seen"] == {"steps": engine.global_steps, "size": torch.Size([2])}
for step in range(engine.global_steps, last):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + RANK))
    loss = (engine(batch)[:, 0] - batch.sum(1)).square().mean()
    tell(f"loss {step} {RANK} {loss.item():.17g}")
    engine.backward(loss)
    if step == deadly:
        die_once(directory)
    engine.step()
    seen = {"steps": engine.global_steps, "size": torch.Size([2])}
    engine.save_checkpoint(str(directory / "out"), client_state={"seen": seen})
    if "best" in sys.argv:
        engine.save_checkpoint(
            str(directory / "out"), "best", client_state={"seen": seen}, save_latest=False
        )
engine.save_16bit_model(str(directory / "weights"))
if flash is not None:
    flash.cleanup()
torch.distributed.destroy_process_group()
