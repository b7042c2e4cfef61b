"""``--auto-tunning`` changes micro-batches on all ranks at once, and nothing of what a step computes."""

import json

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(90)]


def train(run, out, flag: str, *more: str) -> tuple[list[dict], str]:
    out.mkdir()
    script = run.scripts / "tuned.py"
    launch = run(flag, "--standalone", "--nproc-per-node=2", script, out, *more, name=out.name)
    launch.succeed()
    return [json.loads((out / f"rank-{rank}").read_text()) for rank in range(2)], launch.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine can measure")
def test_all_ranks_change_at_the_same_step_and_the_result_is_the_same(run, tmp_path) -> None:
    plain, told = train(run, tmp_path / "plain", "--auto-tuning")
    assert set(plain[0]["sizes"]) == {2}
    line = (
        "The micro-batch stays at 2 samples: the memory of activations cannot be measured on cpu."
    )
    assert told.count(line) == 1

    (first, second), told = train(run, tmp_path / "tuned", "--auto-tunning", "memory")
    assert first["loader"]
    assert first["sizes"] == second["sizes"]
    assert [first["sizes"][0], first["sizes"][-1]] == [2, 5]  # 20 samples a rank, of 6 at most
    assert first["weights"] == second["weights"]
    assert first["weights"][0] == pytest.approx(plain[0]["weights"][0], rel=1e-12)
    assert "The micro-batch has 4 samples from now on, 2 until now: a sample takes" in told
