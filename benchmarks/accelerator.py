"""What an accelerator adds: checkpoints of its memory, strategies as predicted and measured, optimizers, survivors.

Run it on a machine with one accelerator; each part prints lines of JSON. ``benchmarks/README.md`` explains every figure.

    python benchmarks/accelerator.py --parts checkpoint strategies optimizers
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checkpoint_training import Row, Training, _ours_torn, finish, overlapped, persisting, seconds

from dlrover.accelerate import Cluster, Strategy, Transformer, auto_accelerate, predict
from dlrover.accelerate.choosing import accelerator_of
from dlrover.checkpoint import Checkpointer
from dlrover.optim import AGD, AdamW8bit, AGD8bit

GIB = 2**30
MODELS = {
    "0.4B": {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096,
             "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000},
    "1.2B": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "3.2B": {"hidden_size": 3072, "num_hidden_layers": 28, "intermediate_size": 8192,
             "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
"""Of Llama's architecture, with tied embeddings; the last two have the sizes of Llama 3.2."""
RUNS = [
    ("0.4B", 2048, 2, "none"), ("0.4B", 2048, 8, "none"), ("0.4B", 2048, 16, "none"), ("0.4B", 2048, 16, "selective"),
    ("0.4B", 2048, 16, "full"), ("0.4B", 8192, 4, "none"), ("0.4B", 8192, 8, "full"),
    ("1.2B", 2048, 1, "none"), ("1.2B", 2048, 4, "none"), ("1.2B", 2048, 4, "selective"), ("1.2B", 2048, 4, "full"),
    ("1.2B", 2048, 8, "full"), ("1.2B", 8192, 1, "none"), ("1.2B", 8192, 2, "full"), ("1.2B", 2048, 16, "none"),
    ("3.2B", 2048, 1, "none"), ("3.2B", 2048, 1, "full"), ("3.2B", 2048, 4, "full"), ("3.2B", 2048, 16, "none"),
]  # fmt: skip
"""Model, sequence, micro-batch, recomputation."""
STEPS = 6
SHAPES = [(32000, 2048), *[(2048, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (2048,)] * 16]
"""Of the optimizers' parameters: 738 million in 81 tensors."""


# ---- checkpoints


def checkpoint(directory: Path, gigabytes: float) -> Iterator[Row]:
    """Saves and loads of a training's memory, beside one copy of the same bytes into pinned memory."""
    training = Training(gigabytes, width=8192, device="cuda", batch=16384)
    nbytes = sum(tensor.nbytes for tensor in training.tensors().values())
    limit = _Pinned(nbytes)
    checkpointer = Checkpointer(directory / "saves", keep=1, linger=0.0)
    checkpointer.load(training.state)
    time.sleep(3.0 + nbytes / 1e9)
    first = seconds(lambda: checkpointer.save(1, training.state))
    yield {"what": "first save", "seconds": first, "bytes": nbytes, "ratio": first / limit.out()}
    for step in range(2, 5):  # every generation was used once
        checkpointer.save(step, training.state)
    out, back = [], []
    for step in range(5, 10):
        took = seconds(lambda n=step: checkpointer.save(n, training.state))
        out.append((took, took / limit.out()))
        time.sleep(0.3 + nbytes / 5e9)  # until the saver has computed the checksums
        took = seconds(lambda: checkpointer.load(training.state))
        back.append((took, took / limit.back()))
    for what, found in (("save to memory", out), ("load from memory", back)):
        times, ratios = zip(*found, strict=True)
        yield {
            "what": what, "seconds": statistics.median(times), "ratio": statistics.median(ratios),
            "bytes_per_second": nbytes / statistics.median(times),
        }  # fmt: skip
    checkpointer.close()
    del limit
    yield {"what": "a step of the training", "seconds": seconds(training.step)}
    yield from overlapped(training, directory, 5)
    yield from persisting(training, directory, 2)
    repeats = 20
    torn = _ours_torn(Training(0.5, device="cuda"), directory, repeats)
    yield {"what": "torn, overlapped", "of": repeats, "torn": torn}


class _Pinned:
    """The limit: one copy between the accelerator and pinned memory."""

    def __init__(self, nbytes: int) -> None:
        self._device = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
        self._host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)

    def out(self) -> float:
        """Seconds to host memory."""
        return seconds(lambda: self._host.copy_(self._device))

    def back(self) -> float:
        """Seconds to the accelerator."""
        return seconds(lambda: self._device.copy_(self._host))


# ---- strategies


def strategies(_directory: Path, _gigabytes: float) -> Iterator[Row]:
    """Memory and step time of strategies for one accelerator, as predicted and as measured."""
    name = accelerator_of(torch.device("cuda", 0))
    for model, sequence, micro_batch, recompute in RUNS:
        shape = replace(Transformer.of(_config(model, sequence)), autocast=True)
        strategy = replace(Strategy(), zero=0, micro_batch=micro_batch, recompute=recompute)
        told = predict(
            shape, strategy, Cluster(name, 1, 1), sequence=sequence, global_batch=micro_batch
        )
        row = {
            "what": f"{model}, {sequence} tokens, micro-batch {micro_batch}, recompute {recompute}",
            "fits": told.fits, "predicted_gib": told.memory_gib, "active_gib": told.active_gib,
            "low_gib": told.memory_low, "high_gib": told.memory_high, "predicted_seconds": told.step_seconds,
        }  # fmt: skip
        yield row | _measured(model, sequence, strategy, told)


def _config(model: str, sequence: int) -> Any:
    from transformers import LlamaConfig  # noqa: PLC0415 - for this part only

    return LlamaConfig(
        **MODELS[model],
        tie_word_embeddings=True,
        max_position_embeddings=sequence,
        use_cache=False,
        attn_implementation="sdpa",
    )


def _measured(model: str, sequence: int, strategy: Strategy, told: Any) -> Row:
    from transformers import LlamaForCausalLM  # noqa: PLC0415 - for this part only

    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < GIB // 4, "the model before is still there"
    torch.cuda.reset_peak_memory_stats()
    result = None
    try:
        with torch.device("meta"):
            made = LlamaForCausalLM(_config(model, sequence))
        _, result, _ = auto_accelerate(
            made, torch.optim.AdamW, model_input_format="unpack_dict", load_strategy=strategy,
            optim_args={"lr": 1e-4, "fused": True}, batch_size=strategy.micro_batch,
        )  # fmt: skip
        words = torch.randint(32000, (strategy.micro_batch, sequence), device="cuda")
        data = {"input_ids": words, "labels": words}

        def step() -> None:
            result.loss_func(data, result.model(**data)).backward()
            result.optim.step()
            result.optim.zero_grad()

        step()
        step()
        took = statistics.median(seconds(step) for _ in range(STEPS))
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)
        return {"measured_gib": None}
    reserved = torch.cuda.max_memory_reserved() / GIB
    return {
        "measured_gib": reserved, "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "measured_seconds": took, "memory_error": told.memory_gib / reserved - 1,
        "active_error": told.active_gib * GIB / torch.cuda.max_memory_allocated() - 1,
        "time_error": told.step_seconds / took - 1,
    }  # fmt: skip


# ---- optimizers


def optimizers(_directory: Path, _gigabytes: float) -> Iterator[Row]:
    """Whole steps of optimizers, beside PyTorch's fused AdamW in the same rounds."""
    contenders: dict[str, Callable[[Any], Any]] = {
        "torch AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
        "torch AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "AGD": AGD,
        "AdamW8bit": AdamW8bit,
        "AGD8bit": AGD8bit,
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name, make in contenders.items():  # one after the other: all at once would not fit
        parameters = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]
        for each in parameters:
            each.grad = torch.randn_like(each)
        try:
            optimizer = make(parameters)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            for _ in range(12):
                times[name].append(seconds(lambda one=optimizer: one.step()))
        except Exception as error:  # noqa: BLE001 - the others still run
            yield {"what": name, "error": repr(error)[:300]}
            continue
        took = statistics.median(times[name][2:])
        beside = statistics.median(times["torch AdamW, fused"][2:])
        yield {
            "what": name, "seconds": took, "ratio": took / beside, "state_bytes": torch.cuda.memory_allocated() - before,
            "peak_bytes": torch.cuda.max_memory_allocated() - before,
        }  # fmt: skip
        del optimizer, parameters, each
        torch.cuda.empty_cache()


PARTS: dict[str, Callable[[Path, float], Iterator[Row]]] = {
    "checkpoint": checkpoint,
    "strategies": strategies,
    "optimizers": optimizers,
}


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--gigabytes", type=float, default=12.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    machine = {
        "accelerator": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip
    print(json.dumps(machine), flush=True)
    rows = []
    directory = Path(tempfile.mkdtemp(prefix="accelerator-"))
    try:
        for part in args.parts:
            for row in PARTS[part](directory, args.gigabytes):
                rows.append({"part": part, **row})
                print(json.dumps(rows[-1]), flush=True)
    finally:
        finish()
        shutil.rmtree(directory, ignore_errors=True)
        if args.out:
            args.out.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
