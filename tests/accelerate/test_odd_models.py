"""Models of unusual structure: what a strategy takes of them, and what it refuses before it would compute something else."""

import copy
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from torch.utils.data import RandomSampler

from dlrover.accelerate import Strategy, auto_accelerate, clip_grad_norm_, optimizers
from dlrover.accelerate.anatomy import analyse
from dlrover.accelerate.applying import _prepare_hugging_face
from dlrover.accelerate.loading import dataloader
from dlrover.accelerate.materialise import Materialiser
from dlrover.accelerate.microbatch import split
from dlrover.accelerate.modes.pipeline import cut
from dlrover.accelerate.modes.tensor import Flow, divide_block, divide_ends, first_input
from dlrover.accelerate.modes.tensor_rules import Rules
from dlrover.accelerate.strategies import check, divide, stages_of
from dlrover.errors import ConfigurationError
from tests.accelerate.scripts.models import Block, Mlp, Plain, next_token_loss

pytestmark = pytest.mark.torch


# ---- data


def test_what_samples_share_is_in_each_part():
    positions, scale = torch.arange(3)[None], torch.tensor(0.5)
    data = {"words": torch.arange(24).view(8, 3), "positions": positions, "scale": scale, "name": "x"}  # fmt: skip
    parts = [part for part, _ in split(data, 4)]
    assert torch.equal(torch.cat([part["words"] for part in parts]), data["words"])
    for part in parts:
        assert len(part["words"]) == 2
        assert part["positions"] is positions
        assert (part["scale"], part["name"]) == (scale, "x")


def test_a_batch_that_moves_itself_is_moved():
    class Batch(UserDict):
        def to(self, device):
            return Batch({name: tensor.to(device) for name, tensor in self.items()})

    _, result, _ = auto_accelerate(nn.Linear(2, 2), load_strategy=Strategy())
    assert result.prepare_input(Batch(x=torch.ones(2)), "meta")["x"].is_meta
    assert result.prepare_input([torch.ones(2), "a"], "meta")[0].is_meta


def test_ranks_that_draw_samples_at_random_draw_the_same_order():
    def taken(rank):
        loader = dataloader(list(range(40)), {"batch_size": 8}, rank=rank, ranks=2, sampler_cls=RandomSampler)  # fmt: skip
        return [number for batch in loader for number in batch.tolist()]

    assert sorted(taken(0) + taken(1)) == list(range(40))


def test_a_sampler_continues_in_the_epoch_where_the_training_was():
    class Sampler:
        def __init__(self, data):
            self.epoch, self.size = 0, len(data)

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return self.size

        def __iter__(self):
            return iter((torch.arange(self.size) + 10 * self.epoch).remainder(self.size).tolist())

    def made():
        return dataloader(list(range(16)), {"batch_size": 4}, rank=0, ranks=1, sampler_cls=Sampler)

    first = made()
    list(first)
    batches = iter(first)
    next(batches)
    state, wanted = first.state_dict(), [batch.tolist() for batch in batches]
    second = made()
    second.load_state_dict(state)
    assert [batch.tolist() for batch in second] == wanted


# ---- weights


def test_an_expanded_buffer_becomes_that_of_the_first_rank(alone):
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.ones(1, 3).expand(4, 3))
    materialiser = Materialiser(model, torch.device("cpu"))
    materialiser.equalise()
    materialiser.bring(model)
    assert torch.equal(model.scale, torch.ones(4, 3))
    model.scale.zero_()  # each element has its own memory, as DistributedDataParallel wants it


def tied(model, *pairs):
    for one, other in pairs:
        model.blocks[other].mlp.fc1.weight = model.blocks[one].mlp.fc1.weight
    return model


def of_two_types():
    model = Plain()
    model.blocks[1].norm1.double()
    return model


@pytest.mark.parametrize(
    ("model", "fields", "sentence"),
    [
        (tied(Plain(), (0, 1)), {"tp": 2}, r"tp is 2.*'blocks.0.mlp.fc1.weight' has another name"),
        (tied(Plain(), (0, 1)), {"dp_shard": 2}, r"'blocks.0.mlp.fc1.weight' of the model is in several blocks"),
        (tied(Plain(), (0, 1)), {"dp_replicate": 2}, ""),
        (tied(Plain(), (0, 1)), {"pp": 2}, ""),
        (tied(Plain(), (0, 1)), {"pp": 4}, r"'blocks.0.mlp.fc1.weight' and 'blocks.1.mlp.fc1.weight' are one parameter"),
        (tied(Plain(), (0, 3)), {"pp": 4}, ""),
        (tied(Plain(), (0, 1), (0, 3)), {"pp": 4}, "are one parameter"),
        (tied(Plain(), (0, 2)), {"pp": 2, "virtual": 2}, ""),
        (Plain(), {"tp": 2, "dp_shard": 2, "pp": 4}, ""),
        (of_two_types(), {"dp_shard": 2}, r"of blocks.1 have the types torch.float32 and torch.float64"),
        (of_two_types(), {"dp_replicate": 2}, ""),
    ],
)  # fmt: skip
def test_parameters_that_cannot_be_divided_are_named(model, fields, sentence):
    strategy, anatomy = Strategy(**fields), analyse(model)
    if not sentence:
        check(strategy, anatomy, strategy.size)
        return
    with pytest.raises(ConfigurationError, match=sentence):
        check(strategy, anatomy, strategy.size)


def test_the_stages_of_a_parameter():
    anatomy = analyse(Plain())
    assert divide(anatomy, Strategy(pp=3)) == [range(2), range(2, 3), range(3, 4)]
    for name, stage in (("embed.weight", 0), ("blocks.2.norm1.bias", 1), ("head.weight", 2)):
        assert stages_of([name], Strategy(pp=3), anatomy) == {stage}


# ---- optimizers


def test_a_stage_without_trained_parameters_has_an_optimizer():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    optimizers.build("sgd", [frozen], Strategy(pp=2), {"lr": 0.1}, None).step()
    with pytest.raises(ValueError, match="empty parameter list"):
        optimizers.build("sgd", [frozen], Strategy(), {"lr": 0.1}, None)


def test_complex_parameters_are_not_updated_in_one_kernel():
    model = nn.ParameterList([torch.ones(2, dtype=torch.complex64)])
    model[0].grad = torch.ones_like(model[0])
    optimizers.build("adamw", [model], Strategy(), {}, None).step()
    assert model[0].real.lt(1).all()


def test_groups_of_parameters_are_those_of_the_unchanged_names():
    names = []

    def groups(model):
        names.extend(name for name, _ in model.named_parameters())
        return [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.0}]

    data = list(torch.ones(4, 2))
    _, result, _ = auto_accelerate(
        nn.Linear(2, 2), "sgd", data, lambda _data, output: output.mean(), optim_param_func=groups,
        dataloader_args={"batch_size": 2}, load_strategy=Strategy(micro_batch=1, precision="fp32"),
    )  # fmt: skip
    assert names == ["weight", "bias"]
    assert [group["lr"] for group in result.optim.param_groups] == [1e-3, 0.0]
    parts = [nn.Linear(2, 2), nn.Linear(2, 2)]
    joined = optimizers.build("sgd", parts, Strategy(pp=2), {}, groups)
    assert [group["params"] for group in joined.param_groups] == [
        [part.weight for part in parts], [part.bias for part in parts],
    ]  # fmt: skip


def test_gradients_are_clipped_without_the_scale_of_fp16():
    norms = []
    for precision in ("fp32", "fp16"):
        torch.manual_seed(0)
        _, result, _ = auto_accelerate(
            nn.Linear(8, 1), "sgd", loss_func=lambda _data, output: output.mean() / 4, optim_args={"lr": 1.0},
            load_strategy=Strategy(precision=precision),
        )  # fmt: skip
        data = torch.ones(4, 8)
        result.loss_func(data, result.model(data)).backward()
        before = result.model.bias.item()
        norms.append(float(clip_grad_norm_(result.model, 0.3)))
        result.optim.step()
        assert before - result.model.bias.item() == pytest.approx(0.1, rel=1e-2)
    assert norms == pytest.approx([0.75, 0.75], rel=1e-2)


# ---- pipelines


class Ordered(nn.Module):
    """A model that registers and uses a norm where a test wants it."""

    def __init__(self, registered, used, call=None):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        if registered == "before":
            self.norm = nn.LayerNorm(32)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        if registered == "after":
            self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64)
        self.used, self.call = used, call or (lambda block, x: block(x))

    def forward(self, words):
        x = self.embed(words)
        x = self.norm(x) if self.used == "before" else x
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(self.norm(x) if self.used == "after" else x)


def refusals_of_stages(model):
    anatomy, data, found = analyse(model), torch.arange(16)[None], []
    for stage in (0, 1):
        grid = SimpleNamespace(strategy=Strategy(pp=2), stage=stage)
        (part,) = cut(copy.deepcopy(model), anatomy, grid, None, next_token_loss)
        hidden = [torch.randn(1, 16, 32)] if stage else []
        try:
            part.check(*hidden, data=data)
            part(*(each.requires_grad_() for each in hidden), data=data)
        except ConfigurationError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("registered", "used", "reason"),
    [
        ("before", "before", ""),
        ("after", "after", ""),
        ("after", "before", "uses 'norm' before its blocks and registers it after them"),
        ("before", "after", "uses after its blocks what it had before them"),
    ],
)
def test_a_norm_that_another_stage_has_is_not_left_out(registered, used, reason):
    found = refusals_of_stages(Ordered(registered, used))
    assert len(found) == bool(reason)
    assert all(reason in sentence for sentence in found)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda block, x: checkpoint(block, x, use_reentrant=False), ""),
        (lambda block, x: checkpoint(block, x, use_reentrant=True), "use_reentrant=False works"),
        (lambda block, x: block(x=x), "something else than a tensor as first argument"),
    ],
)
def test_a_block_that_is_called_in_another_way(call, reason):
    found = refusals_of_stages(Ordered("after", "after", call))
    assert bool(found) == bool(reason)
    assert all(reason in sentence for sentence in found)


# ---- tensor parallelism


class Residual(Mlp):
    def forward(self, x):
        return x + super().forward(x)


@pytest.mark.parametrize("mlp", [Mlp, Residual])
def test_a_region_that_its_input_passes_by_is_refused(alone, mlp):
    block = Block()
    block.mlp = mlp()
    model = nn.ModuleDict({"blocks": nn.ModuleList([block])})
    regions = Rules(model, ()).regions("blocks.0", block, 1)
    flow, mesh = Flow(alone, divided=False), init_device_mesh("cpu", (1,))
    divide_block(block, "blocks.0", regions, flow, mesh)
    x = torch.randn(1, 4, 32)
    if mlp is Mlp:
        block(x)
        return
    with pytest.raises(ConfigurationError, match=r"'blocks.0.mlp' cannot be divided.*\('blocks.\*.mlp.\*', 'replicate'\)"):  # fmt: skip
        block(x)


def test_regions_in_a_region_get_their_input_once():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Flat()

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1 = nn.LayerNorm(32)
            self.attention = Block().attention
            self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    block = Outer()
    found = Rules(block, ()).regions("blocks.0", block, 2)
    assert {region.name: region.around for region in found.regions} == {"inner.attention": False, "inner": True}  # fmt: skip
    assert found.outside == ("inner.norm1",)


@pytest.mark.parametrize(
    ("rules", "whole"),
    [
        ((), ""),
        ((("blocks.*.mlp.*", "replicate"),), ""),
        ((("blocks.*.attention.*", "replicate"),), "blocks.0.attention"),
    ],
)
def test_attention_that_is_not_divided_sees_whole_sequences(rules, whole, monkeypatch):
    model = Plain()
    assert Rules(model, rules).whole_attention(model, ["blocks.0"], 2) == whole
    if whole:
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigurationError, match=r"sequence_parallel is True; accepted is False, because no rule divides 'blocks\.0\.attention'"):  # fmt: skip
            auto_accelerate(model, load_strategy=Strategy(tp=2, tensor_rules=rules))


def test_attention_of_pytorchs_encoder_sees_whole_sequences():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    assert Rules(model, ()).whole_attention(model, ["layers.0"], 2) == "layers.0.self_attn"


def test_an_embedding_that_scales_stays_whole_with_what_is_tied_to_it():
    class Scaled(nn.Embedding):
        def forward(self, words):
            return 2 * super().forward(words)

    model = Plain()
    names = ["embed", "norm", "head"]
    assert Rules(model, ()).ends(model, names, 2) == {"embed": "vocabulary", "head": "columns"}
    model.embed = Scaled(64, 32)
    assert Rules(model, ()).ends(model, names, 2) == {"head": "columns"}
    model.head.weight = model.embed.weight
    assert Rules(model, ()).ends(model, names, 2) == {}


def test_the_padding_of_a_divided_embedding_is_not_trained(alone):
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2, padding_idx=1)})
    mesh = init_device_mesh("cpu", (1,))
    divide_ends(model, {"embed": "vocabulary"}, Flow(alone, divided=False), mesh)
    model["embed"](torch.tensor([[0, 1, 3]])).sum().backward()
    assert model["embed"].weight.grad.to_local().tolist() == [[1, 1], [0, 0], [0, 0], [1, 1]]


def test_the_input_of_a_module_is_its_first_argument_also_by_name():
    class Sum(nn.Module):
        def forward(self, x, mask):
            return x + mask

    module = Sum()
    first_input(module, lambda x: 10 * x)
    assert module(mask=torch.tensor(1), x=torch.tensor(2)) == module(torch.tensor(2), torch.tensor(1)) == 21  # fmt: skip


def test_both_halves_of_an_encoder_decoder_model_train_without_a_cache():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model.config, model[1].config = SimpleNamespace(use_cache=True), SimpleNamespace(use_cache=True)
    _prepare_hugging_face(model, attention=False)
    assert not model.config.use_cache
    assert not model[1].config.use_cache
