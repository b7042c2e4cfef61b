"""Published runs as the planner sees them. The data are not in the repository: ``parallel.py`` takes their folder."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrover.accelerate import Cluster, Strategy, Transformer

GIB = 1 << 30


@dataclass(frozen=True)
class Run:
    """One run: what was trained and how, and what was measured."""

    model: str
    shape: Transformer
    strategy: Strategy
    cluster: Cluster
    sequence: int
    global_batch: int
    seconds: float = 0.0
    reserved: float = 0.0
    """GiB that the allocator reserved on the fullest rank, or 0."""
    allocated: float = 0.0
    """GiB allocated at the peak, or 0."""
    stage: str = ""
    """The stage whose memory it is: ``first`` or ``last``; empty for the fullest one."""
    failed: bool = False


def read(folder: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with (folder / name).open() as file:
        return list(csv.DictReader(file))


# nanotron's models: layers, hidden, ffn, heads, tied; as many heads of keys as of queries
NANOTRON = {
    "1B": (16, 2048, 8192, 32, True),
    "3B": (28, 3072, 8192, 32, True),
    "8B": (32, 4096, 14336, 32, False),
    "80B": (80, 8192, 28672, 64, False),
}


def playbook(folder: Path) -> list[Run]:
    """Ultra-Scale Playbook: nanotron on H100, 256 sequences of 4096 tokens a step.

    In runs with one micro-batch, whose last stage needs most, the memory is that of the first one.
    """
    runs = []
    for row in read(folder, "playbook_unique.csv"):
        layers, hidden, ffn, heads, tied = NANOTRON[row["model"]]
        shape = Transformer(
            layers, hidden, ffn, heads, heads, 131072, tied=tied, copied_gradients=True
        )
        dp, pp, tp = int(row["DP"]), int(row["PP"]), int(row["TP"])
        strategy = Strategy(
            dp_shard=dp, zero=int(row["ZeRO"]), pp=pp, tp=tp, micro_batch=int(row["MBS"])
        )
        cluster = Cluster("h100-80", int(row["Nodes"]))
        if row["status"] != "ok":
            runs.append(Run(row["model"], shape, strategy, cluster, 4096, 256, failed=True))
            continue
        seconds = 256 * 4096 / (float(row["tok_s_gpu"]) * dp * pp * tp)
        memory = float(row["mem_gb"])
        runs.append(
            Run(row["model"], shape, strategy, cluster, 4096, 256, seconds, memory, stage="first")
        )
    return runs


def vtrain(folder: Path, name: str) -> list[Run]:
    """The validation runs of vTrain: Megatron-DeepSpeed on A100, everything recomputed."""
    runs = []
    for row in read(folder, f"vtrain_{name}.csv"):
        values = [float(value) for value in row.values()]
        size = values.pop(0) if name == "multi" else 0.0
        gpus, batch, micro, hidden, heads, layers, sequence, tp, dp, pp = map(int, values[:-1])
        shape = Transformer(layers, hidden, 4 * hidden, heads, heads, 51200, tied=True, gated=False)
        strategy = Strategy(dp_replicate=dp, tp=tp, pp=pp, micro_batch=micro, recompute="full")
        cluster = Cluster("a100-80", max(1, gpus // 8), min(8, gpus))
        model = f"{size}B" if size else f"{hidden} x {layers}"
        runs.append(Run(model, shape, strategy, cluster, sequence, batch, values[-1] / 1e3))
    return runs


MPT = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16),
    "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}  # fmt: skip


def foundry(folder: Path, kind: str, precision: str = "bf16") -> list[Run]:
    """llm-foundry's table for A100 or H100: FSDP; in fp8, with Transformer Engine's layers."""
    runs = []
    for row in read(folder, "llmfoundry.csv"):
        if ("fp8" in row["Precision"]) != (precision == "fp8") or not row["GPU"].startswith(kind):
            continue
        layers, hidden, heads = MPT[row["Model"]]
        shape = Transformer(
            layers, hidden, 4 * hidden, heads, heads, 50368, True, False, fused=precision == "fp8"
        )
        gpus, batch, sequence = (
            int(row[name]) for name in ("# GPUs", "GlobalBatchSize", "SeqLen (T)")
        )
        strategy = Strategy(
            dp_shard=gpus,
            zero=3 if row["Sharding Strategy"] == "FULL_SHARD" else 2,
            micro_batch=int(row["MicroBatchSize"]),
            recompute="full" if row["Activation Checkpointing"] == "True" else "none",
            precision=precision,
        )
        accelerator = row["GPU"].replace("_", "-").removesuffix("gb")
        cluster = Cluster(accelerator, max(1, gpus // 8), min(8, gpus))
        seconds = batch * sequence / (float(row["Throughput (T/s/GPU)"]) * gpus)
        runs.append(Run(row["Model"], shape, strategy, cluster, sequence, batch, seconds))
    return runs


LLAMA_70B = (8192, 28672, 64, 8, 128256)
LLAMA_405B = (16384, 53248, 128, 8, 128256)


DEEPSEEK = {  # SimuMax's excerpts of DeepSeek V2 and V3 have one layer without experts
    "deepseekv2": {
        "hidden": 5120, "ffn": 1536, "vocab": 102400, "experts": 160, "experts_per_token": 6,
        "shared_experts": 2, "dense_ffn": 12288,
    },
    "deepseekv3": {
        "hidden": 7168, "ffn": 2048, "vocab": 129280, "experts": 256, "experts_per_token": 8,
        "shared_experts": 1, "dense_ffn": 18432,
    },
}  # fmt: skip
LATENT = {
    "heads": 128, "kv_heads": 128, "head_dim": 128, "q_lora": 1536, "kv_lora": 512, "rope_dim": 64,
    "value_dim": 128, "dense_layers": 1,
}  # fmt: skip


def simumax(folder: Path, *, timed: bool = False) -> list[Run]:
    """SimuMax's runs of Llama 3 and DeepSeek on 8 B200, with Megatron-LM's fused activation and loss.

    Each memory is there once, since the number of micro-batches does not change it, unless times are wanted.
    """
    runs = []
    for row in json.loads((folder / "simumax_b200.json").read_text())["rows"]:
        case = row["case"]
        if not timed and row["mbc"] != 4:
            continue
        found = {key: int(value) for key, value in re.findall(r"(tp|pp|cp|dp|ep|seq)(\d+)", case)}
        name, layers = row["model"], row["layer_num"]
        if name in DEEPSEEK:
            shape = Transformer(layers, **DEEPSEEK[name], **LATENT, fused=True)
        else:
            size = LLAMA_405B if "405b" in name else LLAMA_70B
            shape = Transformer(layers, *size, fused=True)
        strategy = Strategy(
            dp_shard=found.get("dp", 1), zero=1, tp=found.get("tp", 1), pp=found.get("pp", 1),
            cp=found.get("cp", 1), ep=found.get("ep", 1),
        )  # fmt: skip
        sequence = found.get("seq", 4096)
        runs.append(
            Run(
                f"{name} {sequence}", shape, strategy, Cluster("b200"), sequence,
                row["mbc"] * strategy.dp, row["real_ms"] / 1e3, row["real_reserved_gib"],
                row["real_alloc_gib"],
            )
        )  # fmt: skip
    return runs


LARGE = {  # Megatron's tests of large models, and the accelerators that they run on
    "gpt/gpt3_7b_": 8, "gpt/gpt3_15b_8t_release": 128, "mixtral/mixtral_8x7b": 64,
    "mixtral/mixtral_8x22b": 128,
}  # fmt: skip
VOCABULARY = {"gpt/gpt3_15b_8t_release": 256000, "mixtral/": 32000}


def megatron(folder: Path) -> list[Run]:
    """Peaks of Megatron-LM's functional tests of large models, which are those of the last rank."""
    runs = []
    for row in json.loads((folder / "megatron_golden.json").read_text()):
        size = next((n for prefix, n in LARGE.items() if row["name"].startswith(prefix)), 0)
        if size and row["peak"]:
            runs.append(_megatron(row["name"], row["args"], row["peak"] / GIB, size))
    return runs


def _megatron(name: str, given: dict[str, Any], peak: float, size: int) -> Run:
    def number(key: str, default: int) -> int:
        found = re.match(r"\d+", str(given.get(f"--{key}", "")))
        return int(found[0]) if found else default

    layers, hidden = number("num-layers", 0), number("hidden-size", 0)
    heads, experts = number("num-attention-heads", 0), number("num-experts", 0)
    vocab = next((n for prefix, n in VOCABULARY.items() if name.startswith(prefix)), 0)
    shape = Transformer(
        layers, hidden, number("ffn-hidden-size", 4 * hidden), heads, number("num-query-groups", heads),
        number("vocab-size", vocab), gated="--swiglu" in given, experts=experts,
        tied="--untie-embeddings-and-output-weights" not in given,
    )  # fmt: skip
    tp, pp = number("tensor-model-parallel-size", 1), number("pipeline-model-parallel-size", 1)
    each = number("num-layers-per-virtual-pipeline-stage", 0)
    dp = size // (tp * pp)
    strategy = Strategy(
        dp_shard=dp, zero=1, tp=tp, pp=pp, virtual=layers // pp // each if each else 1,
        ep=number("expert-model-parallel-size", 1), micro_batch=number("micro-batch-size", 1),
        sequence_parallel="--sequence-parallel" in given,
    )  # fmt: skip
    batch = number("global-batch-size", dp * strategy.micro_batch * 8)
    cluster, sequence = Cluster("h100-80", size // 8), number("seq-length", 4096)
    return Run(name, shape, strategy, cluster, sequence, batch, allocated=peak, stage="last")


def torchtitan() -> list[Run]:
    """Llama on H100 of 96 GB, from torchtitan's pages: docs/performance of 2024-12, and pull request 165."""
    llama3 = Transformer(32, 4096, 14336, 32, 8, 128256)
    llama2 = Transformer(32, 4096, 11008, 32, 32, 32000)
    return [
        *_titan("Llama 3 8B", llama3, _LLAMA3),
        *_titan("Llama 2 7B", llama2, _LLAMA2),
        *_titan("Llama 3 70B", Transformer(80, *LLAMA_70B), _LLAMA70),
        *_titan("Llama 3 405B", Transformer(126, *LLAMA_405B), _LLAMA405),
    ]


def _titan(name: str, shape: Transformer, rows: Any) -> Iterator[Run]:
    for fields, sequence, batch, memory in rows:
        strategy = Strategy(**fields)
        cluster = Cluster("h100-96", strategy.size // 8)
        yield Run(name, shape, strategy, cluster, sequence, batch, reserved=memory)


FP8 = [  # torchtitan, Llama 3 8B compiled: ranks, and tokens a second of each in bf16 and in fp8
    (8, 6667, 8532),
    (128, 6514, 8380),
]


_OP = {"micro_batch": 2, "recompute": "selective"}
_LONG = {"recompute": "full", "compile": True}
_LLAMA3 = [
    ({"dp_shard": 8, **_OP}, 8192, 16, 82.4),
    ({"dp_shard": 8, **_OP, "compile": True}, 8192, 16, 77.0),
    ({"dp_shard": 128, **_OP}, 8192, 256, 67.0),
    ({"dp_shard": 128, **_OP, "compile": True}, 8192, 256, 62.0),
    ({"dp_shard": 8, **_LONG}, 32768, 8, 83.9),
    ({"dp_shard": 4, "cp": 2, **_LONG}, 65536, 4, 84.2),
    ({"dp_shard": 2, "cp": 4, **_LONG}, 131072, 2, 84.0),
    ({"dp_shard": 1, "cp": 8, **_LONG}, 262144, 1, 84.5),
]
_LLAMA2 = [
    ({"dp_shard": 8, "micro_batch": 8, "recompute": "full"}, 2048, 64, 31.0),
    ({"dp_shard": 8, "micro_batch": 8, "recompute": "selective"}, 2048, 64, 59.4),
    ({"dp_shard": 8, "micro_batch": 8, "compile": True}, 2048, 64, 90.3),
]
_LLAMA70 = [({"dp_shard": 32, "tp": 8, "micro_batch": 16, **_LONG}, 8192, 512, 71.9)]
# the micro-batch is not published: this is the largest one with which a pipeline of 8 stages is full
_LLAMA405 = [({"dp_shard": 8, "tp": 8, "pp": 8, "micro_batch": 4, **_LONG}, 8192, 256, 82.5)]
