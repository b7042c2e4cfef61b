"""Megatron-core with `FlashSave` and `FlashLoad`: a GPT, and states that are made by hand."""

import importlib.util

import pytest
import torch

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.tools import verification
from dlrover.errors import ConfigurationError, InfrastructureError

pytestmark = [
    pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of each library that it could use
]  # fmt: skip

LAST = 6


# ---- a training


def test_a_killed_rank_continues_from_memory(training, undisturbed):
    training.run("mcore.py", 3, LAST, 4, 2)
    assert training.loaded == (3, "memory")
    losses = training.losses
    assert len(losses) == LAST * 2
    assert losses == undisturbed.run("mcore.py", -1, LAST, LAST, 2).losses


@pytest.mark.parametrize("where", ["memory", "storage"])
def test_other_layouts_load_and_save_the_same(training, undisturbed, where):
    every = 1 if where == "storage" else 100

    def run(last, tensor_parallel, *args, ranks):
        training.run("mcore.py", -1, last, every, tensor_parallel, *args, ranks=ranks)
        if where == "storage":
            training.end_saver()

    run(3, 2, ranks=2)
    if where == "storage":
        assert verification.verify(training.flash, 3).whole
    run(4, 1, "copy", ranks=1)
    assert training.loaded == (3, where)
    run(5, 1, "copy", ranks=2)
    assert training.loaded == (4, where)
    run(8, 2, ranks=2)
    assert training.loaded == (5, where)
    expected = undisturbed.run("mcore.py", -1, LAST, LAST, 2).losses
    assert training.losses == {key: loss for key, loss in expected.items() if key[0] >= 3}


def test_a_damaged_step_is_passed_over_by_the_next_try(training):
    before = training.run("mcore.py", -1, 3, 1, 2).losses
    training.end_saver()
    damage(training.flash / "step-3")
    after = training.run("mcore.py", -1, LAST, 100, 2).losses  # through one restart
    assert "load again" in training.output
    assert training.loaded == (2, "storage")
    assert {key: after[key] for key in before if key[0] == 2} == {
        key: before[key] for key in before if key[0] == 2
    }


def damage(step):
    for file in step.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


def test_no_fresh_start_from_a_damaged_checkpoint(training):
    training.run("mcore.py", -1, 1, 1, 2)
    training.end_saver()
    damage(training.flash / "step-1")
    training.run("mcore.py", -1, 2, 100, 2, fails=True)
    assert "No checkpoint in" in training.output
    assert not training.losses


# ---- states made by hand


class Alone:
    """One rank, with the strategies and what Megatron calls its things."""

    def __init__(self, directory):
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

        from dlrover.integrations.megatron import FlashLoad, FlashSave

        self.saving, self.loading = FlashSave, FlashLoad
        self.megatron, self.tensor, self.object = dist_checkpointing, ShardedTensor, ShardedObject
        self.checkpointer = Checkpointer(directory / "flash")
        self.out = directory / "out"
        self.out.mkdir()

    def part(self, key, data, at=0, of=1, **more):
        return self.tensor.from_rank_offsets(key, data, (0, at, of), **more)

    def save(self, state, step=1, out=None):
        strategy = self.saving(self.checkpointer, step)
        self.megatron.save(state, str(out or self.out), sharded_strategy=strategy)

    def load(self, state, out=None, **options):
        flash = self.loading(self.checkpointer)
        both = {"sharded_strategy": flash, "common_strategy": flash}
        return self.megatron.load(state, str(out or self.out), **{**both, **options})


@pytest.fixture
def alone(directory):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    alone = Alone(directory)
    yield alone
    alone.checkpointer.close()
    torch.distributed.destroy_process_group()


def test_tensors_objects_and_the_common_state_come_back(alone):
    halves = torch.arange(6.0), torch.arange(6.0, 12.0)

    def state(filled):
        fill = torch.clone if filled else torch.zeros_like
        return {
            "halves": [alone.part("x", fill(half), at, 2) for at, half in enumerate(halves)],
            "layer": alone.part("y", fill(torch.ones(2, 3)), prepend_axis_num=1),
            "object": alone.object("o", {"any", 1} if filled else None, (1,), (0,)),
            "scalar": alone.tensor.from_rank_offsets("s", fill(torch.tensor(5))),
            "step": 7 if filled else 0,
            3: {"common": torch.ones(2) if filled else None},
        }

    alone.save(state(filled=True))
    found = alone.load(state(filled=False))
    assert all(map(torch.equal, found["halves"], halves))
    assert torch.equal(found["layer"], torch.ones(2, 3))
    assert (found["object"], found["scalar"].item(), found["step"]) == ({"any", 1}, 5, 7)
    assert torch.equal(found[3]["common"], torch.ones(2))


def test_parts_may_be_cut_in_another_way(alone):
    alone.save({"x": [alone.part("x", torch.arange(6.0) + 6 * at, at, 2) for at in (0, 1)]})
    found = alone.load({"x": [alone.part("x", torch.zeros(4), at, 3) for at in range(3)]})
    assert torch.cat(found["x"]).tolist() == list(range(12))


def test_of_replicas_the_main_one_is_saved(alone):
    copies = [alone.part("x", torch.full((2,), float(n)), replica_id=n) for n in (0, 1)]
    alone.save({"x": copies})
    found = alone.load({"x": alone.part("x", torch.zeros(2))})
    assert found["x"].tolist() == [0, 0]
    assert len(alone.checkpointer.read()[1]["tensors"]["x"]) == 1


def test_tensors_of_another_size_are_cut_or_padded_where_that_is_allowed(alone):
    alone.save({"x": alone.part("x", torch.arange(1.0, 5.0))})

    def load(size):
        return alone.load(
            {"x": alone.part("x", torch.full((size,), 9.0), allow_shape_mismatch=True)}
        )

    assert load(6)["x"].tolist() == [1, 2, 3, 4, 0, 0]
    assert load(3)["x"].tolist() == [1, 2, 3]
    with pytest.raises(ConfigurationError, match=r"x has the shape \[4\] in the checkpoint"):
        alone.load({"x": alone.part("x", torch.zeros(6))})


def test_what_was_saved_can_be_listed_and_loaded_without_data(alone):
    alone.save({"x": alone.part("x", torch.ones(4)), "o": alone.object("o", 5, (1,), (0,))})
    flash = alone.loading(alone.checkpointer)
    found = alone.megatron.serialization.load_sharded_metadata(str(alone.out), flash, flash)
    assert found.keys() == {"x", "o/shard_0_1"}
    assert found["x"].global_shape == (4,)
    assert alone.load(found)["x"].tolist() == [1] * 4


def test_keys_that_differ_are_named(alone):
    alone.save({"x": alone.part("x", torch.ones(4)), "o": alone.object("o", 5, (1,), (0,))})
    more = {"x": alone.part("x", torch.zeros(4)), "y": alone.part("y", torch.zeros(1))}
    with pytest.raises(ConfigurationError, match="y is not in the checkpoint"):
        alone.load(more)
    found, missing, unexpected = alone.load(more, strict="return_all")
    assert (found["x"].tolist(), missing, unexpected) == ([1] * 4, {"o"}, {"y"})


def test_a_directory_that_is_not_held_any_more_is_named(alone, directory):
    older = directory / "older"
    older.mkdir()
    alone.save({"x": alone.part("x", torch.ones(1))}, out=older)
    alone.save({"x": alone.part("x", torch.ones(1))}, step=2)
    with pytest.raises(
        ConfigurationError, match=r"older is not held any more; the newest is .*out"
    ):
        alone.load({}, out=older)


def test_the_newest_directory_is_there_even_if_the_first_save_was_cut_off(alone):
    assert alone.loading(alone.checkpointer).newest() is None
    alone.save({"x": alone.part("x", torch.ones(1)), "step": 1})
    for file in alone.out.iterdir():
        file.unlink()
    alone.out.rmdir()
    newest = alone.loading(alone.checkpointer).newest()
    assert newest == str(alone.out)
    assert alone.load({"x": alone.part("x", torch.zeros(1))})["step"] == 1


def test_mistakes_are_named(alone, directory):
    alone.save({"x": alone.part("x", torch.ones(1))})
    with pytest.raises(ConfigurationError, match="must be the common_strategy too"):
        alone.load({}, common_strategy=None)
    (alone.out / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(ConfigurationError, match="cannot load a checkpoint of torch_dist"):
        alone.load({})
    alone.checkpointer.save(2, {"x": torch.ones(1)})
    with pytest.raises(ConfigurationError, match="was saved in another way"):
        alone.loading(alone.checkpointer).newest()


def test_a_directory_without_a_checkpoint_is_an_error(alone, directory):
    alone.save({"x": alone.part("x", torch.ones(1))})
    alone.checkpointer.close()
    alone.checkpointer = Checkpointer(directory / "other")
    with pytest.raises(InfrastructureError, match="Nothing was saved"):
        alone.load({})
