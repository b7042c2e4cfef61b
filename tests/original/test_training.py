"""The original's trainer, sampler, loader and checkpointer, in one process."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrover.errors import ConfigurationError
from dlrover.original.checkpoint import DdpCheckpointer, StorageType, step_in
from dlrover.original.events import TrainerProcess
from dlrover.original.retention import KeepLatestStepStrategy, KeepStepIntervalStrategy, policy_of
from dlrover.original.sharding import ShardingClient
from dlrover.original.training import ElasticDataLoader, ElasticDistributedSampler, ElasticTrainer

pytestmark = pytest.mark.torch


def trained(
    monkeypatch: pytest.MonkeyPatch, most: int, batches: list[torch.Tensor]
) -> tuple[list[float], int]:
    """Weights after passes over ``batches``, in the manner of the original's example, and the steps."""
    monkeypatch.setenv("WORKER_NUM", str(most))
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    trainer = ElasticTrainer(model)
    optimizer, scheduler = trainer.prepare(optimizer, scheduler)
    for batch in batches:
        with trainer.step(True):
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
            scheduler.step()
    assert isinstance(optimizer, torch.optim.Optimizer)
    return model.weight.flatten().tolist(), trainer.num_steps


def test_fewer_workers_make_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(12, 3)
    expected, steps = trained(monkeypatch, 1, list(whole.split(6)))
    assert trained(monkeypatch, 3, list(whole.split(2))) == (pytest.approx(expected, abs=1e-5), 2)
    assert steps == 2


def test_the_loader_counts_and_takes_its_batch_size_from_a_file(tmp_path: Path) -> None:
    data = list(range(20))
    sampler = ElasticDistributedSampler(data, shuffle=False)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"dataloader": {"batch_size": 3}}))
    loader = ElasticDataLoader(data, 4, False, sampler, config_file=str(config))
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    state = sampler.state_dict(iter_step=1, micro_batch_size=1)
    assert state == {"completed_num": 6, "epoch": 0}
    again = ElasticDistributedSampler(data, shuffle=False)
    again.load_state_dict(state)
    assert list(again) == data[6:]
    again.load_state_dict({"completed_num": 26, "epoch": 1})  # steps counted over epochs
    assert (list(again), again.epoch) == (data[6:], 1)
    assert ElasticDistributedSampler(data).state_dict(2, 4) == {"completed_num": 8, "epoch": 0}
    with pytest.raises(ConfigurationError, match="name those after drop_last"):
        ElasticDataLoader(*[data] * 10)


def test_state_dicts_return_as_they_were_saved(tmp_path: Path) -> None:
    state = {
        "w": torch.arange(3.0),
        "step": 5,
        "odd": {1: (2, None)},
        "args": Path("x"),
        "n": {"a": torch.ones(2, 2)},
    }
    checkpointer = DdpCheckpointer(
        str(tmp_path), deletion_strategy=KeepStepIntervalStrategy(2, str(tmp_path))
    )
    assert checkpointer.load_checkpoint() == {}
    for step in (4, 5):
        checkpointer.save_checkpoint(step, {**state, "step": step}, f"{tmp_path}/{step}.pt")
    checkpointer.save_checkpoint(6, {**state, "step": 6}, storage_type=StorageType.MEMORY)
    checkpointer.wait_latest_checkpoint()
    assert checkpointer.load_checkpoint()["step"] == 6
    found = checkpointer.load_checkpoint(f"{tmp_path}/5.pt")
    assert torch.equal(found.pop("w"), state["w"])
    assert torch.equal(found.pop("n")["a"], torch.ones(2, 2))
    assert found == {"step": 5, "odd": {1: (2, None)}, "args": Path("x")}
    with pytest.raises(ConfigurationError, match="its last number must be the step, 7"):
        checkpointer.save_checkpoint(7, state, "out/8.pt")
    with pytest.raises(
        ConfigurationError, match=r"storage_type is 'disk'; it must be StorageType\.MEMORY"
    ):
        checkpointer.save_checkpoint(7, state, storage_type="disk")  # type: ignore[arg-type]
    checkpointer.close()


def test_what_the_original_stored_is_read(tmp_path: Path) -> None:
    (tmp_path / "100").mkdir()
    torch.save({"step": 100, "w": torch.ones(2)}, tmp_path / "100" / "rank_0.pt")
    (tmp_path / "dlrover_latest.txt").write_text("100")
    checkpointer = DdpCheckpointer(str(tmp_path))
    assert checkpointer.load_checkpoint()["step"] == 100
    checkpointer.save_checkpoint(101, {"step": 101})
    assert checkpointer.load_checkpoint()["step"] == 101
    assert checkpointer.load_checkpoint(str(tmp_path / "100" / "rank_0.pt"))["step"] == 100
    checkpointer.close()


def test_paths_name_steps() -> None:
    assert [step_in(path) for path in ("a/100.pt", "a/100/rank_3.pt", "x2/step-7")] == [100, 100, 7]
    with pytest.raises(ConfigurationError, match="resume_path is last"):
        step_in("last")


def test_deletion_strategies() -> None:
    assert policy_of(KeepLatestStepStrategy(2, "")).kept([]) == set()
    with pytest.raises(ConfigurationError, match="deletion_strategy is a int"):
        policy_of(3)


def test_shards_are_shuffled_whole_and_restored() -> None:
    def client(name: str) -> ShardingClient:
        return ShardingClient(name, 2, 1, 11, shuffle=True, num_minibatches_per_shard=2)

    first = client("a")
    shards = [first.fetch_shard() for _ in range(2)]
    assert all(s is not None and s.end - s.start in (3, 4) for s in shards)
    assert first.report_batch_done() is False
    assert first.report_batch_done() is True
    saved = first.get_shard_checkpoint()
    second = client("a")
    assert second.restore_shard_from_checkpoint(saved)
    seen: list[int] = []
    while (shard := second.fetch_shard()) is not None:
        seen += range(shard.start, shard.end)
        second.report_batch_done(shard.end - shard.start)
    assert shards[0] is not None
    assert sorted([*seen, *range(shards[0].start, shards[0].end)]) == list(range(11))
    with pytest.raises(ConfigurationError, match="storage_type is 'sls'"):
        ShardingClient("b", 1, 1, 1, storage_type="sls")


def test_records_of_a_failed_batch_are_read_again() -> None:
    client = ShardingClient("c", 2, 1, 4, num_minibatches_per_shard=2)
    shard = client.fetch_shard()
    assert client.report_batch_done(err_msg="bad") is False
    assert client.fetch_shard() == shard
    client.report_batch_done(4)
    assert client.fetch_shard() is None


def test_events_are_lines_of_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dlrover.events")
    events = TrainerProcess("train")
    with contextlib.suppress(ValueError), events.step(3) as span:
        span.extra_args(loss=0.5)
        raise ValueError("broken")
    events.start({"lr": 1})
    kinds = [(json.loads(r.message)[0], json.loads(r.message)[3:]) for r in caplog.records]
    assert kinds[0] == ("BEGIN", ["#step", {"global_step": 3}])
    assert kinds[1][1][1]["error"] == "ValueError: broken"
    assert kinds[2][0] == "INSTANT"
