"""The losses of 10 steps under each strategy equal those of a plain loop in one process."""

import pytest

from tests.accelerate.training import case, check

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(300)]


def test_on_two_ranks(forks):
    check(
        forks, 2,
        case("plain", {"dp_replicate": 2}),
        case("plain", {"dp_shard": 2, "recompute": "selective"}, optimizer="adamw"),
        case("plain", {"dp_shard": 2, "zero": 2, "micro_batch": 3}, batch=7),
        case("plain", {"dp_replicate": 2, "micro_batch": 2, "recompute": "full"}, batch=7),
        case("plain", {"dp_shard": 2, "offload": True}, optimizer="adamw"),
        case("plain", ["auto_ddp"], batch=1),
        case("plain", {"dp_shard": 2, "precision": "bf16", "recompute": "full"}, half=True),
        case("plain", {"dp_replicate": 2, "precision": "fp16", "micro_batch": 3}, half=True, batch=7),
        case("plain", {"dp_shard": 2, "precision": "fp16", "micro_batch": 1}, half=True, batch=7),
        case("moe", ["fsdp", ["checkpoint", ["Block"]]]),
    )  # fmt: skip


def test_on_four_ranks(forks):
    check(
        forks, 4,
        case("plain", {"dp_replicate": 2, "dp_shard": 2}),
    )  # fmt: skip
