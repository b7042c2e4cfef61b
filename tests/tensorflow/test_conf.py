"""Configurations of estimators, and the command that runs one. No TensorFlow is needed."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import msgspec
import pytest

from dlrover.errors import ConfigurationError, ProtocolError
from dlrover.original import programs
from dlrover.original.tensorflow import Column, ConfigurationManagerInterface
from dlrover.tensorflow.estimators.conf import checked, load
from dlrover.tensorflow.machine.plan import Positions, SessionPlan, plan_of, positions_of

COLUMNS = (Column.create(name="x", dtype="float32"),)


class Plain:
    classifier_class = dict
    model_dir = "out"
    batch_size = 8
    max_steps = None
    train_set = {"reader": [1, 2], "columns": COLUMNS, "epoch": 3}  # noqa: RUF012


def test_one_class() -> None:
    conf = checked([Plain])
    assert (conf.batch_size, conf.save_steps, conf.save_secs, conf.max_steps) == (8, 100, 0, 0)
    assert (conf.train_set.batch_size, conf.train_set.epoch, conf.eval_set) == (8, 3, None)
    assert conf.train_set.opened() == [1, 2]


def test_classes_are_merged_by_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base(ConfigurationManagerInterface, Plain):
        params = {"rate": 0.1, "layers": 2}  # noqa: RUF012

    class First(ConfigurationManagerInterface):
        priority = 1
        batch_size = 16
        params = {"rate": 0.2}  # noqa: RUF012

    class Last(ConfigurationManagerInterface):
        priority = 2
        batch_size = 32

    module = types.ModuleType("some_conf")
    vars(module).update(Last=Last, Base=Base, First=First, Other=Plain)
    monkeypatch.setitem(sys.modules, "some_conf", module)
    conf = load("some_conf.Base")
    assert (conf.batch_size, conf.params) == (32, {"rate": 0.2, "layers": 2})
    assert load("some_conf.Other").batch_size == 8, "it is not merged"
    for path, why in {
        "Conf": "must name a class, as module.Class",
        "some_conf.Gone": "some_conf has no class Gone",
        "no_such_module.Conf": "there is no module no_such_module",
    }.items():
        with pytest.raises(ConfigurationError, match=why):
            load(path)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_dir": ""}, "The configuration has no model_dir"),
        ({"save_steps": 0}, "save_steps is 0; it must be a number from 1"),
        ({"train_set": {"reader": [1]}}, "train_set has no columns"),
        (
            {"eval_set": {"columns": COLUMNS}},
            "eval_set needs a reader or a reader_fn, and not both",
        ),
        ({"eval_set": {"raeder": []}}, "eval_set has 'raeder'; it may have reader, columns"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        checked([type("Changed", (Plain,), changes)])


def test_the_command_of_the_original(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--platform=local_kubernetes", "--conf=a.B", "--ps_num=2", "--worker_num", "3"]
    present = types.ModuleType("tensorflow_estimator")
    present.__spec__ = importlib.machinery.ModuleSpec(present.__name__, None)
    monkeypatch.setitem(sys.modules, present.__name__, present)
    assert programs.estimator([*argv, "--evaluator_num=1", "--enable_auto_scaling"]) == (
        [
            "--chief",
            "--local-nodes",
            "3",
            "--servers",
            "2",
            "--evaluators",
            "1",
            "-m",
            "dlrover.tensorflow.estimators",
            "a.B",
        ]
    )
    assert "without effect: --enable_auto_scaling" in capsys.readouterr().err
    in_a_pod = programs.estimator(["--platform=Kubernetes", "--conf=a.B"])
    assert in_a_pod == ["--chief", "-m", "dlrover.tensorflow.estimators", "a.B"]
    with pytest.raises(ConfigurationError, match="--platform ray: must be one of local, "):
        programs.estimator(["--platform=ray", "--conf=a.B"])
    monkeypatch.setitem(sys.modules, present.__name__, None)
    with pytest.raises(ConfigurationError, match=r"install tensorflow==2\.15"):
        programs.estimator(argv)


def test_plans() -> None:
    assert plan_of(b"") == SessionPlan()
    plan = SessionPlan(3, ("a:1", "b:2"), b"base", True)
    assert plan_of(plan.packed()) == plan
    assert plan.container != SessionPlan(4).container


def test_positions_are_not_used_for_more_or_fewer_records() -> None:
    known = Positions("train.csv", 6000, b"")
    known.check("out/model.ckpt-7.records", 6000)
    with pytest.raises(ConfigurationError, match=r"-7.records .* 6,000 .* has 6,001; .* remove"):
        known.check("out/model.ckpt-7.records", 6001)


def test_a_flipped_bit_of_positions_is_found() -> None:
    known = Positions("train.csv", 6000, bytes(range(20)))
    content = known.packed()
    found = positions_of(content)
    assert (found.name, found.size, found.acknowledged) == ("train.csv", 6000, known.acknowledged)
    start = content.index(b"name")
    for bit in range(8 * start, 8 * content.index(b"\xa7version")):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            positions_of(bytes(damaged))
    for length in range(len(content)):
        with pytest.raises(ProtocolError):
            positions_of(content[:length])


def test_positions_without_a_checksum_are_read() -> None:
    earlier = {"name": "train.csv", "size": 3, "acknowledged": b"a", "version": 1}
    assert positions_of(msgspec.msgpack.encode(earlier)) == Positions("train.csv", 3, b"a")
