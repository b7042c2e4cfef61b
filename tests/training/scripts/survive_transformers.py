"""A Trainer of Transformers that knows nothing of losses: directory; it goes on after its newest checkpoint."""

from pathlib import Path

from survive_common import SAVE_EVERY, Log, Model, Rows, optimizer_of, schedule_of
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Writing(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, lr_scheduler=None, **_):
        control.should_training_stop |= not log.step(
            state.global_step, model, lr_scheduler.get_last_lr()[0]
        )


class Logged(Trainer):
    def training_step(self, model, inputs, *args):
        log.saw(inputs.pop("index"))
        return super().training_step(model, inputs, *args)

    def prediction_step(self, model, inputs, *args, **kwargs):
        inputs.pop("index")
        return super().prediction_step(model, inputs, *args, **kwargs)


log = Log()
saved = Path(log.out / "saved")
arguments = TrainingArguments(
    output_dir=str(saved), per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=5000,
    max_grad_norm=1.0, logging_steps=SAVE_EVERY, eval_strategy="steps", eval_steps=SAVE_EVERY,
    save_strategy="steps", save_steps=SAVE_EVERY, metric_for_best_model="loss", load_best_model_at_end=False,
    remove_unused_columns=False, report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
model, rows = Model(), Rows()
optimizer = optimizer_of(model)
trainer = Logged(
    model, arguments, train_dataset=rows, eval_dataset=[rows[i] for i in range(64)], callbacks=[Writing()],
    optimizers=(optimizer, schedule_of(optimizer)),
    compute_metrics=lambda p: {"right": float((p.predictions.argmax(1) == p.label_ids).mean())},
)  # fmt: skip
trainer.train(resume_from_checkpoint=get_last_checkpoint(saved) if saved.exists() else None)
trainer.save_model(str(log.out / "final"))
if arguments.process_index == 0:
    log.end(model)
    trainer.state.save_to_json(str(log.out / "state.json"))
