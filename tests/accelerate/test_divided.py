"""Models that begin on the meta device: no rank ever needs the whole, and all strategies give the same training."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from dlrover.accelerate import Strategy, auto_accelerate
from dlrover.accelerate.anatomy import analyse
from dlrover.accelerate.modes.tensor_rules import Rules
from dlrover.accelerate.strategies import check
from dlrover.errors import ConfigurationError
from tests.accelerate.scripts.models import Plain
from tests.accelerate.training import HUGGING_FACE

SCRIPT = Path(__file__).parent / "scripts" / "meta.py"
MODELS = ["plain", "moe"] + ["gpt2", "mixtral"] * HUGGING_FACE

pytestmark = pytest.mark.torch


@pytest.fixture
def run(forks):
    def ranks(number, *cases):
        env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_")}
        output = forks.ranks(number, SCRIPT, json.dumps(cases), env=env | {"OMP_NUM_THREADS": "1"})
        return [json.loads(line[4:]) for line in output.splitlines() if line.startswith("RUN ")]

    return ranks


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(200)
def test_all_strategies_begin_with_the_same_weights_and_divide_them(run):
    strategies = [{"dp_shard": 2}, {"tp": 2}, {"pp": 2, "micro_batch": 2}]
    alone = {name: (losses, size) for name, _, losses, size in run(1, *[(name, {}) for name in MODELS])}  # fmt: skip
    found = run(2, *[(name, fields) for name in MODELS for fields in strategies])
    assert len(found) == len(MODELS) * len(strategies)
    for name, fields, losses, size in found:
        wanted, whole = alone[name]
        assert losses == pytest.approx(wanted, rel=2e-6), (name, fields)
        assert size < 0.56 * whole, (name, fields, "norms and tied parameters are whole")


def test_what_cannot_be_initialised_is_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Scale())
    with pytest.raises(ConfigurationError, match=r"'1' \(Scale\) is on the meta device and has no"):
        auto_accelerate(model, load_strategy=[])


def test_the_anatomy_of_a_model():
    found = analyse(Plain())
    assert found.blocks == tuple(f"blocks.{number}" for number in range(4))
    assert (found.before, found.after) == (("embed", "position"), ("norm", "head"))
    assert found.tied == (("embed.weight", "head.weight"),)
    assert not found.experts
    assert "head.weight" not in found.shapes
    assert analyse(Plain(moe=True)).experts == tuple(f"blocks.{n}.mlp.experts" for n in range(4))
    assert not analyse(nn.Linear(2, 2)).blocks


def test_a_pipeline_refuses_parameters_outside_of_modules():
    model = Plain()
    model.offset = nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigurationError, match="pp is 2; accepted is 1, because of 'offset'"):
        check(Strategy(pp=2), analyse(model), 2)


def test_rules_of_tensor_parallelism():
    model = Plain()
    regions = Rules(model, ()).regions("blocks.0", model.blocks[0], 2)
    attention, mlp = regions.regions
    assert (attention.columns, attention.rows) == ({"qkv": 3}, ["out_proj"])
    assert (mlp.columns, mlp.rows) == ({"fc1": 1}, ["fc2"])
    assert regions.outside == ("norm1", "norm2")
    overridden = Rules(model, [("blocks.*.mlp.fc1", "replicate")])
    assert len(overridden.regions("blocks.0", model.blocks[0], 2).regions) == 1
    assert Rules(model, ()).ends(model, ["embed", "norm", "head"], 2) == {
        "embed": "vocabulary",
        "head": "columns",
    }
    for rule, sentence in (
        (("*.fc1", "diagonal"), "has the style 'diagonal' for '\\*.fc1'; accepted are colwise"),
        (("*.fc9", "colwise"), "the pattern '\\*.fc9', which matches no module of the Plain"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            Rules(model, [rule])


@pytest.mark.skipif(not HUGGING_FACE, reason="needs transformers")
@pytest.mark.slow
def test_the_plan_of_a_configuration_is_used():
    from tests.accelerate.scripts.models import mixtral

    model = mixtral()
    regions = Rules(model, ()).regions("model.layers.0", model.model.layers[0], 2)
    assert [region.name for region in regions.regions] == ["self_attn"]
    assert "mlp.experts" not in regions.outside
    assert regions.routers == ("mlp",)
    found = analyse(model)
    assert (found.heads, found.kv_heads, found.expert_count) == (4, 2, 4)
    with pytest.raises(
        ConfigurationError, match="tp is 4; accepted are divisors of the model's 2 key-value heads"
    ):
        check(Strategy(tp=4), found, 4)


def test_the_planner_chooses_where_no_strategy_is_given(monkeypatch):
    class Config:
        num_hidden_layers, hidden_size, num_attention_heads, vocab_size = 4, 32, 4, 64

    def chosen(**arguments):
        model = Plain()
        model.config = Config()
        return auto_accelerate(
            model, "agd", [torch.arange(16)] * 8, dataloader_args={"batch_size": 4}, **arguments
        )[2]

    assert chosen() == Strategy(micro_batch=4, zero=0)
    assert chosen(excluded=["amp_native"]).precision == "fp32"
    tuned = chosen(load_strategy=Strategy(precision="fp32"), finetune_strategy=True)
    assert tuned == Strategy(micro_batch=4, zero=0, precision="fp32")
