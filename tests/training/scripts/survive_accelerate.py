"""A plain loop with Accelerate that knows nothing of losses: directory, and "resume" to go on after a checkpoint."""

import sys

import torch
from accelerate import Accelerator
from survive_common import SAVE_EVERY, Log, Model, Rows, optimizer_of, schedule_of

torch.manual_seed(1)
log = Log()  # before the process group, so that the replay writes to it, too
model, rows = Model(), Rows()
optimizer = optimizer_of(model)
scheduler = schedule_of(optimizer)
loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
step, goes_on = 0, True
saved = sorted(log.out.glob("saved-*"), key=lambda path: int(path.name[6:]))
if "resume" in sys.argv and saved:
    accelerator.load_state(saved[-1])
    step = int(saved[-1].name[6:])
while goes_on:
    for batch in loader:
        log.saw(batch["index"])
        with accelerator.accumulate(model):
            loss = model(batch["x"], batch["labels"])["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        step += 1
        scheduler.step()
        goes_on = log.step(step, model, scheduler.get_last_lr()[0])
        if step % SAVE_EVERY == 0:
            right = (
                model(batch["x"], batch["labels"])["logits"].argmax(1) == batch["labels"]
            ).float()
            accelerator.print("right", step, float(accelerator.gather_for_metrics(right).mean()))
            accelerator.save_state(log.out / f"saved-{step}")
        if not goes_on:
            break
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    log.end(accelerator.unwrap_model(model))
accelerator.end_training()
