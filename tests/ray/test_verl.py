"""Programs of verl on a real Ray cluster, without a word of DLRover in them: who dies in which call, and what comes of it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from dlrover.errors import ConfigurationError
from tests.ray.conftest import Cluster, connected
from tests.waiting import until

pytestmark = [
    pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # Ray's own
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed; scripts/test-engines installs it"),
]  # fmt: skip
PROGRAM = Path(__file__).parent / "scripts" / "verl_program.py"
LAUNCHER = str(Path(sys.executable).with_name("dlrover-run"))
WAIT = 180.0
ROWS = [float(n) for n in range(7)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connected(nodes=1, cpus=3) as cluster:
        yield cluster


class Program:
    """A program of verl that runs below ours."""

    def __init__(
        self, directory: Path, cluster: Cluster, flow: str, settings: str, launcher: Sequence[str]
    ) -> None:
        self.directory, self.log = directory, directory / "log"
        command = [*launcher, "-m", "dlrover.integrations.verl", str(PROGRAM), flow, str(directory)]
        env = {**cluster.env, "RAY_ADDRESS": cluster.address, "DLROVER_VERL": settings}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=directory)

    def ends(self, code: int) -> str:
        try:
            assert self.process.wait(WAIT) == code, self.log.read_text()
        finally:
            self.process.kill()
        return self.log.read_text()

    def results(self) -> list[list[float]]:
        self.ends(0)
        return json.loads((self.directory / "results").read_text())

    def calls(self, method: str) -> list[int]:
        """The processes that were called, in order."""
        file = self.directory / "calls"
        lines = [line.split() for line in (file.read_text().splitlines() if file.exists() else [])]
        return [int(pid) for name, _, pid in lines if name == method]


@pytest.fixture
def start(tmp_path: Path, cluster: Cluster):
    """Starts programs; ``dying`` has methods with ranks, and how often they die there, after how many calls."""
    programs = []

    def started(
        flow: str,
        settings: str = "",
        launcher: Sequence[str] = (sys.executable,),
        **dying: tuple[int, ...],
    ) -> Program:
        for method, (rank, times, *skipped) in dying.items():
            (tmp_path / f"{method}.{rank}").write_text(f"{times} {sum(skipped)}")
        programs.append(Program(tmp_path, cluster, flow, settings, launcher))
        return programs[-1]

    yield started
    for program in programs:
        program.process.kill()
        program.process.wait()
    cluster.is_empty()


def times(factor: float) -> list[float]:
    return [row * factor for row in ROWS]


@pytest.mark.parametrize(
    "dying",
    [
        {},
        {"compute_log_prob": (1, 1)},
        {"compute_log_prob": (0, 3)},
        {"init_model": (1, 1)},
        {"set_loss_fn": (0, 1)},
        {"compute_log_prob": (1, 1), "init_model": (0, 2)},  # the latter in the set-up at first
    ],
    ids=lambda dying: "+".join(dying) or "nobody",
)
def test_whoever_dies_the_results_are_those_of_a_quiet_run(start, dying) -> None:
    program = start("reference", **dying)
    assert program.results() == [times(3)] * 3
    deaths = sum(count for _, count in dying.values())
    log = program.log.read_text()
    assert log.count("the group is made anew") == deaths
    assert len(set(program.calls("init_model"))) >= 2 + deaths  # one may be ended before its call


def test_a_death_while_the_set_up_is_repeated_is_one_more(start) -> None:
    program = start(
        "reference", compute_log_prob=(1, 1), init_model=(0, 1, 1), set_loss_fn=(1, 1, 1)
    )
    assert program.results() == [times(3)] * 3
    assert program.log.read_text().count("died in what is repeated after a death") == 2


def test_a_group_with_an_update_ends_with_the_root_cause_on_the_last_screen(start) -> None:
    log = start("actor", compute_log_prob=(1, 1)).ends(3)
    last = log[log.rindex("dlrover: ") :]
    for words in (
        "Rank 1 of 2 of the group Model died in compute_log_prob, actor ", " on node ", "its process was killed",
        "it has run update_actor", "DLROVER_VERL=update_actor=KIND", "trainer.resume_mode=auto", "the last words of rank 1",
    ):  # fmt: skip
        assert words in last
    assert "ActorDiedError" not in last


def test_an_update_in_which_an_actor_dies_is_not_repeated(start) -> None:
    program = start("actor", update_actor=(0, 1))
    assert "died in update_actor" in program.ends(3)
    assert len(program.calls("update_actor")) <= 2


def test_new_rollout_actors_have_the_last_weights_before_they_are_called(start) -> None:
    program = start("rollout", "load_weights=weights", compute_log_prob=(1, 1))
    assert program.results() == [times(2), times(5)]
    program.directory.joinpath("results").unlink()
    program = start("rollout", "load_weights=weights", load_weights=(0, 2))
    assert program.results() == [times(2), times(5)]


def test_weights_that_are_not_known_to_come_again_are_no_longer_served(start) -> None:
    assert "it has run load_weights" in start("rollout", compute_log_prob=(1, 1)).ends(3)


def test_a_method_of_the_programs_own_is_repeated_if_it_says_so(start) -> None:
    assert start("own", "score=pure", score=(0, 1)).results() == [[[0, 1.0], [1, 1.0]]] * 2
    assert "it has run score" in start("own", score=(0, 1)).ends(3)


def test_a_budget_that_is_used_up_ends_the_program(start) -> None:
    program = start("reference", "max_restarts=2", compute_log_prob=(1, 9))
    assert "it was made anew 2 times within 3600 s" in program.ends(3)


def test_handles_that_were_given_away_are_not_trusted(start) -> None:
    assert "it has given its actors away by workers" in start(
        "handles", compute_log_prob=(1, 1)
    ).ends(3)
    assert "DLROVER_VERL has failover=job" in start(
        "reference", "failover=job", compute_log_prob=(1, 1)
    ).ends(3)


def test_an_error_of_the_program_stays_its_own(start) -> None:
    log = start("fault").ends(1)
    assert "RuntimeError: a fault of the program" in log
    assert "made anew" not in log


def test_a_death_behind_a_future_is_explained(start) -> None:
    log = start("futures", score=(1, 1)).ends(3)
    last = log[log.rindex("dlrover: ") :]
    assert "An actor died" in last
    assert "the last words of rank 1" in last


def test_the_launcher_starts_a_program_again_whose_group_is_lost(start) -> None:
    program = start("actor", launcher=(LAUNCHER, "--max-restarts", "1"), compute_log_prob=(1, 1))
    assert program.results() == [times(2)] * 2
    assert "it has run update_actor" in program.log.read_text()


@pytest.mark.parametrize("flow", ["colocated", "fused"])
@pytest.mark.parametrize("dying", [{}, {"compute_log_prob": (1, 2)}], ids=["nobody", "twice"])
def test_groups_of_the_same_processes_come_back_together(start, flow, dying) -> None:
    program = start(flow, "load_weights=weights", **dying)
    assert program.results() == [[times(2), times(12)]] * 2
    assert len(set(program.calls("init_model"))) == (6 if dying else 2)


def test_a_detached_group_works_and_is_not_made_anew(start) -> None:
    assert start("detached").results() == [times(1)] * 2
    assert "its actors are detached and open to others" in start(
        "detached", compute_log_prob=(0, 1)
    ).ends(3)


def test_a_driver_inside_an_actor_has_the_same_groups_and_the_same_last_screen(start) -> None:
    assert start("in_actor", "window=60", compute_log_prob=(1, 1)).results() == [times(3)] * 3
    log = start("in_actor", "max_restarts=0", compute_log_prob=(1, 1)).ends(3)
    assert "it was made anew 0 times" in log[log.rindex("dlrover: ") :]


@pytest.mark.parametrize("first", ["dlrover.integrations.verl.group", "verl.single_controller.ray"])
def test_ours_takes_the_place_of_verls_whichever_is_imported_first(first) -> None:
    program = (
        "import importlib; from dlrover.integrations.verl import install; install();"
        f" importlib.import_module('{first}');"
        " import verl.single_controller.ray as package, verl.single_controller.ray.base as base;"
        " from dlrover.integrations.verl import WorkerGroup;"
        " assert package.RayWorkerGroup is base.RayWorkerGroup is WorkerGroup"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=WAIT)


class Scripted:
    """A call whose answers are scripted; it stands for all methods of one actor."""

    def __init__(self, shared: object, answers: list[object]) -> None:
        self.group, self.method, self.function = self, "init_model", "execute_all_async"
        self.sub_cls_name, self.shared, self.answers, self.started = "", shared, answers, 0

    def kept(self) -> Scripted:
        return self

    def start(self) -> object:
        self.started += 1
        return self.answers.pop(0)


def test_a_set_up_that_the_old_actors_have_had_is_given_to_new_ones(monkeypatch) -> None:
    """Another thread makes the group anew between the results of a call and its record."""
    from dlrover.integrations.verl import Repair, group

    shared = group.SharedActors(Repair(), None)
    shared.history.changed = ""

    def get(reference: str) -> str:
        shared._life += reference == "from the old ones"
        return reference

    monkeypatch.setattr(group.ray, "get", get)
    call = Scripted(shared, ["from the old ones", "from the new ones"])
    assert shared.answer(call) == "from the new ones"
    assert [one for *_, one in shared.history.repeated] == [call]


def test_a_set_up_that_was_interrupted_is_not_trusted(monkeypatch) -> None:
    from dlrover.integrations.verl import Repair, group

    shared = group.SharedActors(Repair(), None)
    shared.history.changed = ""

    def interrupted(reference: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(group.ray, "get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shared.answer(Scripted(shared, ["never"]))
    assert "init_model has failed" in shared.history.refusal(0)


def test_an_address_that_is_none_is_not_the_programs_own(monkeypatch) -> None:
    from dlrover.integrations.verl import group

    monkeypatch.setattr(group.RayWorkerGroup, "__init__", lambda *_, **__: None)
    assert not group.WorkerGroup(object(), master_addr=None)._own_address
    assert group.WorkerGroup(object(), master_addr="10.0.0.5")._own_address


def test_the_death_of_an_actor_elsewhere_is_not_waited_for_in_the_group() -> None:
    import types

    from ray.exceptions import ActorDiedError, RayTaskError

    from dlrover.integrations.verl import group

    def died(actor_id: str) -> ActorDiedError:
        error = ActorDiedError()
        error.actor_id = actor_id
        return error

    ours = [types.SimpleNamespace(_actor_id=bytes.fromhex("0a"))]
    elsewhere = RayTaskError("f", "trace", died("0b")).as_instanceof_cause()
    assert group._grace(elsewhere, ours) == group.GRACE
    assert group._grace(died("0a"), ours) == group._grace(died(None), ours) == group.NODE_GRACE


def test_a_token_that_ray_refuses_is_the_last_word_on_a_programs_last_screen(monkeypatch) -> None:
    from ray.exceptions import AuthenticationError

    from dlrover.integrations.verl import launch

    for name, value in (
        ("RAY_ADDRESS", "h:1"),
        ("RAY_AUTH_MODE", "token"),
        ("RAY_AUTH_TOKEN", "b"),
    ):
        monkeypatch.setenv(name, value)
    error = ConnectionError("Failed to connect to Ray cluster at h:1")
    error.__cause__ = AuthenticationError("the authentication token is invalid or incorrect")
    said, code = launch._explained(error)
    assert code == 2
    assert said.startswith(
        "--ray-address h:1: the cluster refuses the Ray token of this environment; set RAY_AUTH_MODE=token"
    )


def test_a_verl_that_lacks_what_we_build_on_is_refused_by_name() -> None:
    from dlrover.integrations.verl.group import RayWorkerGroup, check

    class Older(RayWorkerGroup):
        spawn_fused = None

    class Newer(RayWorkerGroup):
        def _init_with_resource_pool(self, pool):
            pass

    for cls, lacking in (
        (Older, "spawn_fused"),
        (Newer, r"_init_with_resource_pool\(resource_pool\)"),
    ):
        with pytest.raises(
            ConfigurationError,
            match=rf"verl \S+ has no {cls.__name__}\.{lacking}; .* needs verl 0\.9",
        ):
            check(cls)


def test_a_group_whose_first_start_finds_no_room_says_what_it_waits_for(start) -> None:
    program = start("wide")
    until(
        lambda: "waits for room" in program.log.read_text(), WAIT, "a word", program.log.read_text
    )
    log = program.log.read_text()
    assert "(PENDING, STRICT_PACK) needs CPU 10; CPU 10; the cluster's nodes have" in log
    assert "CPU 3" in log[log.index("the cluster's nodes have") :]
    assert "max_colocate_count" in log
    assert log.count("waits for room") == 1


def test_a_raylet_that_dies_is_replaced_or_the_missing_resources_are_named(start, cluster) -> None:
    def waits() -> bool:
        return program.process.poll() is not None or len(program.calls("compute_log_prob")) == 2

    with added(cluster):
        program = start("reference")
        program.directory.joinpath("compute_log_prob.wait").touch()
        until(waits, WAIT, "a call", program.log.read_text)
        kill_raylet_of(program.calls("compute_log_prob")[0], cluster)
        program.directory.joinpath("compute_log_prob.wait").unlink()
        assert program.results() == [times(3)] * 3
    program.directory.joinpath("calls").unlink()
    program = start("reference", "wait=10")
    program.directory.joinpath("compute_log_prob.wait").touch()
    until(waits, WAIT, "a call", program.log.read_text)
    kill_raylet_of(program.calls("compute_log_prob")[0], cluster)
    log = program.ends(3)
    assert "needs CPU 1; CPU 1 and did not get it within 10 s" in log[log.rindex("dlrover: ") :]


@contextlib.contextmanager
def added(cluster: Cluster) -> Iterator[None]:
    """One more node, so that a group has another place."""
    cluster.add_nodes(1)
    yield


def kill_raylet_of(pid: int, cluster: Cluster) -> None:
    """Kill the raylet of a worker process; its workers end by themselves."""
    raylet = next(one for one in psutil.Process(pid).parents() if "raylet" in one.name())
    raylet.kill()
