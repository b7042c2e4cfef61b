"""What a training does gets on the board with nothing in the program, and the program sees nothing of it."""

import functools
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import pytest

from dlrover.agent.workers.zygotes import make_board
from dlrover.spec.activity import Activity
from dlrover.spec.measurements import WorkerActivity
from dlrover.training.worker.progress import Board
from tests.support.forks import Forks

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(60)]

START = """
import os
{before}
from dlrover.training.worker import bootstrap
from dlrover.training.worker.progress import Board
program = bootstrap.Program("script", "program.py", [], "", 3, steps_file={steps!r})
bootstrap.run(program, Board(os.open("/proc/{pid}/fd/{fd}", os.O_RDWR)))
"""

TRAINING = """
    import time, torch
    from torch.utils.data import DataLoader

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch=torch.ones(4)):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    """


class Worked:
    """A worker that has ended: its output, and what the board says of it."""

    def __init__(
        self, directory: Path, forks: Forks | None, *sources: str, before: str = "", steps: str = ""
    ) -> None:
        """Run a program in a fork of a process that has imported PyTorch, or in a new interpreter."""
        text = "\n".join(map(textwrap.dedent, sources))
        (directory / "program.py").write_text(text)
        start, fd = directory / "start.py", make_board()
        start.write_text(START.format(pid=os.getpid(), fd=fd, before=before, steps=steps))
        try:
            process = (
                forks.start(start, cwd=directory)
                if forks is not None
                else subprocess.Popen(
                    [sys.executable, start], cwd=directory, stdout=PIPE, stderr=PIPE, text=True
                )
            )
            self.stdout, self.stderr = process.communicate(timeout=50)
            self.activity = Board(fd).activity(3, time.monotonic_ns())
        finally:
            os.close(fd)
        self.code = process.poll()

    @property
    def did(self) -> WorkerActivity:
        assert self.code == 0, self.stderr
        assert self.activity is not None
        return self.activity

    def seconds(self, activity: Activity) -> float:
        return self.did.seconds[activity]


@pytest.fixture
def work(tmp_path: Path, forks: Forks) -> Callable[..., Worked]:
    """Runs a program where PyTorch has been imported before: hooks are placed at once."""
    return functools.partial(Worked, tmp_path, forks)


@pytest.fixture
def work_cold(tmp_path: Path) -> Callable[..., Worked]:
    """Runs a program that imports PyTorch itself: each hook is placed when its module is imported."""
    return functools.partial(Worked, tmp_path, None)


def test_start_ends_with_the_first_step(work_cold: Callable[..., Worked]) -> None:
    worked = work_cold(TRAINING, "time.sleep(0.3)", "step(); step(); time.sleep(0.2)")
    assert worked.seconds(Activity.START) > 0.3
    assert worked.did.steps == 2
    assert worked.did.doing == Activity.STEP
    assert 0.2 < worked.seconds(Activity.STEP) == pytest.approx(sum(worked.did.seconds[1:]))


def test_a_training_that_goes_over_to_another_optimizer_goes_on_counting(
    work: Callable[..., Worked],
) -> None:
    """It counted as hanging in its last step, for as long as it trained, and the first one stayed in memory."""
    worked = work(
        TRAINING,
        """
        import gc, weakref
        step(); step()
        first = weakref.ref(optimizer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gc.collect()
        print(first())
        for _ in range(30):
            step()
        """,
    )
    assert worked.stdout == "None\n"
    assert worked.did.steps == 22  # the first one might have come back within ten


def test_a_second_optimizer_does_not_count_but_shows_life(work: Callable[..., Worked]) -> None:
    worked = work(
        TRAINING,
        "first, second = optimizer, torch.optim.SGD(model.parameters(), lr=0.1)",
        """
        for _ in range(2):
            for optimizer in [first, *9 * [second]]:
                step()
        time.sleep(0.3)
        optimizer = second
        for _ in range(9):
            step()
        optimizer = first
        step()
        optimizer = second
        time.sleep(0.3)
        for _ in range(15):
            step()
        """,
    )
    assert worked.did.steps == 3
    assert worked.did.since < worked.seconds(Activity.STEP) - 0.6


@pytest.mark.parametrize("workers", [0, 1])
def test_waiting_for_data(work: Callable[..., Worked], workers: int) -> None:
    worked = work(
        TRAINING,
        f"""
        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                time.sleep(0.2)
                return torch.ones(4)

        for batch in DataLoader(Slow(), num_workers={workers}):
            step(batch)
        """,
    )
    assert worked.did.steps == 4
    assert 0.35 < worked.seconds(Activity.DATA) < 3  # three of four, the first is part of the start


def test_evaluation_lasts_until_the_next_step_or_train(work: Callable[..., Worked]) -> None:
    worked = work(
        TRAINING,
        """
        teacher = torch.nn.Linear(4, 1)
        teacher.eval()
        model.eval()
        step()
        teacher.eval(); time.sleep(0.1); step()
        model.eval()
        for _ in DataLoader([1, 2]):
            time.sleep(0.1)
        model.train(); time.sleep(0.6)
        model.eval(); time.sleep(0.1); step()
        time.sleep(0.6)
        """,
    )
    assert 0.3 <= worked.seconds(Activity.EVAL) < 0.9
    assert worked.seconds(Activity.DATA) == 0
    assert worked.did.doing == Activity.STEP


def test_compiling(work: Callable[..., Worked]) -> None:
    worked = work(
        TRAINING,
        """
        compiled = torch.compile(lambda x: x * 2, backend="eager")
        compiled(torch.ones(2))
        step()
        """,
    )
    assert worked.seconds(Activity.COMPILE) > 0
    assert worked.did.doing == Activity.STEP


SLOW_SAVE = """
    class Slow:
        def __reduce__(self):
            time.sleep(0.2)
            return Slow, ()
    """


@pytest.mark.parametrize(
    "save",
    [
        "torch.save(Slow(), 'file.pt')",
        "from torch.serialization import save; save(Slow(), 'file.pt')",
        "import torch.distributed.checkpoint as dcp; dcp.save({'a': Slow()}, checkpoint_id='dcp')",
        "with dlrover.training.activity('checkpoint'): time.sleep(0.2)",
    ],
    ids=["torch.save", "from torch", "distributed", "told"],
)
def test_checkpoints(work: Callable[..., Worked], save: str) -> None:
    worked = work("import dlrover.training", TRAINING, SLOW_SAVE, "step()", save)
    assert 0.2 < worked.seconds(Activity.CHECKPOINT) < 5
    assert worked.did.doing == Activity.STEP


def test_a_program_that_imports_pytorch_itself_is_watched_too(
    work_cold: Callable[..., Worked],
) -> None:
    worked = work_cold(
        TRAINING,
        SLOW_SAVE,
        """
        import torch.distributed.checkpoint as dcp
        from torch.serialization import save

        for batch in DataLoader([1.0, 2.0], collate_fn=lambda _: time.sleep(0.5)):
            step()
        save(Slow(), "file.pt")
        dcp.save({"a": Slow()}, checkpoint_id="dcp")
        model.eval(); time.sleep(0.1); model.train()
        torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
        """,
    )
    assert 0.5 <= worked.seconds(Activity.DATA) < 1.0  # one of two, the first is part of the start
    assert 0.4 < worked.seconds(Activity.CHECKPOINT) < 5
    assert 0.1 < worked.seconds(Activity.EVAL) < 5
    assert worked.seconds(Activity.COMPILE) > 0


def test_our_own_checkpointer_tells_the_first_step(work: Callable[..., Worked]) -> None:
    pytest.importorskip("xxhash")
    load = """
        from dlrover.checkpoint import Checkpointer
        checkpointer = Checkpointer("ckpt", linger=0)
        state = {"model": model, "step": 0}
        checkpointer.load(state)
        step()
        """
    save = "checkpointer.save(7, state, to='storage'); checkpointer.wait()"
    first = work(TRAINING, load, save, "checkpointer.close()")
    assert first.did.first_step == 0
    assert first.seconds(Activity.CHECKPOINT) > 0
    again = work(TRAINING, load, "checkpointer.close()")
    assert again.did.first_step == 7


def test_a_file_of_steps_tells_the_first_step_of_a_training_that_saves_by_itself(
    work: Callable[..., Worked], tmp_path: Path
) -> None:
    path = tmp_path / "losses.jsonl"
    path.write_text('{"step": 40}\n')
    record = """
    step()
    open("losses.jsonl", "a").write('{"step": 41}\\n')
    step()
    """
    assert work(TRAINING, record, steps=str(path)).did.first_step == 40
    assert work(TRAINING, record).did.first_step == -1


def test_a_save_tells_the_first_step_of_a_training_that_loads_by_itself(
    work: Callable[..., Worked],
) -> None:
    pytest.importorskip("xxhash")
    source = """
        from dlrover.checkpoint import Checkpointer
        checkpointer = Checkpointer("ckpt", linger=0)
        step(); step()
        checkpointer.save(102, {"model": model})
        checkpointer.close()
        """
    assert work(TRAINING, source).did.first_step == 100


def test_a_program_tells_how_many_steps_are_left(work: Callable[..., Worked]) -> None:
    assert work(TRAINING, "step()").did.left == -1
    source = "step(); import dlrover.training; dlrover.training.steps_left(10); step(); step()"
    assert work(TRAINING, source).did.left == 8
    beyond = "import dlrover.training; dlrover.training.steps_left(1); step(); step()"
    assert work(TRAINING, beyond).did.left == 0


def test_transformers_tells_how_many_steps_are_left(
    work: Callable[..., Worked], tmp_path: Path
) -> None:
    """Its Trainer's event at the begin of a training, with a module of the library's name and classes."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "trainer_callback.py").write_text(
        "class CallbackHandler:\n"
        "    def on_train_begin(self, args, state, control):\n"
        "        return control\n"
    )
    source = """
        import types
        from transformers.trainer_callback import CallbackHandler
        state = types.SimpleNamespace(max_steps=500, global_step=200)
        assert CallbackHandler().on_train_begin(None, state, "control") == "control"
        step(); step()
        """
    assert work(TRAINING, source).did.left == 298


def test_what_other_processes_and_threads_do_does_not_count(work: Callable[..., Worked]) -> None:
    worked = work(
        TRAINING,
        SLOW_SAVE,
        """
        import os, threading
        step()
        thread = threading.Thread(target=torch.save, args=(Slow(), "file.pt"))
        thread.start(); thread.join()
        pid = os.fork()
        if pid == 0:
            step(); torch.save(Slow(), "other.pt"); model.eval()
            os._exit(0)
        os.waitpid(pid, 0)
        """,
    )
    assert worked.did.steps == 1
    assert worked.seconds(Activity.CHECKPOINT) == worked.seconds(Activity.EVAL) == 0


def test_a_training_in_another_thread_counts(work: Callable[..., Worked]) -> None:
    source = """
        import threading
        thread = threading.Thread(target=lambda: [step(), model.eval(), time.sleep(0.1)])
        thread.start(); thread.join()
        """
    worked = work(TRAINING, source)
    assert worked.did.steps == 1
    assert worked.seconds(Activity.EVAL) > 0.1


# ---- compute time


def test_waiting_for_others_is_not_compute_time(work: Callable[..., Worked]) -> None:
    """After the last gradient a rank waits for the others: here the optimizer does the waiting."""
    worked = work(
        TRAINING,
        """
        for _ in range(13):
            optimizer.zero_grad()
            time.sleep(0.02)
            model(torch.ones(4)).sum().backward()
            time.sleep(0.1)
            optimizer.step()
        """,
    )
    # The first two steps look for the last gradient: they count in full, or not at all.
    assert 11 * 0.02 < worked.did.compute < 1.2


def test_an_evaluation_is_not_compute_time(work: Callable[..., Worked]) -> None:
    source = """
        for _ in range(11):
            model.eval(); time.sleep(0.1); model.train()
            time.sleep(0.03)
            step()
        """
    assert 0.3 < work(TRAINING, source).did.compute < 1.2


def test_the_hooks_follow_other_parameters_and_are_few(work: Callable[..., Worked]) -> None:
    worked = work(
        """
        import torch
        layers = [torch.nn.Linear(4, 4) for _ in range(5)]
        hooks = lambda: [len(p._post_accumulate_grad_hooks or ()) for l in layers for p in l.parameters()]
        optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
        def step(used):
            x = torch.ones(4)
            for layer in used:
                x = layer(x)
            x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return sum(hooks())
        print([step(layers[:1]) for _ in range(4)])
        optimizer.add_param_group({"params": layers[1].parameters()})
        print([step(layers[:2]) for _ in range(4)])
        print([step(layers[1:2]) for _ in range(8)])
        """,
    )
    assert worked.did.steps == 16
    lines = worked.stdout.splitlines()
    assert lines[0] == "[2, 1, 1, 1]"
    assert lines[1] == "[4, 1, 1, 1]"
    assert json.loads(lines[2])[-1] == 1


# ---- the program sees nothing


def test_the_program_sees_what_it_would_without(
    work_cold: Callable[..., Worked], tmp_path: Path
) -> None:
    source = """
        import inspect, pickle, torch
        from torch.utils.data import DataLoader
        import torch.distributed.checkpoint as dcp
        iterator = torch.utils.data.dataloader._BaseDataLoaderIter
        for function in (torch.save, dcp.save, dcp.load, torch.nn.Module.eval, torch.nn.Module.train,
                         iterator.__next__):
            print(function.__module__, function.__qualname__, inspect.signature(function))
            print(inspect.getsource(function)[:40])
        print(pickle.loads(pickle.dumps(torch.save)) is torch.save)
        print(torch.save is torch.serialization.save, dcp.save is dcp.state_dict_saver.save)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        print(model.eval() is model, model[0].training, model.train() is model, model[0].training)
        print(list(DataLoader([1, 2])))
        try:
            model.train("yes")
        except ValueError as error:
            print(error)
        """
    seen = work_cold(source)
    plain = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert seen.stdout == plain.stdout
    assert seen.stderr == ""


def test_no_frame_of_ours_is_in_a_traceback(
    work_cold: Callable[..., Worked], tmp_path: Path
) -> None:
    source = """
        from torch.utils.data import DataLoader
        class Broken:
            def __len__(self):
                return 1
            def __getitem__(self, index):
                raise KeyError(index)
        for _ in DataLoader(Broken()):
            pass
        """
    worked = work_cold(source)
    plain = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert worked.stderr == plain.stderr.replace("program.py", "program.py")
    assert "KeyError: 0" in worked.stderr


def test_no_frame_of_what_survive_puts_around_pytorch_is_in_a_traceback(
    work_cold: Callable[..., Worked], tmp_path: Path
) -> None:
    source = """
        import torch
        class Broken(torch.optim.SGD):
            def step(self, closure=None):
                raise KeyError("mine")
        optimizer = Broken([torch.nn.Parameter(torch.zeros(1))])
        try:
            optimizer.step()
        except KeyError as error:
            raise ValueError("on top of it") from error
        """
    worked = work_cold(
        source, before="from dlrover.training.replicas import hooks; hooks.install()"
    )
    plain = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert worked.stderr == plain.stderr
    assert "on top of it" in worked.stderr


def test_an_error_that_has_our_frames_alone_is_a_traceback_all_the_same(
    work_cold: Callable[..., Worked],
) -> None:
    """Before, the launcher took the error behind it for the program's end, and ended the job."""
    before = """
import types
from dlrover.training.replicas import hooks
hooks.install()
hooks._running.append(types.SimpleNamespace(replaying=True))
"""
    worked = work_cold("raise ValueError('on its way')", before=before)
    assert worked.stderr.count("Traceback (most recent call last):") == 2
    assert worked.stderr.endswith("(ValueError: on its way); all ranks start again.\n")


def test_what_survive_cannot_do_is_a_sentence_below_the_programs_own_frames(
    work_cold: Callable[..., Worked],
) -> None:
    worked = work_cold("from dlrover.training.replicas.link import open_link\nopen_link()")
    assert "link.py" not in worked.stderr
    assert worked.stderr.endswith("start the program with dlrover-run --survive.\n")


@pytest.mark.parametrize(
    "hook", ["tracker.begin", "tracker.evaluate", "compute.step", "compute._on_gradient"]
)
def test_a_failing_hook_is_turned_off_with_one_line(work: Callable[..., Worked], hook: str) -> None:
    names = {
        "tracker.begin": "Tracker.begin",
        "tracker.evaluate": "Tracker.evaluate",
        "compute.step": "ComputeTime.step",
        "compute._on_gradient": "ComputeTime._on_gradient",
    }
    module, owner = hook.partition(".")[0], names[hook]
    before = (
        f"from dlrover.training.worker import {module}\n"
        "def broken(*_):\n    raise RuntimeError('broken')\n"
        f"{module}.{owner} = broken\n"
    )
    source = """
        for batch in DataLoader(torch.ones(5, 4)):
            step(batch)
            model.eval()
        print("trained")
        """
    worked = work(TRAINING, source, before=before)
    assert worked.stdout == "trained\n"
    lines = worked.stderr.splitlines()
    assert lines
    assert all(line.endswith(" is turned off: RuntimeError: broken") for line in lines), lines
    assert len(set(lines)) == len(lines) <= 2  # one for each hook
    assert worked.did.steps == 5


def test_a_worker_whose_steps_cannot_be_counted_is_not_watched(work: Callable[..., Worked]) -> None:
    before = (
        "from dlrover.training.worker import tracker\n"
        "def broken(*_):\n    raise RuntimeError('broken')\n"
        "tracker.Tracker.step = broken\n"
    )
    worked = work(TRAINING, "step(); step(); print('trained')", before=before)
    assert (worked.code, worked.stdout) == (0, "trained\n")
    assert worked.activity is None
