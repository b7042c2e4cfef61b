"""Verdicts on real failures: programs that were really run (`fixtures/gather.py`), recorded or anew."""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from dlrover.master.diagnosis_rules import table
from dlrover.master.machine.diagnosis import diagnosis
from dlrover.spec.failure import Failure, FailureKind, Origin

TABLE = table()
diagnose = TABLE.diagnose


def is_echo(failure: Failure) -> bool:
    return diagnose(failure).echo


def root_cause(failures: list[Failure]) -> Failure:
    return diagnosis.root_cause([TABLE.failed(failure) for failure in failures]).failure


FIXTURES = Path(__file__).parent / "fixtures"
_spec = importlib.util.spec_from_file_location("gather", FIXTURES / "gather.py")
gather = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gather)

RECORDED = msgspec.json.decode(gather.RECORDED.read_bytes(), type=dict[str, Failure])
TRAIN = f"{gather.PROJECT}/train.py"
USER, INFRASTRUCTURE, UNKNOWN = Origin.USER, Origin.INFRASTRUCTURE, Origin.UNKNOWN


class Expected(NamedTuple):
    title: str
    """The title's beginning."""
    origin: Origin
    evidence: str
    """The evidence's beginning."""
    signature: str
    advice: str = ""
    """A part of the advice."""
    hopeless: bool = False
    echo: bool = False


EXPECTED = {
    "nested_exception": Expected(
        "rank 0 raised ValueError on node 0 (gpu-0): bad batch 2",
        USER,
        f'{TRAIN}:3: in load: raise ValueError(f"bad batch {{batch}}")\nValueError: bad batch 2',
        "exception:ValueError:train.py:load:3",
        "train.py:3",
    ),
    "library_exception": Expected(
        "rank 0 raised JSONDecodeError on node 0 (gpu-0): Expecting property name",
        USER,
        f"{TRAIN}:4: in read_labels: return json.loads(\"{{'a': 1}}\")\nJSONDecodeError: Expecting",
        "exception:JSONDecodeError:train.py:read_labels:4",
        "train.py:4",
    ),
    "raised_from": Expected(
        "rank 0 found a disk full (RuntimeError) on node 0 (gpu-0): the checkpoint could not be written",
        INFRASTRUCTURE,
        f"{TRAIN}:8: in save: raise RuntimeError(",
        "exception:RuntimeError:train.py:save:8",
        "/mnt/data/model.pt",
    ),
    "import_error": Expected(
        "rank 0 raised ModuleNotFoundError on node 0 (gpu-0): No module named 'no_such_module_at_all'",
        USER,
        f"{TRAIN}:1: in <module>: import no_such_module_at_all\nModuleNotFoundError: No module",
        "exception:ModuleNotFoundError:train.py:<module>:1",
        "Install the module",
        hopeless=True,
    ),
    "syntax_error": Expected(
        "rank 0 could not compile the program (SyntaxError) on node 0 (gpu-0): ",
        USER,
        f"{TRAIN}:1: def train(:\nSyntaxError: ",
        "exception:SyntaxError:train.py::1",
        "train.py:1",
        hopeless=True,
    ),
    "name_error": Expected(
        "rank 0 raised NameError on node 0 (gpu-0): name 'undefined_name' is not defined",
        USER,
        f"{TRAIN}:2: in train: return undefined_name\nNameError: ",
        "exception:NameError:train.py:train:2",
        "train.py:2",
        hopeless=True,
    ),
    "no_script": Expected(
        "rank 0 found no program to run (FileNotFoundError) on node 0 (gpu-0): [Errno 2] No such file",
        USER,
        f"FileNotFoundError: [Errno 2] No such file or directory: '{TRAIN}'",
        "exception:FileNotFoundError",
        "exists on every node",
        hopeless=True,
    ),
    "memory_error": Expected(
        "rank 0 ran out of memory (MemoryError) on node 0 (gpu-0)",
        USER,
        f"{TRAIN}:1: in <module>: bytearray(2**62)\nMemoryError",
        "exception:MemoryError:train.py:<module>:1",
        "smaller batch",
    ),
    "argparse_usage": Expected(
        "rank 0 rejected its arguments (exit code 2) on node 0 (gpu-0)",
        USER,
        "train.py: error: argument --lr: invalid float value: 'fast'",
        "exit:2",
        "Correct the arguments",
        hopeless=True,
    ),
    "argparse_conflict": Expected(
        "rank 0 rejected its arguments or configuration (ArgumentError) on node 0 (gpu-0): argument --lr",
        USER,
        f'{TRAIN}:6: in arguments: parser.add_argument("--lr")\nArgumentError: argument --lr',
        "exception:ArgumentError:train.py:arguments:6",
        "Correct the arguments",
        hopeless=True,
    ),
    "exit_3": Expected(
        "rank 0 left with exit code 3 on node 0 (gpu-0)",
        UNKNOWN,
        "it wrote nothing",
        "exit:3",
    ),
    "exit_message": Expected(
        "rank 0 left with exit code 1 on node 0 (gpu-0)",
        UNKNOWN,
        "no data under /data/train",
        "exit:1",
    ),
    "full_disk": Expected(
        "rank 0 found a disk full (OSError) on node 0 (gpu-0): [Errno 28] No space left on device",
        INFRASTRUCTURE,
        f'{TRAIN}:2: in save: with open("/dev/full", "w") as out:\nOSError: [Errno 28]',
        "exception:OSError:train.py:save:2",
        "what is written at train.py:2",
    ),
    "port_taken": Expected(
        "rank 0 found its port taken (OSError) on node 0 (gpu-0): [Errno 98] Address already in use",
        INFRASTRUCTURE,
        f'{TRAIN}:5: in serve: second.bind(("127.0.0.1", port))\nOSError: [Errno 98]',
        "exception:OSError:train.py:serve:5",
        "holds the port (requested at train.py:5)",
    ),
    "connection_refused": Expected(
        "rank 0 lost a network connection (ConnectionRefusedError) on node 0 (gpu-0): [Errno 111]",
        INFRASTRUCTURE,
        f'{TRAIN}:7: in fetch: socket.create_connection(("127.0.0.1", port))\nConnectionRefused',
        "exception:ConnectionRefusedError:train.py:fetch:7",
        "train.py:7",
    ),
    "interrupted": Expected(
        "rank 0 was interrupted (KeyboardInterrupt) on node 0 (gpu-0)",
        INFRASTRUCTURE,
        f"{TRAIN}:2: in <module>: os.kill(os.getpid(), signal.SIGINT)\nKeyboardInterrupt",
        "exception:KeyboardInterrupt:train.py:<module>:2",
        echo=True,
    ),
    "killed": Expected(
        "rank 0 was killed by SIGKILL (signal 9) on node 0 (gpu-0)",
        INFRASTRUCTURE,
        "SIGKILL; who sent it is not known",
        "signal:SIGKILL",
        "scheduler",
    ),
    "terminated": Expected(
        "rank 0 was asked to stop by SIGTERM (signal 15) on node 0 (gpu-0): it came from outside",
        INFRASTRUCTURE,
        "it wrote nothing",
        "signal:SIGTERM",
        "preempted",
        echo=True,
    ),
    "segfault": Expected(
        "rank 0 crashed with SIGSEGV (signal 11) on node 0 (gpu-0): native code touched memory",
        UNKNOWN,
        "",
        "signal:SIGSEGV",
        "train.py:4",
    ),
    "bus_error": Expected(
        "rank 0 crashed with SIGBUS (signal 7) on node 0 (gpu-0): memory backed by a file",
        INFRASTRUCTURE,
        f"{TRAIN}:9: in read_truncated",
        "signal:SIGBUS",
        "/dev/shm",
    ),
    "terminate_called": Expected(
        "rank 0 was aborted with SIGABRT (signal 6) on node 0 (gpu-0): nothing caught a C++ exception",
        UNKNOWN,
        "terminate called without an active exception",
        "signal:SIGABRT",
    ),
    "heap_corruption": Expected(
        "rank 0 was aborted with SIGABRT (signal 6) on node 0 (gpu-0): native code corrupted the memory",
        UNKNOWN,
        "",
        "signal:SIGABRT",
        "train.py:6",
    ),
    "abort": Expected(
        "rank 0 aborted itself with SIGABRT (signal 6) on node 0 (gpu-0)",
        UNKNOWN,
        f"{TRAIN}:2: in <module>",
        "signal:SIGABRT",
    ),
    "torch_out_of_memory": Expected(
        "rank 0 ran out of memory (RuntimeError) on node 0 (gpu-0): [enforce fail at alloc_cpu.cpp",
        USER,
        f"{TRAIN}:4: in allocate: return torch.empty(2**60)\nRuntimeError: ",
        "exception:RuntimeError:train.py:allocate:4",
        "smaller batch",
    ),
    "store_port_taken": Expected(
        "rank 0 found its port taken (DistNetworkError) on node 0 (gpu-0): The server socket",
        INFRASTRUCTURE,
        f'{TRAIN}:6: in start_store: dist.TCPStore("127.0.0.1", port, 1, is_master=True)\nDistNetworkError',
        "exception:DistNetworkError:train.py:start_store:6",
        "Another process of this node holds the port (",
    ),
    "store_timeout": Expected(
        "rank 0 lost the connection to its peers (DistStoreError) on node 0 (gpu-0): Timed out after",
        INFRASTRUCTURE,
        f'{TRAIN}:6: in rendezvous: dist.TCPStore("127.0.0.1", 0, 2, True, ',
        "exception:DistStoreError:train.py:rendezvous:6",
        echo=True,
    ),
    "loader_exception": Expected(
        "rank 0 raised KeyError on node 0 (gpu-0): 'sample 0'",
        USER,
        f'{TRAIN}:8: in __getitem__: raise KeyError(f"sample {{index}}")\nKeyError: ',
        "exception:KeyError:train.py:__getitem__:8",
        "train.py:8",
    ),
    "loader_bus_error": Expected(
        "rank 0 found /dev/shm full (RuntimeError) on node 0 (gpu-0): DataLoader worker (pid",
        INFRASTRUCTURE,
        f"{TRAIN}:13: in <module>: for _ in DataLoader(FillsSharedMemory(), num_workers=1):",
        "exception:RuntimeError:train.py:<module>:13",
        "/dev/shm",
    ),
    "command_not_found": Expected(
        "rank 0 was given a command that was not found (exit code 127) on node 0 (gpu-0)",
        USER,
        "",
        "exit:127",
        "full path",
        hopeless=True,
    ),
    "not_executable": Expected(
        "rank 0 was given a command that is not executable (exit code 126) on node 0 (gpu-0)",
        USER,
        "",
        "exit:126",
        "executable",
        hopeless=True,
    ),
    "child_killed": Expected(
        "rank 0 left with exit code 137 on node 0 (gpu-0): a program that it ran was killed by SIGKILL "
        "(signal 9)",
        INFRASTRUCTURE,
        "SIGKILL; who sent it is not known",
        "exit:137",
        "scheduler",
    ),
    "script_missing": Expected(
        "rank 0 found no program to run (exit code 2) on node 0 (gpu-0)",
        USER,
        "",
        "exit:2",
        "exists on every node",
        hopeless=True,
    ),
    "peer_1": Expected(
        "rank 1 lost the connection to its peers (RuntimeError) on node 1 (gpu-1): ",
        INFRASTRUCTURE,
        f"{gather.PROJECT}/1/train.py:10: in step: dist.all_reduce(gradient)\nRuntimeError: ",
        "exception:RuntimeError:train.py:step:10",
        "peer that ended first",
        echo=True,
    ),
    "peer_0": Expected(
        "rank 0 raised ValueError on node 0 (gpu-0): bad batch",
        USER,
        f'{gather.PROJECT}/0/train.py:9: in step: raise ValueError("bad batch")\nValueError: bad batch',
        "exception:ValueError:train.py:step:9",
    ),
}


def check(failure: Failure, expected: Expected, folder: str = gather.PROJECT) -> None:
    verdict = diagnose(failure)
    evidence = verdict.evidence.replace(folder, gather.PROJECT)
    assert verdict.title.startswith(expected.title)
    assert evidence.startswith(expected.evidence)
    assert expected.advice in verdict.advice
    assert verdict.signature.startswith(expected.signature)
    assert (verdict.origin, verdict.hopeless, is_echo(failure)) == (
        expected.origin,
        expected.hopeless,
        expected.echo,
    )


def test_every_recorded_failure_has_an_expectation() -> None:
    assert RECORDED.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded(name: str) -> None:
    check(RECORDED[name], EXPECTED[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *gather.SCRIPTS,
        *gather.COMMANDS,
        *(pytest.param(name, marks=pytest.mark.torch) for name in gather.TORCH_SCRIPTS),
    ],
)
def test_run_anew(name: str, tmp_path: Path) -> None:
    if name in gather.TORCH_SCRIPTS:
        pytest.importorskip("torch")
    check(gather.gather(name, tmp_path), EXPECTED[name], str(tmp_path))


@pytest.mark.slow
@pytest.mark.torch
def test_root_cause_of_peers_run_anew(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    failures = gather.gather_peers(tmp_path)
    assert min(failures, key=lambda f: f.time).rank == 1, "the echo is seen first"
    assert root_cause(failures).rank == 0
    for failure in failures:
        check(failure, EXPECTED[f"peer_{failure.rank}"], str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, failure in RECORDED.items()
        if failure.kind is FailureKind.EXCEPTION and "Traceback (most recent" in failure.stderr_tail
    ],
)
def test_a_traceback_on_stderr_says_the_same_as_a_recorded_exception(name: str) -> None:
    """The program ran under another one (--no-python), so that only its stderr is known."""
    failure = msgspec.structs.replace(
        RECORDED[name], kind=FailureKind.EXIT, exception="", message="", traceback=""
    )
    check(failure, EXPECTED[name])


def test_segfault_names_the_native_call_and_the_users_line() -> None:
    assert diagnose(RECORDED["segfault"]).evidence == (
        "/opt/python/lib/python3.11/ctypes/__init__.py:519: in string_at, "
        f"called at {TRAIN}:4: in read_null"
    )


def test_taken_port_is_named() -> None:
    failure = RECORDED["store_port_taken"]
    port = failure.message.partition("port: ")[2].partition(",")[0]
    assert f"the port ({port})" in diagnose(failure).advice


def test_root_cause_of_recorded_peers() -> None:
    failures = [RECORDED["peer_1"], RECORDED["peer_0"]]
    assert failures[0].time < failures[1].time
    assert root_cause(failures) is failures[1]


def test_configuration_errors_are_hopeless_before_the_first_step_only() -> None:
    failure = RECORDED["argparse_conflict"]
    assert diagnose(failure).hopeless
    assert not diagnose(msgspec.structs.replace(failure, steps=1)).hopeless
