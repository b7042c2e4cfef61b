"""Jobs of the original's unified API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dlrover.errors import ConfigurationError
from dlrover.original import runtime, unified
from dlrover.original.runtime import VARIABLE
from dlrover.original.unified import ENTRY, DLJobBuilder, RLJobBuilder
from tests.process.conftest import Launch, Runner

PACKAGES = str(Path(__file__).parents[2] / "packages" / "original" / "src")


def known(role: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(role["env"][VARIABLE])
    return found


def test_options_of_the_builder_are_those_of_roles() -> None:
    job = (
        DLJobBuilder().node_num(1).device_type("CPU").config({"lr": 1}).global_env({"A": "1"})
        .role("sft").train("train.main").nnodes(2).nproc_per_node(4).env({"B": "2"}).end()
        .role("data").run("data.py --n 1").total(3).resource(1, memory=64)
        .with_collocation("sft", "data").build()
    )  # fmt: skip
    hosts = {name: known(role) for name, role in job.roles.items()}
    for role in job.roles.values():
        role["env"].pop(VARIABLE)
    shared = {"accelerator_type": "CPU", "roles": ["sft", "data"]}
    common = {"failover": "instance", "config": {"lr": 1}, "collocate": "sft-data"}
    assert job.roles == {
        "sft": common | {"entry": ENTRY, "kind": "elastic", "instances": 2, "processes": 4, "env": {"A": "1", "B": "2"}},
        "data": common | {"entry": "data.py --n 1", "kind": "simple", "instances": 3, "env": {"A": "1"},
                          "resources": {"cpu": 1, "memory": "64Mi"}},
    }  # fmt: skip
    assert hosts == {
        "sft": {"entry": "train.main", "is_elastic": True, "has_group": True, "per_group": 4} | shared,
        "data": shared,
    }  # fmt: skip


def test_the_trainer_of_an_rl_job_is_its_driver() -> None:
    made = RLJobBuilder().trainer("t.run").actor("a.run").total(2).rollout("r.run").build().roles
    assert {name: role["kind"] for name, role in made.items()} == {
        "TRAINER": "driver", "ACTOR": "elastic", "ROLLOUT": "simple",
    }  # fmt: skip
    assert [known(role).get("is_driver", True) for role in made.values()] == [True, False, False]
    assert made["ACTOR"]["env"]["DLROVER_HANG_DETECTION"] == "false"
    assert not any("resources" in role for role in made.values())
    with pytest.raises(ConfigurationError, match="no actor"):
        RLJobBuilder().trainer("t.run").build()


def test_roles_are_collocated_by_their_names_in_lower_case_too() -> None:
    def job() -> Any:
        return RLJobBuilder().trainer("t.run").actor("a.A").end().rollout("r.R").end()

    def groups(builder: Any) -> list[str]:
        return [role.get("collocate", "") for role in builder.build().roles.values()]

    assert groups(job().with_collocation("actor", "rollout")) == ["", *["ACTOR-ROLLOUT"] * 2]
    assert groups(job().with_collocation_all("actor")) == ["", "", "ROLLOUT"]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda job: job.with_collocation("a", "x"),
            r"^with_collocation: x: must be a role of the job: a\.$",
        ),
        (lambda job: job.with_collocation("a", "a"), "^with_collocation: a: a role is in one"),
        (lambda job: job.role("a").run("m.g"), "^role a is defined twice"),
        (
            lambda job: job.role("b").train("m.g").total(5).per_group(2),
            r"^role b: total 5: must be a positive multiple of per_group, 2\.$",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(build: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        build(DLJobBuilder().role("a").run("m.f").end()).build()


def test_options_without_effect_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    job = DLJobBuilder().node_num(2).device_per_node(8).as_data_stream()
    role = job.role("a").train("m.f").resource(cpu=1, gpu=2).enable_node_group_failover(30)
    role.skip_node_check().disable_ray_auto_visible_device().no_setup_process_group()
    assert "has_group" not in known(job.build().roles["a"])
    job.build()
    assert capsys.readouterr().err == (
        "dlrover: without effect: node_num, device_per_node, as_data_stream, resource(gpu), enable_node_group_failover\n"
    )


def test_an_entry_point_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="role a: entry: module json has no Loads"):
        DLJobBuilder().role("a").run("json.Loads").build().submit("job")


@pytest.mark.parametrize(
    "call",
    [
        lambda: runtime.UserRpcProxy("a", "b", object),
        lambda: runtime.create_rpc_proxy("a", "b", object),
        lambda: runtime.RayDataLoaderIter(None),
        lambda: runtime.PrimeMasterApi.get_workers_by_role("a"),
    ],
)
def test_what_is_not_there_says_what_to_use(call: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"does not exist here: use .*(RoleGroup|DataLoader)"
    ):
        call()


SERVICE = """
from other import helper
from dlrover.python.unified.api.runtime import DataQueue, current_worker, rpc

@rpc("of_module")
def anything():
    return "module"

class Service:
    def __init__(self):
        self.runs = 0

    def run(self):
        self.runs += 1
        DataQueue("ended", is_master=True, size=7).put(current_worker().actor_info.rank)

    @rpc()
    def where(self):
        info = current_worker().actor_info
        return [info.name, info.rank, info.node_rank, info.local_rank, self.runs]

    @rpc()
    async def double(self, numbers, by):
        return [by * n for n in numbers]

    @rpc("sum")
    def add(self, left, right):
        return left + right

    def unmarked(self):
        pass
"""
OTHER = """
from dlrover.python.unified.api.runtime import rpc

def helper(): pass

@rpc(export=False)
def hidden(): pass

@rpc(export=True)
def shown(): return "other"
"""
MAIN = """
import json
from dlrover.python.unified.api.runtime import DataQueue, RoleGroup, current_worker

def main():
    ended, group = DataQueue("ended"), RoleGroup("service")
    while ended.qsize() < 2:  # both have run
        pass
    found = {"length": len(group)}
    found["where"] = group.call("where").result()
    found["batch"] = list(group.call_batch("double", 5, [1, 2, 3, 4, 5], 3))
    found["scatter"] = group.call("sum", [1, 2], [10, 20], _scatter=True).wait()
    found["one"] = [actor.call("of_module").result() for actor in group[1:]]
    found["shown"] = group.call_rank0("shown").result()
    for name in ("hidden", "unmarked", "typo"):
        try:
            (RoleGroup(name) if name == "typo" else group).call_rank0(name).result()
        except Exception as error:
            found[name] = str(error)
    queue = DataQueue("numbers", is_master=True, size=4)
    futures = [queue.put_async(n) for n in range(4)]
    [future.result() for future in futures]
    found["queue"] = [queue.qsize(), queue.get(3), queue.get_nowait(5), queue.get_nowait()]
    info = current_worker().job_info
    found["job"] = [info.name, info.user_config, info.accelerator_type]
    found["ended"] = sorted(ended.get(2))
    json.dump(found, open("found", "w"))
"""
JOB = """
from dlrover.python.unified.api.builder import DLJobBuilder
job = (DLJobBuilder().node_num(1).device_type("CPU").config({"n": 7})
    .role("service").run("service.Service").total(2).not_driver().end()
    .role("main").run("main.main").end().build())
raise SystemExit(job.submit("pair"))
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_job_of_the_original_runs(tmp_path: Path) -> None:
    for name, text in {"service": SERVICE, "other": OTHER, "main": MAIN, "job": JOB}.items():
        (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found").read_text())
    for name in ("hidden", "unmarked"):
        methods = "double, of_module, shown, sum, where"
        assert found.pop(name) == f"service has no method {name}; it has {methods}."
    assert found.pop("typo") == "RoleGroup('typo'): must be a role of the job: service, main."
    assert found == {
        "ended": [0, 1],
        "length": 2,
        "where": [["service-0", 0, 0, 0, 1], ["service-1", 1, 1, 0, 1]],
        "batch": [3, 6, 9, 12, 15],
        "scatter": [11, 22],
        "one": ["module"],
        "shown": "other",
        "queue": [4, [0, 1, 2], [3], []],
        "job": ["pair", {"n": 7}, "CPU"],
    }


def test_a_job_that_fails_fails_where_the_parent_ignores_how_children_end() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert unified._run(["sh", "-c", "exit 3"]) == 3
        with (
            ThreadPoolExecutor() as pool,
            pytest.raises(ConfigurationError, match="SIGCHLD is ign"),
        ):
            pool.submit(unified._run, ["true"]).result()
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


LONG = """
import signal, sys, time

def leave(*_):
    open("left-in-order", "w").close()
    sys.exit(0)

def main():
    signal.signal(signal.SIGTERM, leave)
    open("began", "w").close()
    time.sleep(1000)
"""
LONG_JOB = """
from dlrover.python.unified.api.builder import DLJobBuilder
code = DLJobBuilder().role("long").run("long.main").end().build().submit("long")
open("returned", "w").write(str(code))
raise SystemExit(code)
"""


@pytest.fixture
def submitted(tmp_path: Path) -> Iterator[Launch]:
    """A program whose job runs; no process of it may stay behind."""
    runner = Runner(tmp_path)
    for name, text in {"long": LONG, "job": LONG_JOB}.items():
        (tmp_path / f"{name}.py").write_text(text)
    launch = runner("job.py", launcher=(sys.executable,), cwd=tmp_path)
    launch.is_ours = True
    try:
        launch.until((tmp_path / "began").exists, 60, "the job")
        yield launch
    finally:
        runner.close()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_submitted_job_in_order(
    submitted: Launch, tmp_path: Path, number: int
) -> None:
    submitted.process.send_signal(number)
    submitted.end_with(128 + number, 60)
    assert (tmp_path / "left-in-order").exists()
    assert (tmp_path / "returned").read_text() == str(128 + number)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_submitted_job_dies_with_its_program(submitted: Launch) -> None:
    submitted.process.kill()  # the fixture sees that nothing stays


ACTOR = """
import threading, torch
from torch import distributed
from dlrover.python.unified.api.runtime import current_worker, rpc

class Actor:
    def __init__(self):
        self.ran = threading.Event()

    def run(self):
        self.sum = torch.ones(1)
        distributed.all_reduce(self.sum)
        self.ran.set()

    @rpc()
    def found(self):
        self.ran.wait(60)
        info = current_worker().actor_info
        return [info.rank, info.node_rank, info.local_rank, int(self.sum)]
"""
TRAINER = """
from dlrover.python.unified.api.builder import RLRoleType
from dlrover.python.unified.api.runtime import RoleGroup

def main():
    open("found", "w").write(str(RoleGroup(RLRoleType.ACTOR).call("found").result()))
"""
RL_JOB = """
from dlrover.python.unified.api.builder import RLJobBuilder
job = RLJobBuilder().trainer("trainer.main").end()
raise SystemExit(job.actor("actor.Actor").total(2).per_group(2).end().build().submit("rl"))
"""


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(180)
def test_an_elastic_role_has_its_process_group_and_can_be_called_after_run(tmp_path: Path) -> None:
    for name, text in {"actor": ACTOR, "trainer": TRAINER, "job": RL_JOB}.items():
        (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "found").read_text() == "[[0, 0, 0, 2], [1, 0, 1, 2]]"


@pytest.mark.slow
@pytest.mark.torch
def test_the_packages_of_their_own_can_be_imported() -> None:
    code = (
        "import tfplus; from atorch.auto import auto_accelerate; from atorch.optimizers import AGD, WeightedSAM;"
        " from atorch.data import ElasticDataset; tfplus.GroupAdam, tfplus.get_kv_variable"
    )
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": PACKAGES}, check=True
    )
