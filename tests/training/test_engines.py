"""The Trainers of Transformers and Lightning, and Accelerate, with fewer workers, and with lost ones."""

import copy
import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from dlrover.spec import events
from tests.process.conftest import Runner

SCRIPTS = Path(__file__).parent / "scripts"
SHARE = 16
"""Samples of a rank in a step of the programs that are disturbed."""
pytestmark = [
    pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(400),
]  # fmt: skip


def needs(library: str):
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"needs {library}")


def train(script: str, out: Path, last: int, workers: int) -> None:
    """Run a script to its last step or epoch, from where it was."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("DLROVER_", "TORCHELASTIC_"))}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}",
    ]  # fmt: skip
    command = [*(launcher if workers > 1 else [sys.executable]), SCRIPTS / script, out, str(last)]
    out.mkdir(exist_ok=True)
    ended = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=180, check=False, cwd=out
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("script", "change", "last"),
    [
        pytest.param("transformers_batch.py", 5, 10, marks=needs("transformers")),
        pytest.param("lightning_batch.py", 1, 2, marks=needs("lightning")),
    ],
)
def test_three_then_two_workers_train_what_one_does(tmp_path, script, change, last) -> None:
    import torch

    train(script, tmp_path / "one", last, 1)
    train(script, tmp_path / "many", change, 3)
    train(script, tmp_path / "many", last, 2)
    one, many = (torch.load(tmp_path / name / "end.pt") for name in ("one", "many"))
    assert one.keys() == many.keys()
    for key, parameter in one.items():
        torch.testing.assert_close(parameter, many[key], rtol=0, atol=1e-6)


# ---- lost ranks


@pytest.fixture
def run(tmp_path):
    runner = Runner(tmp_path)
    yield runner
    runner.close()


@pytest.fixture
def common(monkeypatch):
    """The module that the disturbed programs share."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("survive_common")


class Row(NamedTuple):
    """A step of a rank."""

    step: int
    mark: str
    """What tells the weights after it from others; empty if the rank was killed before it could say so."""
    pid: int
    rate: float
    """Learning rate of the next step."""
    numbers: tuple[int, ...]
    """Those of its samples."""


class Training:
    """A program of an engine with two ranks, seen by what they write after each step."""

    def __init__(self, run: Runner, engine: str, *args: str) -> None:
        self.out = run.directory / "out"
        self.out.mkdir(exist_ok=True)
        script = SCRIPTS / f"survive_{engine}.py"
        env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        options = "--survive", "--nproc-per-node=2", script, self.out, *args
        self.launch = run(*options, env=env, name=f"run{len(args)}")

    def rows(self, rank: int) -> list[Row]:
        path = self.out / f"rank{rank}.txt"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        rows: list[Row] = []
        numbers: list[int] = []
        pid = 0
        for kind, *words in map(str.split, lines):
            if kind == "pid":
                if len(numbers) == SHARE:
                    rows.append(Row(rows[-1].step + 1, "", pid, 0.0, tuple(numbers)))
                pid, numbers = int(words[0]), []
            elif kind == "saw":
                numbers += map(int, words)
            else:
                row = Row(int(words[0]), words[1], pid, float(words[2]), tuple(numbers))
                rows.append(row)
                numbers = []
        return rows

    def wait_for_step(self, step: int) -> None:
        """Wait until both ranks have made a step beyond ``step``."""
        self.launch.until(
            lambda: all(self.rows(rank) and self.rows(rank)[-1].step > step for rank in range(2)),
            180,
            f"a step after {step}",
        )

    def lose(self, victim: int) -> None:
        """Kill a rank; the other one goes on in its process until both train again."""
        survivor, killed = (self.rows(rank)[-1].pid for rank in (1 - victim, victim))
        psutil.Process(killed).kill()
        joined = len(self.launch.events_of(events.ReplicaJoined))
        returned = functools.partial(self.launch.events_of, events.ReplicaJoined)
        self.launch.until(lambda: len(returned()) > joined, 180, "a return")
        self.wait_for_step(self.rows(1 - victim)[-1].step + 5)
        assert self.rows(1 - victim)[-1].pid == survivor
        assert self.rows(victim)[-1].pid != killed

    def end(self) -> int:
        """Let the training end by itself; return its last step."""
        last = max(self.rows(rank)[-1].step for rank in range(2)) + 20
        (self.out / "new").write_text(str(last))
        (self.out / "new").rename(self.out / "last")
        self.launch.succeed(120)
        assert self.rows(0)[-1].step == self.rows(1)[-1].step == last
        return last


def check_samples(every: list[list[Row]], last: int) -> list[dict[int, tuple[int, ...]]]:
    """Each process of a rank gets the same samples, none of them twice in an epoch; returns them by step."""
    dealt: list[dict[int, tuple[int, ...]]] = [{}, {}]
    for rows, numbers in zip(every, dealt, strict=True):
        steps: dict[int, list[int]] = {}
        for row in rows:
            assert numbers.setdefault(row.step, row.numbers) == row.numbers
            steps.setdefault(row.pid, []).append(row.step)
        assert all(made == list(range(made[0], made[-1] + 1)) for made in steps.values())
    for first in range(1, last + 1, 16):
        steps = range(first, first + 16)
        epoch = [n for numbers in dealt for step in steps for n in numbers.get(step, ())]
        assert len(set(epoch)) == len(epoch)
    return dealt


def marks_of(every: list[list[Row]]) -> dict[int, str]:
    """The mark of the weights after each step; those of a rank on its way to the others do not change.

    In the last step of a process that is killed, those of the other rank count: it may have repeated the step alone.
    """
    marks: dict[int, str] = {}
    for rows in every:
        first = {row.pid: row.mark for row in reversed(rows)}
        last = {row.pid: row.step for row in rows}
        for row in rows:
            if not row.mark or (row.pid != rows[0].pid and row.mark == first[row.pid]):
                continue
            if row.pid != rows[-1].pid and row.step == last[row.pid]:
                marks.setdefault(row.step, row.mark)
            else:
                marks[row.step] = row.mark
    return marks


def train_alone(common, every: list[list[Row]], dealt, marks: dict[int, str], losses: int):
    """Train in this process what the ranks have trained, and compare after each step; return the model."""
    import torch

    model, data = common.Model(), common.Rows()
    optimizer = common.optimizer_of(model)

    def train(step: int, batches) -> bool:
        optimizer.param_groups[0]["lr"] = 1e-3 * 0.95 ** ((step - 1) // 100)
        optimizer.zero_grad()
        for numbers in batches:
            chosen = list(numbers)
            logits = model.body(data.inputs[chosen])
            loss = torch.nn.functional.cross_entropy(logits, data.labels[chosen])
            (loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mark = float(common.mark_of(model.parameters()))
        return mark == pytest.approx(float(marks[step]), rel=1e-6)

    for step in sorted(marks):
        rows = [row for of_rank in every for row in of_rank if row.step == step and row.mark]
        trained = {row.numbers for row in rows if row.mark == marks[step]}
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if not train(step, trained):  # a rank was killed after its sum, before it could say so
            losses -= 1
            model.load_state_dict(before[0])
            optimizer.load_state_dict(before[1])
            assert train(step, [numbers[step] for numbers in dealt])
        assert {row.rate for row in rows} == {round(1e-3 * 0.95 ** (step // 100), 9)}
    assert losses >= 0
    return model


def saved_marks(common, engine: str, out: Path) -> dict[int, str]:
    """Step and mark of the model in each checkpoint; each is whole."""
    import torch
    from safetensors.torch import load_file

    if engine == "lightning":
        states = [torch.load(path, weights_only=False) for path in (out / "saved").glob("*.ckpt")]
        return {one["global_step"]: common.mark_of(one["state_dict"].values()) for one in states}
    pattern, optimizer = {
        "accelerate": ("saved-*", "optimizer.bin"), "transformers": ("saved/checkpoint-*", "optimizer.pt"),
    }[engine]  # fmt: skip
    folders = list(out.glob(pattern))
    assert all((folder / optimizer).exists() for folder in folders)
    return {
        int(folder.name.split("-")[1]): common.mark_of(
            load_file(folder / "model.safetensors").values()
        )
        for folder in folders
    }


@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=needs(name)) for name in ("accelerate", "transformers", "lightning")],
)
def test_survivors_of_an_engine_keep_their_processes(run, common, engine) -> None:
    """Rank 1 is killed, and later rank 0, which saves: each step is that of the ranks that train in it."""
    import torch

    training = Training(run, engine)
    training.wait_for_step(15)
    for victim in (1, 0):
        training.lose(victim)
    last = training.end()
    assert len(training.launch.events_of(events.RoundOpened)) == 1
    every = [training.rows(rank) for rank in range(2)]
    dealt, marks = check_samples(every, last), marks_of(every)
    assert sorted(marks) == list(range(1, last + 1))
    model = train_alone(common, every, dealt, marks, losses=2)
    end = torch.load(training.out / "end.pt")
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(end[name], weight, rtol=0, atol=1e-5)
    saved = saved_marks(common, engine, training.out)
    assert saved == {step: marks[step] for step in saved}
    assert max(saved) > last - 10
    if engine == "transformers":
        state = json.loads((training.out / "state.json").read_text())
        losses = {
            row["step"]: row["eval_loss"] for row in state["log_history"] if "eval_loss" in row
        }
        assert list(losses) == list(range(10, last + 1, 10))
        assert (state["best_metric"], losses[state["best_global_step"]]) == (
            min(losses.values()),
        ) * 2


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
def test_a_rank_that_finds_a_newer_checkpoint_than_the_others_cannot_join(run) -> None:
    """All ranks start again from it; the program of a plain loop alone knows at which step it begins."""
    training = Training(run, "accelerate", "resume")
    training.wait_for_step(15)
    psutil.Process(training.rows(1)[-1].pid).kill()
    opened = functools.partial(training.launch.events_of, events.RoundOpened)
    training.launch.until(lambda: len(opened()) == 2, 120, "another round")
    assert "began with a newer checkpoint than the others" in opened()[-1].body.reason
    training.launch.until(lambda: len({row.pid for row in training.rows(0)}) == 2, 60, "a start")
    training.end()
