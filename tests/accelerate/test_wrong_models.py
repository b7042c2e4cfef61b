"""What only shows when a model runs: attention that cannot be shared, parts of a pipeline, fp16 and a scheduler, states."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dlrover.accelerate import Cluster, Strategy, auto_accelerate
from dlrover.accelerate.anatomy import analyse
from dlrover.accelerate.choosing import StrategyTask, candidates
from dlrover.accelerate.modes.context import Context
from dlrover.accelerate.modes.pipeline import cut
from dlrover.errors import ConfigurationError
from tests.accelerate.scripts.models import Plain, next_token_loss

pytestmark = pytest.mark.torch


def test_attention_of_its_own_is_refused(alone):
    context = Context(alone, "all_gather")
    part = context.begin(torch.ones(1, 4, 2))
    with pytest.raises(ConfigurationError, match="no block called scaled_dot_product_attention"):
        context.end(part)


def test_attention_to_another_sequence_is_refused(alone):
    context = Context(alone, "all_gather")
    context.begin(torch.ones(1, 4, 2))
    query, key = torch.ones(1, 2, 4, 3), torch.ones(1, 2, 6, 3)
    with pytest.raises(ConfigurationError, match="has 4 queries and 6 keys"):
        context.attend(query, key, key)


@pytest.mark.parametrize("mask", [None, torch.rand(1, 1, 5, 5) > 0.3])
@pytest.mark.parametrize("method", ["all_gather", "ulysses"])
def test_attention_of_one_rank_is_pytorchs(alone, method, mask):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    context = Context(alone, method)
    context.begin(torch.ones(2, 5, 1))
    options = {"attn_mask": mask, "is_causal": mask is None}
    wanted = nn.functional.scaled_dot_product_attention(query, key, value, **options)
    assert torch.allclose(context.attend(query, key, value, **options), wanted, atol=1e-6)


class Chain(Plain):
    """A model whose ``forward`` is as a test wants it, of an embedding and blocks."""

    def __init__(self, forward):
        super().__init__()
        self.seen = forward

    def forward(self, words):
        return self.head(self.norm(self.seen(self.embed(words), self.blocks)))


def in_order(x, blocks):
    for block in blocks:
        x = block(x)
    return x


def halved_first(x, blocks):
    return in_order(x * 0.5, blocks)


def halved_last(x, blocks):
    return in_order(x, blocks) * 0.5


def skip_connection(x, blocks):
    return x + in_order(x, blocks)


def residual_outside(x, blocks):
    for block in blocks:
        x = x + block(x)
    return x


def scaled_between(x, blocks):
    for block in blocks:
        x = block(x) * 0.5
    return x


def mean_of_all(x, blocks):
    found = [x]
    for block in blocks:
        found.append(block(found[-1]))
    return torch.stack(found).mean(0)


def backward(x, blocks):
    return in_order(x, reversed(blocks))


def twice(x, blocks):
    return in_order(in_order(x, blocks), blocks)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (in_order, ""),
        (halved_first, ""),
        (halved_last, ""),
        (skip_connection, "uses after its blocks what it had before them"),
        (residual_outside, "changes what a block returns|uses after its blocks"),
        (scaled_between, "changes what a block returns before the next one gets it"),
        (mean_of_all, "uses after its blocks what it had before them"),
        (backward, "calls its blocks in another order"),
        (twice, "calls its blocks in another order than it lists them, or more than once"),
    ],
)
def test_a_pipeline_takes_a_chain_of_blocks_and_nothing_else(forward, reason):
    model, data = Chain(forward), torch.arange(16)[None]
    anatomy, refusals = analyse(model), []
    for stage in (0, 1):
        grid = SimpleNamespace(strategy=Strategy(pp=2), stage=stage)
        (part,) = cut(copy.deepcopy(model), anatomy, grid, None, next_token_loss)
        hidden = [torch.randn(1, 16, 32)] if stage else []
        try:
            part.check(*hidden, data=data)
        except ConfigurationError as error:
            refusals.append(error)
    assert bool(refusals) == bool(reason)
    assert all(re.search(reason, str(error)) for error in refusals)


def test_the_check_of_a_part_changes_no_buffer():
    class Counting(Plain):
        def __init__(self):
            super().__init__()
            self.register_buffer("passes", torch.zeros(()))
            self.register_buffer("other", torch.zeros(()))

        def forward(self, words):
            self.passes += 1
            self.other = self.other + 1
            return super().forward(words)

    model = Counting()
    grid = SimpleNamespace(strategy=Strategy(pp=2), stage=1)
    (part,) = cut(model, analyse(model), grid, None, next_token_loss)
    part.check(torch.randn(1, 16, 32), data=torch.arange(16)[None])
    assert model.passes == model.other == 0


@pytest.mark.parametrize("degree", ["tp", "cp"])
def test_a_block_that_is_used_twice_is_not_divided(degree, monkeypatch):
    model = Plain()
    model.blocks[3] = model.blocks[0]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"'blocks\.3' of the model is an earlier one"):
        auto_accelerate(model, load_strategy=Strategy(**{degree: 2}))


def test_a_parameter_without_a_dimension_is_trained_and_not_sharded(monkeypatch):
    model = Plain()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    assert auto_accelerate(model, "sgd", load_strategy=[])[0]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="'temperature' of the model has no dimension"):
        auto_accelerate(model, load_strategy=Strategy(dp_shard=2))
    task = StrategyTask(analyse(model), 16, 8)
    assert [one for one, _ in candidates(task, Cluster("h200", 1, 2))] == [Strategy(dp_replicate=2)]


def test_a_loss_of_routers_is_that_of_all_blocks(monkeypatch):
    model = Plain()
    model.config = SimpleNamespace(output_router_logits=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="output_router_logits is True"):
        auto_accelerate(model, load_strategy=Strategy(pp=2))


def test_a_scheduler_beside_the_scale_of_fp16():
    model = Plain()
    _, result, _ = auto_accelerate(
        model, "adamw", [torch.arange(16)] * 4, next_token_loss, dataloader_args={"batch_size": 2},
        load_strategy=Strategy(precision="fp16"), lr_scheduler_cls=torch.optim.lr_scheduler.StepLR,
        lr_scheduler_args={"step_size": 1},
    )  # fmt: skip
    before = model.head.weight.detach().clone()
    for data in result.dataloader:
        result.loss_func(data, result.model(data)).backward()
        result.optim.step()
        result.lr_scheduler.step()
    assert not torch.equal(before, model.head.weight)
    assert result.lr_scheduler.get_last_lr() == pytest.approx([1e-5])
    with pytest.raises(ConfigurationError, match="accepted with fp16 is none"):
        result.optim.step(lambda: None)


def test_an_overflow_leaves_out_the_step():
    model = Plain()
    _, result, _ = auto_accelerate(
        model, "sgd", loss_func=next_token_loss, optim_args={"lr": 1.0}, load_strategy=Strategy(precision="fp16")
    )  # fmt: skip
    data = torch.arange(16)[None]
    before, scale = model.head.weight.detach().clone(), result.args["scaler"].get_scale()
    (result.loss_func(data, result.model(data)) * 1e30).backward()
    result.optim.step()
    assert torch.equal(before, model.head.weight)
    assert result.args["scaler"].get_scale() == scale / 2


def test_a_state_does_not_say_how_the_optimizer_steps():
    model = Plain()
    _, result, _ = auto_accelerate(model, "sgd", optim_args={"momentum": 0.9}, load_strategy=[])
    assert result.optim.param_groups[0]["fused"]
    (group,) = result.args["state"].state_dict()["groups"]
    assert group["momentum"] == 0.9
    assert not {"fused", "foreach", "params"} & group.keys()
    assert not result.optim.state, "asking changes nothing"


def test_a_state_of_another_shape_is_refused():
    result = auto_accelerate(Plain(), load_strategy=[])[1]
    state = result.args["state"].state_dict()
    state["model"]["norm.weight"] = torch.ones(3)
    with pytest.raises(
        ConfigurationError, match=r"'norm.weight' with the shape \[3\] .* accepted is \[32\]"
    ):
        result.args["state"].load_state_dict(state)
