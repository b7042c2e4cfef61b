"""The recipes for running inside the jobs of others: their fields, images and commands."""

from __future__ import annotations

import shlex

import pytest

import dlrover
from dlrover.cli.run import arguments
from dlrover.cli.run.launchspec import Endpoint
from tests.recipes import schema
from tests.recipes.controllers import Pod
from tests.recipes.playing import MANIFESTS, RECIPES, ROOT, documents, job_of


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_has_only_fields_that_its_kind_knows(name: str) -> None:
    for manifest in documents(name):
        assert schema.faults(manifest) == []


def test_a_wrong_field_would_be_found() -> None:
    manifest = documents("jobset.yaml")[0]
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimits"] = 1
    manifest["spec"]["network"] = {"enableDNSHostnames": "yes"}
    assert schema.faults(manifest) == [
        ".spec.network.enableDNSHostnames is no bool",
        ".spec.replicatedJobs[0].template.spec.backoffLimits is unknown",
    ]


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_image_is_that_of_the_examples_of_this_release(name: str) -> None:
    text = (RECIPES / name).read_text()
    images = {line.split()[-1] for line in text.splitlines() if "image:" in line}
    assert images == {f"registry.example.com/dlrover-examples:{dlrover.__version__}"}


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_pods_are_without_privileges_and_may_write_to_the_volume(name: str) -> None:
    image = (ROOT / "deploy" / "containers" / "examples.Dockerfile").read_text()
    for pod in job_of(name).pods:
        assert pod.security["runAsNonRoot"] is True
        assert f"\nUSER {pod.security['fsGroup']}:" in image
        assert pod.security["capabilities"] == {"drop": ["ALL"]}
        assert pod.security["allowPrivilegeEscalation"] is False


EXPECTED = {
    "pytorchjob.yaml": ("digits-worker-0", 23456, "c10d", 1),
    "jobset.yaml": ("digits-node-0-0.digits", 29400, "c10d", 2),
    "trainjob.yaml": ("digits-node-0-0.digits", 29500, "static", 2),
    "volcano.yaml": ("digits-worker-0.digits", 29400, "c10d", 2),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_dlrover_run_takes_the_command_and_the_variables(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port, backend, least = EXPECTED[name]
    monkeypatch.chdir(ROOT / "examples")
    for rank, pod in enumerate(job_of(name).pods):
        options = arguments.parse(in_shell(pod), pod.env)
        assert options.rdzv_endpoint == Endpoint(host, port)
        assert options.rdzv_backend == backend
        assert (options.job.min_nodes, options.job.max_nodes) == (least, 2)
        assert options.launch.max_restarts == 3
        assert options.launch.run_id == "digits"
        assert options.launch.args == ("--out=/mnt/digits",)
        assert options.node_rank_given == (name != "pytorchjob.yaml")
        assert options.node_rank == (rank if options.node_rank_given else 0)
        timeout = options.rdzv_conf.get("connect_timeout") or pod.env["DLROVER_CONNECT_TIMEOUT"]
        assert timeout == "600"


def in_shell(pod: Pod) -> list[str]:
    """The words after ``dlrover-run``, as a shell hands them over if the pod's command is one."""
    if pod.command[:2] != ["sh", "-c"]:
        assert pod.command[0] == "dlrover-run"
        return pod.command[1:]
    script = pod.command[2].removeprefix("exec dlrover-run ")
    first = pod.env["VC_WORKER_HOSTS"].partition(",")[0]
    script = script.replace("${VC_WORKER_HOSTS%%,*}", first)
    for name, value in pod.env.items():
        script = script.replace(f"${name}", value)
    assert "$" not in script
    return shlex.split(script)
