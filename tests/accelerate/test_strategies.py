"""Strategies in all forms: what they become, and the sentence for what cannot be one."""

import pickle

import msgspec
import pytest

torch = pytest.importorskip("torch")

from dlrover.accelerate import Strategy, auto_accelerate, strategies  # noqa: E402
from dlrover.errors import ConfigurationError  # noqa: E402
from tests.accelerate.scripts.models import Block, Plain  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("methods", "ranks", "fields"),
    [
        (["auto_ddp"], 4, {"dp_replicate": 4, "zero": 0}),
        # as in the original's page of auto_accelerate
        (["parallel_mode", ("amp_native", "bf16")], 4, {"dp_replicate": 4, "zero": 0, "precision": "bf16"}),
        (["parallel_mode", ("fsdp", {"fsdp_wrap_params_outmost": True})], 2, {"dp_shard": 2}),
        (["fsdp", ("amp_native", {"dtype": "bf16"})], 4, {"dp_shard": 4, "precision": "bf16"}),
        ([("amp_native", {"dtype": torch.float16}), "zero2"], 2, {"dp_shard": 2, "zero": 2, "precision": "fp16"}),
        (
            [("parallel_mode", ([("data", 2), ("tensor", 2)], None)), "fsdp", ("checkpoint", (Block,))],
            4, {"dp_shard": 2, "tp": 2, "recompute": "full", "blocks": ("Block",)},
        ),
        ([("parallel_mode", ([("data", 2), ("zero", 4)], None)), "fsdp"], 8, {"dp_replicate": 2, "dp_shard": 4}),
        ([("parallel_mode", ([("data", 8), ("tensor", 2)], None, True)), ("native_dynamo", None, False)], 6,
         {"dp_replicate": 3, "tp": 2, "zero": 0, "compile": True}),
        ([("pipeline_parallel", {"size": 2, "virtual": 2, "micro_batch": 3})], 2,
         {"pp": 2, "virtual": 2, "micro_batch": 3, "zero": 0}),
        ([("sequence_parallel", {"size": 2}), "fsdp"], 4, {"cp": 2, "context": "ulysses", "dp_shard": 2}),
        ([("fsdp", {"sync_module_states": True, "cpu_offload": True, "atorch_wrap_cls": {"Block"}})], 2,
         {"dp_shard": 2, "offload": True, "blocks": ("Block",)}),
    ],
)  # fmt: skip
def test_lists_of_methods(methods, ranks, fields):
    assert strategies.load(methods, ranks) == Strategy(**{"precision": "fp32", **fields})


def test_a_set_of_classes_has_the_same_order_on_all_ranks():
    names = "ABCDEFGHIJKLMNOP"
    assert strategies.load([("checkpoint", set(names))], 1).blocks == tuple(names)


def test_a_rank_takes_its_part_of_a_batch_at_once():
    assert strategies.load(["fsdp"], 4, batch=10).micro_batch == 3
    piped = strategies.load([("parallel_mode", ([("pipe", 2)], None))], 4, batch=64)
    assert (piped.dp, piped.micro_batch) == (2, 4)


def test_files_and_bytes(tmp_path):
    wanted = Strategy(
        dp_shard=2, tp=2, tensor_rules=(("blocks.*.up", "colwise"),), blocks=("Block",)
    )
    strategies.save(wanted, tmp_path / "strategy.json")
    data = (tmp_path / "strategy.json").read_bytes()
    for form in (tmp_path / "strategy.json", str(tmp_path / "strategy.json"), data, wanted):
        assert strategies.load(form, 4) == wanted


@pytest.mark.parametrize(
    ("given", "ranks", "found"),
    [
        (Strategy(dp_shard=8), 6, Strategy(dp_shard=6)),
        (Strategy(dp_replicate=2, dp_shard=4), 4, Strategy(dp_replicate=2, dp_shard=2)),
        (Strategy(dp_replicate=2, dp_shard=4, tp=2), 6, Strategy(dp_replicate=1, dp_shard=3, tp=2)),
        (Strategy(dp_replicate=8), 3, Strategy(dp_replicate=3)),
    ],
)
def test_data_parallel_degrees_follow_the_world(given, ranks, found):
    assert strategies.load(given, ranks) == found


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (pickle.dumps([("fsdp", None)]), "load_strategy is a pickle, which could execute code"),
        (b"[1]", "is not the JSON of a Strategy"),
        (b"{", "is not the JSON of a Strategy"),
        (b'{"tp": "two"}', "is not the JSON of a Strategy"),
        (b'{"tp": 0}', "tp is 0, not a positive integer"),
        (b'{"tensor": 2}', "has the field 'tensor'; accepted are dp_replicate"),
        ("nowhere.json", "which cannot be read"),
        (17, "load_strategy is a int; accepted are a path"),
        (["zero9"], "has the method 'zero9'; accepted are zero1"),
        (["half"], "has the method 'half'; write ('amp_native', {'dtype': 'bf16'}), which keeps the weights in fp32."),
        ([("fsdp", {"mixed_precision": True})], "has the option 'mixed_precision'; write the method amp_native."),
        ([("fsdp",)], "accepted are a name"),
        ([("fsdp", {"shards": 2})], "has the option 'shards'; accepted are"),
        ([("amp_native", {"dtype": "int8"})], "dtype is 'int8'; accepted are bf16"),
        ([("parallel_mode", {"data": 2})], "accepted is ([(name, size), ...], None)"),
        ([("parallel_mode", ([("model", 2)], None))], "has the name 'model'; accepted are data"),
        ([("parallel_mode", ([("data", 2)], [1, 0]))], "accepted is None"),
        ([("parallel_mode", ([("tensor", 3)], None))], "must divide the 4 ranks"),
        ([("parallel_mode", ([("zero", 3)], None))], "zero is 3; it must divide the 4 ranks"),
        ([("parallel_mode", ([("tensor", 0)], None))], "tp is 0, not a positive integer"),
        ([("parallel_mode", ([("tensor", "2")], None))], "tp is '2', not a positive integer"),
        ([("parallel_mode", ([("tensor", 2, 1)], None))], "has ('tensor', 2, 1); accepted is (name, size)"),
        ([("pipeline_parallel", {"size": 0})], "pp is 0, not a positive integer"),
        ([("tensor_parallel", {"plan": ["*"]})], "plan is ['*']; accepted is a dict"),
        ([("checkpoint", 5)], "has 5 as the class of a module; accepted are classes and their names"),
        (b"[" * 100_000, "is not the JSON of a Strategy"),
        (Strategy(tp=3), "it must divide the 4 ranks of this world"),
    ],
)  # fmt: skip
def test_what_is_no_strategy(given, sentence):
    with pytest.raises(ConfigurationError) as caught:
        strategies.load(given, 4)
    assert sentence in str(caught.value)
    assert str(caught.value).count(". ") == 0, "one sentence"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"pp": 5}, "pp x virtual is 5 x 1; it must be at most 4"),
        ({"pp": 2, "schedule": "interleaved_1f1b"}, "schedule is 'interleaved_1f1b'; accepted with virtual 1"),
        ({"virtual": 2}, "virtual is 2; accepted is 1 without pp"),
        ({"ep": 2}, "ep is 2; accepted is 1, because the model has no experts"),
        ({"blocks": ("Layer",)}, "blocks has 'Layer'; accepted are classes of modules that the model has"),
        ({"tp": 5}, "tp is 5; accepted is 1 without tensor_rules, because no rule knows a pair of matrices"),
        ({"chunked_loss": True}, "chunked_loss is True; accepted is False"),
    ],
)  # fmt: skip
def test_what_a_model_does_not_allow(monkeypatch, fields, sentence):
    strategy = Strategy(**fields)
    monkeypatch.setenv("WORLD_SIZE", str(strategy.size))
    with pytest.raises(ConfigurationError) as caught:
        auto_accelerate(Plain(), load_strategy=strategy)
    assert sentence in str(caught.value)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"optimiser": 1}, "has no argument 'optimiser'"),
        ({"model_input_format": "dict"}, "model_input_format is 'dict'; accepted are None"),
        ({"finetune_strategy": True}, "finetune_strategy is True"),
        ({}, "needs a dataset or sample_batch"),
        ({"blocks": "layers", "load_strategy": ["fsdp"]}, "accepted are the model's lists: blocks"),
        ({"optim_func": "adamx", "load_strategy": []}, "optim_func is 'adamx'"),
        ({"dataset": range(8), "dataloader_args": {"batch_size": 0}, "load_strategy": []}, "batch_size'] is 0"),
        ({"dataset": iter(()), "load_strategy": []}, "without a length"),
        ({"dataset": range(8), "dataloader_args": {"sampler": 1}, "load_strategy": []}, "has 'sampler'"),
        ({"excluded": ["magic"], "dataset": [torch.ones(4)]}, "has 'magic'; accepted are zero1"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, sentence):
    with pytest.raises(ConfigurationError) as caught:
        auto_accelerate(Plain(), **arguments)
    assert sentence in str(caught.value)


def test_the_strategy_is_saved(tmp_path):
    _, _, strategy = auto_accelerate(
        Plain(), load_strategy=["fsdp"], save_strategy_to_file=tmp_path / "strategy.json"
    )
    saved = msgspec.json.decode((tmp_path / "strategy.json").read_bytes(), type=Strategy)
    assert saved == strategy == Strategy(precision="fp32")
