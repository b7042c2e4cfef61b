"""When the master of an ElasticJob may choose the number of its workers."""

import pytest
import yaml

from dlrover.kubernetes.platform.job import request
from dlrover.kubernetes.resources import compatibility, validation

JOB = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata: {name: train}
spec:
  optimizeMode: MODE
  replicaSpecs:
    worker:
      replicas: 4
      minReplicas: 1
      autoScale: AUTO
      template: {spec: {containers: [{name: main, image: train, command: [dlrover-run, COMMAND, train.py]}]}}
"""
TWO = {"replicas": 2, "template": {"spec": {"containers": [{"name": "main", "image": "train"}]}}}


def manifest(*, mode: str = "single-job", auto: str = "true", flag: str = "--nnodes=1:4") -> dict:
    return yaml.safe_load(JOB.replace("MODE", mode).replace("AUTO", auto).replace("COMMAND", flag))


def scales(made: dict) -> bool:
    return request(validation.parse(made)).job.auto_scale


@pytest.mark.parametrize("mode", ["single-job", "cluster"])
def test_auto_scale_of_the_workers_turns_it_on(mode):
    made = manifest(mode=mode)
    assert scales(made)
    assert not any("worker.autoScale" in note for note in compatibility.notes(made["spec"]))


def test_so_does_the_flag_in_the_workers_command():
    assert scales(manifest(auto="false", flag="--auto-scale"))


@pytest.mark.parametrize("mode", ["manual", "manunal"])
def test_manual_turns_it_off(mode):
    made = manifest(mode=mode)
    assert not scales(made)
    assert not any("optimizeMode" in note for note in compatibility.notes(made["spec"]))


def test_without_being_asked_for_numbers_stay():
    assert not scales(manifest(auto="false"))


@pytest.mark.parametrize(("role", "found"), [("chief", False), ("evaluator", False), ("ps", True)])
def test_jobs_with_a_chief_or_an_evaluator_keep_their_numbers(role, found):
    made = manifest()
    made["spec"]["replicaSpecs"][role] = TWO
    assert scales(made) == found
