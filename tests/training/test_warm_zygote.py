"""A zygote that has imported modules ahead: its workers cannot tell, but for the time."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.training.programs import ERRORS, Ended, Worker, Zygote, plain, read_json, write

pytestmark = [pytest.mark.slow]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A directory that counts as one of installed packages."""
    directory = tmp_path / "site-packages"
    directory.mkdir()
    return directory


def run_warm(directory: Path, preload: dict, *programs: Sequence[str]) -> list[Worker]:
    """Run programs as workers of a zygote that has imported modules, which must not be a problem."""
    zygote = Zygote(directory, preload, PYTHONPATH=str(directory / "site-packages"))
    workers = zygote.run(*programs)
    assert not zygote.problem
    return workers


def problem_of(directory: Path, preload: dict) -> str:
    zygote = Zygote(directory, preload, PYTHONPATH=str(directory / "site-packages"))
    zygote.run(["program.py"])
    return zygote.problem


def test_a_warm_zygote_has_imported_what_its_workers_need(
    tmp_path: Path, packages: Path, capfd
) -> None:
    write(packages, installed="print('imported', __name__)\nimport json.tool")
    write(tmp_path, program="import sys, installed; print('json.tool' in sys.modules)")
    workers = run_warm(tmp_path, {"names": ["installed"]}, ["program.py"], ["program.py"])
    assert [worker.ended for worker in workers] == [Ended(0, "True\n", "")] * 2
    assert capfd.readouterr() == ("", "")


def test_what_importing_does_to_a_process_is_there_in_a_fork(
    tmp_path: Path, packages: Path
) -> None:
    source = """
        import atexit, os, sys, warnings
        os.environ.setdefault("KMP_INIT_AT_FORK", "FALSE")
        os.environ["PATH"] += ":/opt/installed"
        os.environ.pop("TO_REMOVE", None)
        warnings.filterwarnings("error", message="of this kind")
        warnings.warn("while importing")
        sys.path.append("/added")
        atexit.register(print, "exit handler of the package")
        """
    write(packages, installed=source)
    source = """
        import installed, os, sys, warnings
        print(os.environ["KMP_INIT_AT_FORK"], os.environ["PATH"], os.environ.get("TO_REMOVE"))
        print(warnings.filters, warnings.showwarning.__module__)
        print([path for path in sys.path if "zip" not in path])
        """
    write(tmp_path, program=source)
    variables = {"PYTHONPATH": str(packages), "TO_REMOVE": "x"}
    expected = plain(tmp_path, "program.py", **variables)
    (worker,) = Zygote(tmp_path, {"names": ["installed"]}, **variables).run(["program.py"])
    assert worker.ended.code == expected.code == 0
    assert worker.ended.stdout == expected.stdout
    assert "while importing" in expected.stderr  # this alone a fork has no reason to repeat
    assert worker.ended.stderr == ""


@pytest.mark.parametrize("source", ["os.environ['LOCAL_RANK']", "os.getenv('RANK', '0')"])
def test_modules_that_ask_for_their_rank_are_not_imported_ahead(
    tmp_path: Path, packages: Path, source: str
) -> None:
    write(packages, installed=f"import os; rank = {source}")
    write(tmp_path, program="import installed; print(installed.rank)")
    problem = problem_of(tmp_path, {"names": ["installed"]})
    assert "RANK, which only workers have" in problem


def test_modules_with_threads_are_not_imported_ahead(tmp_path: Path, packages: Path) -> None:
    thread = "threading.Thread(target=time.sleep, args=(9,), daemon=True, name='beat').start()"
    write(packages, installed=f"import threading, time; {thread}")
    write(tmp_path, program="")
    assert problem_of(tmp_path, {"names": ["installed"]}) == "importing started threads: beat"


@pytest.mark.parametrize("case", ["ready", "unfit", "killed"])
def test_workers_wait_for_a_zygote_that_still_imports(
    tmp_path: Path, packages: Path, case: str
) -> None:
    """It began to import before they would; what it cannot start is started elsewhere."""
    unfit = "import threading; threading.Timer(9, print).start()" if case == "unfit" else ""
    write(packages, installed=f"import time; time.sleep(0.5)\n{unfit}")
    write(tmp_path, program="import sys; print('installed' in sys.modules)")
    zygote = Zygote(tmp_path, {"names": ["installed"]}, PYTHONPATH=str(packages))
    zygote.patient = True
    strike = signal.SIGKILL if case == "killed" else None
    workers = zygote.run(["program.py"], strike_zygote=strike)
    assert [worker.ended.stdout for worker in workers] == (["True\n"] if case == "ready" else [])
    assert zygote.unfit == (0 if case == "ready" else 1)


def test_modules_with_native_threads_are_not_imported_ahead(tmp_path: Path, packages: Path) -> None:
    """As of OpenMP or MPI: Python does not know of them, and a fork would not have them."""
    source = """
        import ctypes
        libc = ctypes.CDLL(None)
        assert not libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.pause, None)
        """
    write(packages, installed=source)
    write(tmp_path, program="")
    assert problem_of(tmp_path, {"names": ["installed"]}) == "importing started 1 native thread"


def test_modules_that_open_a_device_are_not_imported_ahead(tmp_path: Path, packages: Path) -> None:
    """As asking a driver for its accelerators does."""
    device = next((path for path in ("/dev/fuse", "/dev/net/tun") if os.access(path, os.R_OK)), "")
    if not device:
        pytest.skip("this process may open no device")
    write(packages, installed=f"held = [open(path) for path in ({device!r}, '/dev/null')]")
    write(tmp_path, program="")
    assert problem_of(tmp_path, {"names": ["installed"]}) == f"importing opened {device}"


def test_a_module_that_fails_to_import_is_the_workers_to_report(
    tmp_path: Path, packages: Path
) -> None:
    write(packages, installed="raise ValueError('broken package')", other="")
    write(tmp_path, program="import other, installed")
    names = ["installed", "no_longer_there", "other"]
    (worker,) = run_warm(tmp_path, {"names": names}, ["program.py"])
    assert worker.ended.stderr.endswith("ValueError: broken package\n")
    assert worker.error["message"]["message"] == "ValueError: broken package"


LISTS = """
    import json, sys
    sys.path.append("..")
    import helper, installed, shared
    from dlrover.training.worker import bootstrap
    with open("loaded.json", "w") as file:
        json.dump(bootstrap.loaded_modules(), file)
    print(shared.__file__)
    """


def test_a_programs_own_modules_come_before_installed_ones(tmp_path: Path, packages: Path) -> None:
    """A package imports a module that the program replaces: so must it be after a restart."""
    write(packages, installed="import shared", shared="")
    write(tmp_path, program=LISTS, helper="", shared="")
    (cold,) = Zygote(tmp_path, PYTHONPATH=str(packages)).run(["program.py"])
    assert cold.ended == Ended(0, f"{tmp_path}/shared.py\n", "")
    loaded = read_json(tmp_path / "loaded.json")
    own = {name: f"{tmp_path}/{name}.py" for name in ("helper", "shared")}
    assert "installed" in loaded["names"]
    assert loaded["own"] == own
    expected = "importing loaded other modules than the program's: shared"
    assert problem_of(tmp_path, loaded) == expected


def test_a_restart_runs_the_program_as_it_is_now(tmp_path: Path, packages: Path) -> None:
    write(packages, installed="", shared="")
    write(tmp_path, program=LISTS, helper="")
    (cold,) = Zygote(tmp_path, PYTHONPATH=str(packages)).run(["program.py"])
    loaded = read_json(tmp_path / "loaded.json")
    assert cold.ended.stdout == f"{packages}/shared.py\n"
    assert loaded["own"] == {"helper": f"{tmp_path}/helper.py"}
    write(tmp_path, helper="print('a new helper')")
    (worker,) = run_warm(tmp_path, loaded, ["program.py"])
    assert worker.ended.stdout == f"a new helper\n{packages}/shared.py\n"
    write(tmp_path, program="import sys; print('installed' in sys.modules)\nimport broken_now")
    (worker,) = run_warm(tmp_path, loaded, ["program.py"])
    assert (worker.ended.code, worker.ended.stdout) == (1, "True\n")


def test_modules_of_the_current_directory_are_not_imported_ahead(
    tmp_path: Path, packages: Path
) -> None:
    """The program lies elsewhere, so it took the installed module of this name."""
    (tmp_path / "source").mkdir()
    write(packages, shared="")
    write(tmp_path, shared="raise SystemExit('wrong module')")
    write(tmp_path / "source", program="import shared; print(shared.__file__)")
    (worker,) = run_warm(tmp_path, {"names": ["shared"]}, ["source/program.py"])
    assert worker.ended == Ended(0, f"{packages}/shared.py\n", "")


def test_forks_draw_different_random_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    source = """
        import numpy, random, uuid, tempfile
        print(random.random(), numpy.random.rand(), uuid.uuid4(), tempfile.mktemp())
        """
    write(tmp_path, program=source)
    names = ["random", "tempfile", "uuid", *(["numpy", "numpy.random"] if numpy else [])]
    first, second = run_warm(tmp_path, {"names": names}, ["program.py"], ["program.py"])
    drawn = [set(worker.ended.stdout.split()) for worker in (first, second)]
    assert len(drawn[0]) == 4
    assert not drawn[0] & drawn[1]


def test_generators_made_at_import_are_as_in_a_new_process(tmp_path: Path, packages: Path) -> None:
    """Those seeded by the system differ from fork to fork, those given a seed are what they would be."""
    pytest.importorskip("numpy")
    source = """
        import random
        import numpy
        random.seed(7)
        numpy.random.seed(7)
        given = [random, random.Random(5), numpy.random, numpy.random.RandomState(42)]
        own = [random.Random(), numpy.random.RandomState(), random.Random(3)]
        own[2].seed()
        given_new, own_new = numpy.random.default_rng(0), numpy.random.default_rng()
        """
    write(packages, installed=source)
    source = """
        from installed import *
        print(*(each.random() for each in [*given, given_new]), given_new.spawn(1)[0].random())
        print(*(each.random() for each in [*own, own_new]), own_new.spawn(1)[0].random())
        """
    write(tmp_path, program=source)
    names = ["random", "numpy", "numpy.random", "installed"]
    cold = plain(tmp_path, "program.py", PYTHONPATH=str(packages))
    warm = run_warm(tmp_path, {"names": names}, ["program.py"], ["program.py"])
    ended = [cold.stdout.splitlines(), *(worker.ended.stdout.splitlines() for worker in warm)]
    assert len({given for given, _ in ended}) == 1
    drawn = [set(own.split()) for _, own in ended]
    assert len(set.union(*drawn)) == 3 * 5


@pytest.mark.torch
@pytest.mark.timeout(60)
def test_forks_have_different_generators_of_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write(tmp_path, program="import torch; print(torch.rand(1).item())")
    workers = run_warm(tmp_path, {"names": ["torch"]}, ["program.py"], ["program.py"])
    assert len({worker.ended.stdout for worker in workers}) == 2


@pytest.mark.parametrize("case", ["exception", "context", "syntax", "own hook", "exit handler"])
def test_errors_look_the_same_in_a_warm_fork(tmp_path: Path, case: str) -> None:
    write(tmp_path, program=ERRORS[case])
    expected = plain(tmp_path, "program.py")
    (worker,) = run_warm(tmp_path, {"names": ["json.tool", "random"]}, ["program.py"])
    assert worker.ended == expected


# ---- PyTorch

STEPS = """
    import torch

    class Own(torch.optim.SGD):
        pass

    def parameter():
        return torch.nn.Parameter(torch.zeros(1))

    first, second = Own([parameter()]), torch.optim.Adagrad([parameter()])
    for _ in range(5):
        for optimizer in (first, second):
            optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
            optimizer.step()
    print(type(first.step).__name__, second.state_dict()["param_groups"][0]["lr"])
    """


@pytest.mark.torch
@pytest.mark.timeout(60)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_the_steps_of_the_first_optimizer_are_counted(tmp_path: Path, warm: bool) -> None:
    pytest.importorskip("torch")
    write(tmp_path, program=STEPS)
    began = time.time()
    zygote = Zygote(tmp_path, {"names": ["torch"]} if warm else None)
    (worker,) = zygote.run(["program.py"])
    assert worker.ended == Ended(0, "method 0.01\n", "")
    assert worker.slot.steps == 5
    assert began < worker.slot.first_step <= worker.slot.last_step < time.time()
    assert worker.slot.modules_listed
    assert "torch.optim.adagrad" in worker.modules["names"]
    assert not zygote.problem


@pytest.mark.torch
def test_the_hook_on_the_import_leaves_no_trace(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    source = """
        import importlib.util, inspect, sys, torch
        module = sys.modules["torch.optim.optimizer"]
        print(type(module.__loader__), type(module.__spec__.loader), module.__spec__.origin[-12:])
        print(type(importlib.util.find_spec(module.__name__).loader), len(inspect.getsource(module)))
        import torch._dynamo.callback
        import torch.distributed.checkpoint
        import transformers.trainer_callback
        print([type(finder).__module__ for finder in sys.meta_path])
        """
    write(tmp_path, program=source)
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "trainer_callback.py").write_text(
        "class CallbackHandler:\n    def on_train_begin(self): ...\n"
    )
    (worker,) = Zygote(tmp_path).run(["program.py"])
    assert worker.ended == plain(tmp_path, "program.py")


@pytest.mark.torch
def test_what_record_has_written_is_kept(tmp_path: Path) -> None:
    """torch's own decorator writes the error file first."""
    pytest.importorskip("torch")
    source = """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise ValueError("recorded by torch")

        main()
        """
    write(tmp_path, program=source)
    error_file = str(tmp_path / "worker-0.error.json")
    (worker,) = Zygote(tmp_path, TORCHELASTIC_ERROR_FILE=error_file).run(["program.py"])
    assert worker.ended.code == 1
    assert worker.ended.stderr.endswith("ValueError: recorded by torch\n")
    assert worker.error["message"]["message"] == "ValueError: recorded by torch"
    assert "time" not in worker.error["message"]["extraInfo"]  # which ours would have


@pytest.mark.torch
def test_forks_draw_different_numbers_from_torch(tmp_path: Path) -> None:
    """As new processes do, unless the program sets a seed."""
    pytest.importorskip("torch")
    source = "import torch; print(torch.initial_seed(), torch.rand(1).item())"
    write(tmp_path, program=source)
    first, second = run_warm(tmp_path, {"names": ["torch"]}, ["program.py"], ["program.py"])
    drawn = [set(worker.ended.stdout.split()) for worker in (first, second)]
    assert len(drawn[0]) == len(drawn[1]) == 2
    assert not drawn[0] & drawn[1]
