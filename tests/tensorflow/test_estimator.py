"""Trainings with an estimator, in the original's manner, go on when tasks are killed, added and removed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from dlrover.original import programs  # noqa: E402
from dlrover.spec import events  # noqa: E402
from dlrover.tensorflow import stored  # noqa: E402
from tests.process.conftest import Runner  # noqa: E402
from tests.tensorflow.conftest import SCRIPTS, START, Job  # noqa: E402

pytestmark = [
    pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(400),
    pytest.mark.skipif(
        not hasattr(tf, "estimator"),
        reason=f"TensorFlow {tf.__version__} has no estimators; scripts/test-engines has 2.15, too",
    ),
]  # fmt: skip
RECORDS, EPOCHS, BATCH = 3000, 2, 10
MANY = 12000
"""Records for a training that lasts until a new process has imported TensorFlow."""


class Estimated(Job):
    """A job of scripts/estimated.py."""

    def __init__(
        self,
        run: Runner,
        ps: int = 2,
        workers: int = 2,
        evaluators: int = 0,
        records: int = RECORDS,
    ) -> None:
        self.out, self._run = run.directory / "out", run
        self.out.mkdir()
        self.best = table(self.out / "table.csv", records)
        options = [f"--ps_num={ps}", f"--worker_num={workers}", f"--evaluator_num={evaluators}"]
        command = programs.estimator(["--platform=local", "--conf=estimated.Conf", *options])
        env = {"OUT": str(self.out), "RECORDS": str(records)}
        self.launch = run("--shutdown-timeout=5", *command, cwd=SCRIPTS, env=env)

    def kill_worker(self) -> None:
        os.kill(self.notes("worker")[-1][4], signal.SIGKILL)

    def lose_server(self) -> None:
        before = self.cluster
        self.kill("ps")
        self.begun(lambda cluster: cluster != before, "another cluster")

    def of_size(self, servers: int) -> None:
        """Ask for a number of parameter servers; wait for a step with them."""
        self.scale("ps", servers)
        self.begun(lambda cluster: len(cluster["ps"]) == servers, f"{servers} servers")


def table(path: Path, records: int) -> float:
    """Write records of a linear model; return the least loss that a linear model can have."""
    random = np.random.default_rng(7)
    inputs = random.normal(size=(records, 4))
    outputs = inputs @ [1.0, -2.0, 3.0, 0.5] + random.normal(scale=0.1, size=records)
    rows = np.column_stack([inputs, outputs])
    lines = (f"{number},{','.join(map(str, row))}\n" for number, row in enumerate(rows))
    path.write_text("number,a,b,c,d,y\n" + "".join(lines))
    found = np.linalg.lstsq(inputs, outputs, rcond=None)[0]
    return float(np.mean((inputs @ found - outputs) ** 2))


def test_an_undisturbed_training_is_evaluated(run: Runner) -> None:
    training = Estimated(run, ps=1, evaluators=1)
    training.train(30)
    evaluated = training.out / "model" / "eval"
    training.launch.until(lambda: list(evaluated.glob("events*")), START, "an evaluation")
    end = training.end()
    assert (end["steps"], end["wrong"]) == (RECORDS * EPOCHS // BATCH, {})
    assert end["loss"] == pytest.approx(training.best, rel=0.1)
    assert {note[3] for note in training.notes("step")} == {"chief", "worker"}


def test_lost_servers_take_the_training_back_to_its_checkpoint(run: Runner) -> None:
    training = Estimated(run)
    for _ in range(3):
        training.train(60)
        training.lose_server()
    end = training.end()
    assert end["wrong"] == {}
    assert end["loss"] == pytest.approx(training.best, rel=0.1)
    assert not training.launch.events_of(events.RestartDecided), "the chief is the same process"
    assert len({note[4] for note in training.notes("worker")}) == 2, "and so are the workers"


def test_servers_come_and_go_and_nothing_is_repeated(run: Runner) -> None:
    training = Estimated(run, ps=1, workers=1, records=MANY)
    training.train(30)
    training.of_size(2)
    training.train(30)
    training.of_size(1)
    end = training.end()
    assert (end["steps"], end["wrong"]) == (MANY * EPOCHS // BATCH, {})
    assert end["loss"] == pytest.approx(training.best, rel=0.1)
    assert training.steps <= end["steps"] + 2, (
        "a worker may make one more step, which changes nothing"
    )


def test_a_worker_and_the_chief_restart_alone(run: Runner) -> None:
    training = Estimated(run, ps=1, workers=2, records=MANY)
    training.train(30)
    training.launch.until(lambda: len(training.notes("worker")) == 2, START, "two workers")
    training.kill_worker()
    training.launch.until(lambda: len(training.notes("worker")) == 3, START, "its return")
    assert len(training.notes("begin")) == 1, "the others went on"
    training.train(30)
    os.kill(training.notes("begin")[-1][4], signal.SIGKILL)
    training.launch.until(lambda: len(training.notes("begin")) == 2, START, "another chief")
    end = training.end()
    assert sum(abs(count - EPOCHS) for count in end["wrong"].values()) <= 3 * BATCH, (
        "what the worker had learned and not reported is learned again"
    )
    assert all(count >= EPOCHS for count in end["wrong"].values())
    assert end["loss"] == pytest.approx(training.best, rel=0.1)


def test_damaged_checkpoints_are_passed_over(run: Runner) -> None:
    training = Estimated(run, ps=1, workers=1, records=MANY)
    model = training.out / "model"

    def kill_chief_and_damage(damage: Callable[[Path], None]) -> None:
        begins = training.notes("begin")
        training.launch.until(
            lambda: len(whole()) > 2, START, "a checkpoint before the newest and after step 0"
        )
        os.kill(begins[-1][4], signal.SIGSTOP)
        damage(whole()[0])
        os.kill(begins[-1][4], signal.SIGKILL)
        count = len(begins) + 1
        training.launch.until(lambda: len(training.notes("begin")) == count, START, "a chief")
        assert training.notes("begin")[-1][2] > 0

    def whole() -> list[Path]:
        paths = [Path(path) for path in stored.newest_first(str(model), "model.ckpt")]
        return [path for path in paths if path.with_name(f"{path.name}.index").exists()]

    def cut_data(path: Path) -> None:
        for file in model.glob(f"{path.name}.data*"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    def cut_positions_and_remove_list(path: Path) -> None:
        file = path.with_name(f"{path.name}.records")
        file.write_bytes(file.read_bytes()[:-1])
        (model / "checkpoint").unlink()

    training.train(30)
    kill_chief_and_damage(cut_data)
    training.train(100)
    kill_chief_and_damage(cut_positions_and_remove_list)
    end = training.end()
    assert (end["steps"], end["wrong"]) == (MANY * EPOCHS // BATCH, {})


def test_a_session_that_has_lost_its_servers_neither_saves_nor_ends_the_training(
    tmp_path: Path,
) -> None:
    from dlrover.tensorflow.estimators.positions import PositionSaver
    from dlrover.tensorflow.estimators.session import ClusterMember
    from dlrover.tensorflow.machine.plan import SessionPlan
    from dlrover.tensorflow.watch import ClusterChangedError

    feed: Any = None
    member = ClusterMember(SessionPlan(1), -1, feed, due=lambda: False, began=lambda: None)
    member.lost = True  # and its batches end as if the data did
    with pytest.raises(ClusterChangedError):
        PositionSaver(member, str(tmp_path), lambda _: True).before_save(None, 7)
    member.end(None)
    assert not member.ended
    assert not list(tmp_path.iterdir())


def test_an_estimator_starts_from_the_model_that_it_names(tmp_path: Path) -> None:
    from dlrover.tensorflow.estimators.session import ClusterMember, Rooted
    from dlrover.tensorflow.machine.plan import SessionPlan

    def model(features: Any, labels: Any, mode: str, params: Any) -> Any:
        initializer = tf.constant_initializer(params["weight"])
        weight = tf.compat.v1.get_variable("weight", [], initializer=initializer)
        step = tf.compat.v1.train.get_global_step().assign_add(1)
        return tf.estimator.EstimatorSpec(mode, loss=tf.identity(weight), train_op=step)

    def trained(name: str, initial: float, source: str | None) -> float:
        config = tf.estimator.RunConfig(model_dir=str(tmp_path / name))
        params = {"weight": initial}
        inner = tf.estimator.Estimator(model, None, config, params, warm_start_from=source)
        feed: Any = None
        member = ClusterMember(SessionPlan(1), -1, feed, due=lambda: False, began=lambda: None)
        Rooted(inner, member, lambda: None).train(lambda: tf.data.Dataset.range(2), steps=1)
        return float(tf.train.load_checkpoint(str(tmp_path / name)).get_tensor("weight"))

    assert trained("former", 7.0, None) == 7.0
    assert trained("next", 0.0, str(tmp_path / "former")) == 7.0


def test_an_evaluator_that_starts_again_knows_the_best_model(tmp_path: Path) -> None:
    from dlrover.original.tensorflow import Column, FileReader
    from dlrover.tensorflow.estimators.conf import checked
    from dlrover.tensorflow.estimators.evaluating import Evaluator

    def model(features: Any, labels: Any, mode: str, config: Any) -> Any:
        weight = tf.compat.v1.get_variable("weight", [], initializer=tf.zeros_initializer())
        step = tf.compat.v1.train.get_global_step()
        trained = tf.group(weight.assign_add(1.0), step.assign_add(1))
        predictions, loss = features["x"] * weight, (weight - 2.0) ** 2
        return tf.estimator.EstimatorSpec(mode, predictions, loss, trained)

    def made(model_dir: str, config: Any) -> Any:
        return tf.estimator.Estimator(model, None, config)

    (tmp_path / "table.csv").write_text("x,y\n1,1\n2,2\n")
    columns = [Column.create(name=name, dtype="float32", is_label=name == "y") for name in "xy"]
    data = {"reader": FileReader(str(tmp_path / "table.csv")), "columns": columns}

    class Conf:
        classifier_class = made
        model_dir, train_set, eval_set = str(tmp_path / "model"), data, data

    conf, exports = checked([Conf]), tmp_path / "model" / "export" / "best"
    training = tf.estimator.Estimator(model, Conf.model_dir)
    found = []
    for step in range(1, 5):  # their losses are 1, 0, 1, 4
        training.train(lambda: tf.data.Dataset.from_tensors(({"x": [1.0]}, [1.0])), steps=1)
        Evaluator(conf).evaluate(f"{Conf.model_dir}/model.ckpt-{step}")
        found.append(len(list(exports.glob("*/saved_model.pb"))))
    assert found == [1, 2, 2, 2]
    for left in (b"", bytes(3)):
        (exports / "loss").write_bytes(left)
        Evaluator(conf).evaluate(f"{Conf.model_dir}/model.ckpt-2")
        assert (exports / "loss").read_text() == "0.0"
