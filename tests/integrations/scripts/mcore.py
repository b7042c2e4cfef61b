"""A GPT of Megatron-core, its tensors spread over the ranks; a rank dies between two steps.

With ``copy`` nothing is learned: each step is saved again, as this layout has it.
"""

import contextlib
import logging
import sys
import warnings
from pathlib import Path
from unittest import mock

import torch

warnings.simplefilter("ignore")

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.optimizer import (  # noqa: E402
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # noqa: E402
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from mortal import RANK, die_once, tell  # noqa: E402

from dlrover.checkpoint import Checkpointer  # noqa: E402
from dlrover.integrations.megatron import FlashLoad, FlashSave  # noqa: E402

directory, deadly, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
storage_every, tensor_parallel = int(sys.argv[4]), int(sys.argv[5])
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
if RANK == 0:
    logging.getLogger("dlrover.checkpoint.engine.checkpointer").setLevel(logging.INFO)

# Megatron-core asks for a GPU in places that a CPU can do without
mock.patch.object(torch.cuda, "current_device", return_value="cpu").start()
mock.patch.object(CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()).start()

torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
torch.manual_seed(1)
config = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, ffn_hidden_size=24, gated_linear_unit=True,
    use_cpu_initialization=True, tensor_model_parallel_size=tensor_parallel, hidden_dropout=0.0,
    attention_dropout=0.0, add_bias_linear=False, activation_func=torch.nn.functional.silu,
    masked_softmax_fusion=False, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
)  # fmt: skip
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
optimizer.state.update(
    {
        parameter: {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        for parameter in model.parameters()
    }
)


def sharded_state(step: int, learned: int) -> dict:
    weights, moments = model.sharded_state_dict(), optimizer.state_dict()
    ids = get_param_id_to_sharded_param_map(weights, model.parameters())
    optim_state_to_sharding_state(moments, ids, exclude_keys=("step",))
    return {"model": weights, "optimizer": moments, "step": step, "learned": learned}


def learn(number: int) -> None:
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(number))
    mask = torch.triu(torch.ones(1, 1, 8, 8, dtype=torch.bool), 1)
    places = torch.arange(8).expand(2, 8)
    loss = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:]).mean()
    tell(f"loss {number} {RANK} {loss.item():.17g}")
    if number == deadly:
        die_once(directory)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


replicas = parallel_state.get_data_parallel_group()
checkpointer = Checkpointer(directory / "flash")
flash = FlashLoad(checkpointer, trusted=True)
folder = flash.newest()
step = learned = 0
if folder is not None:
    state = dist_checkpointing.load(
        sharded_state(0, 0), folder, sharded_strategy=flash, common_strategy=flash
    )
    step, learned = state["step"], state["learned"]
    for moments in state["optimizer"]["state"].values():
        moments["step"] = torch.tensor(float(learned))
    optimizer.load_state_dict(state["optimizer"])
    model.load_state_dict(state["model"])
out = directory / "out"
out.mkdir(exist_ok=True)
while step < last:
    if "copy" not in sys.argv:
        learn(learned)
        learned += 1
    step += 1
    where = "memory" if step % storage_every else "storage"
    strategy = FlashSave(checkpointer, step, to=where)
    if replicas.size() > 1:  # each of them saves a part
        strategy = FullyParallelSaveStrategyWrapper(strategy, replicas)
    dist_checkpointing.save(sharded_state(step, learned), str(out), sharded_strategy=strategy)
checkpointer.wait()
checkpointer.close()
torch.distributed.destroy_process_group()
