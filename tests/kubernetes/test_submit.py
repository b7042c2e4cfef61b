"""``dlrover submit``: what it shows is what is made, and a wrong file gets a sentence."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from dlrover.cli.cluster import submit
from dlrover.errors import ConfigurationError, ExitCode
from dlrover.kubernetes.resources import names
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import Cluster
from tests.kubernetes.manifests import ORIGINAL, SEED, job


def saved(folder: Path, content: Any) -> str:
    text = content if isinstance(content, str | bytes) else yaml.safe_dump(content)
    (folder / "job.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder / "job.yaml")


def manifest(**spec: Any) -> dict[str, Any]:
    made = job(**spec)
    made["metadata"] = {"name": "digits"}
    return made


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["dlrover", "submit", *arguments], capture_output=True, text=True, check=False, timeout=20
    )


def test_a_job_of_servers_alone_is_not_submitted(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="servers need a worker or a chief"):
        submit.submit(saved(tmp_path, ORIGINAL))


def test_a_dry_run_shows_the_job_and_all_that_is_made_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit.submit(saved(tmp_path, SEED), dry_run=True)
    shown = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [one["kind"] for one in shown] == [
        "ElasticJob", "ServiceAccount", "Role", "RoleBinding", "Secret", "Service", "Pod"
    ]  # fmt: skip
    assert shown[0] == yaml.safe_load(SEED), "the manifest as it is"
    assert {one["metadata"]["namespace"] for one in shown} == {"dlrover"}
    assert "(set in the cluster)" in shown[4]["stringData"]["token"], "no secret is printed"


def test_a_dry_run_says_what_has_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit.submit(saved(tmp_path, ORIGINAL), dry_run=True)
    said = capsys.readouterr().err
    assert "dlrover: spec.resourceLimits is accepted for compatibility and has no effect." in said


def test_the_output_as_json_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit.submit(saved(tmp_path, SEED), dry_run=True)
    text = list(yaml.safe_load_all(capsys.readouterr().out))
    submit.submit(saved(tmp_path, SEED), dry_run=True, output=submit.Form.JSON)
    assert msgspec.json.decode(capsys.readouterr().out) == text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("a: [", "is not valid YAML"),
        (b"\xff\xfe", "is not valid YAML: 'utf-8' codec can't decode"),
        ("a: " + "[" * 1000, "is not valid YAML: maximum recursion depth exceeded"),
        (
            f"{yaml.safe_dump(manifest())}  roles: {{a: {{b: &b [*b, *b]}}}}\n",
            "spec is nested more than 100 levels deep",
        ),
        ("", "has 0 manifests: accepted is one, of an ElasticJob."),
        (f"{SEED}---{SEED}", "has 2 manifests"),
        ("- a", f"apiVersion is None: accepted is {names.API_VERSION}."),
        ({**manifest(), "kind": "Job"}, "kind is Job: accepted is ElasticJob."),
        ({**manifest(), "apiVersion": "v1"}, f"apiVersion is v1: accepted is {names.API_VERSION}."),
        (manifest(ttlSeconds=3), "spec.ttlSeconds is unknown: accepted are activeDeadlineSeconds"),
    ],
)
def test_a_wrong_file_gets_a_sentence(tmp_path: Path, content: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        submit.read(saved(tmp_path, content))
    assert sentence in str(caught.value)


def running(*command: str, **more: Any) -> dict[str, Any]:
    made = manifest()
    main = {"name": "main", "image": "i", "command": list(command), **more}
    made["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"] = [main]
    return made


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            running("dlrover-run", "--nprocs-per-node=8", "train.py"),
            "spec.replicaSpecs.worker.template: dlrover-run in container main would not start: unknown option "
            "--nprocs-per-node (did you mean --nproc-per-node?); see dlrover-run --help",
        ),
        (
            running("dlrover-run", "--nproc-per-node=0", "train.py"),
            "a node needs at least 1 worker.",
        ),
        (running("dlrover-run", "--nnodes=$NODE_NUM", "train.py"), "--nnodes $NODE_NUM: must be a"),
        (running("dlrover-run", "--nnodes=2"), "the following arguments are required"),
        (running("sh", "-c", "dlrover-run --nprox=$N t.py"), "unknown option --nprox"),
        (running("sh", "-c", "cd /x && dlrover-run --max-restarts=two t.py"), "'two'"),
        (running("dlrover-run", "t.py", env=[{"name": "PET_TEE", "value": "9"}]), "--tee 9: must"),
        (running("dlrover-run", "--chief", "train.py"), "needs spec.replicaSpecs.chief with 1"),
    ],
)
def test_a_command_that_would_not_start_gets_a_sentence(
    tmp_path: Path, content: Any, sentence: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        submit.submit(saved(tmp_path, content), dry_run=True)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        running("dlrover-run", "--node-unit=2", "--auto-scale", "train.py", "--nprox"),
        running("dlrover-run", "--nproc-per-node=auto", "--nnodes=$(NODES)", "train.py"),
        running("dlrover-run", "--server-failover=instance", "train.py"),
        running(
            "sh", "-c", "dlrover-run --version; dlrover-run --max-restarts=$N --nnodes $M t.py"
        ),
        running("sh", "-c", "dlrover-run $OPTIONS train.py --nprox"),
        running("sh", "-c", "echo dlrover-run --nprox; python train.py"),
        running("dlrover-run", "t.py", env=[{"name": "PET_TEE", "valueFrom": {"fieldRef": {}}}]),
    ],
)
def test_a_command_that_may_start_is_submitted(tmp_path: Path, content: Any) -> None:
    submit.submit(saved(tmp_path, content), dry_run=True)


def test_a_file_that_is_not_there_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.yaml cannot be read: No such file"):
        submit.read(str(tmp_path / "none.yaml"))


@pytest.mark.slow
def test_all_faults_of_a_manifest_are_printed_and_the_exit_code_is_that_of_usage(
    tmp_path: Path,
) -> None:
    done = run(saved(tmp_path, manifest(suspend="yes", cleanPodPolicy="Some")), "--dry-run")
    assert done.returncode == ExitCode.USAGE
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        'dlrover: spec.cleanPodPolicy is "Some": accepted is All, None or Running.',
        'spec.suspend is "yes": accepted is true or false.',
    ]


def without(packages: tuple[str, ...], *words: str) -> str:
    """What a command says that is refused as these packages are not installed."""
    program = (
        f"import sys; sys.modules |= dict.fromkeys({packages})\n"
        "from dlrover.cli import main\n"
        f"sys.argv[1:] = {list(words)}; sys.exit(main.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=20
    )
    assert done.returncode == ExitCode.USAGE, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("verb", [["submit", "job.yaml"], ["operator"]])
def test_without_the_extra_a_sentence_says_what_to_install(verb: list[str]) -> None:
    said = without(("yaml", "httpx2"), *verb)
    assert "Kubernetes needs the package httpx2: pip install 'dlrover[kubernetes]>=" in said


@pytest.mark.slow
def test_a_manifest_needs_on_ray_what_ray_brings_and_nothing_of_kubernetes(tmp_path: Path) -> None:
    path, of_kubernetes = saved(tmp_path, manifest()), ("httpx2", "wsproto", "cryptography")
    said = without((*of_kubernetes, "ray"), "submit", path, "--platform", "ray")
    assert "--platform ray needs the package ray: pip install 'dlrover[ray]>=" in said


# ---- with a real API server


def test_what_a_dry_run_shows_is_what_the_operator_makes(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    cluster = Cluster(control_plane, namespace, tmp_path)
    made = manifest(master={"tls": True})
    made["metadata"]["namespace"] = namespace
    path = saved(tmp_path, made)
    shown = list(yaml.safe_load_all(run(path, "--dry-run", "--master-image=dlrover:1").stdout))

    async def scenario() -> None:
        async with cluster.operator():
            done = await asyncio.to_thread(run, path, "--kubeconfig", cluster.plane.kubeconfig)
            assert done.stdout == f"ElasticJob digits was created in namespace {namespace}.\n"
            await cluster.until(lambda: bool(cluster.list("pods")))  # the last object to be made

    asyncio.run(scenario())
    uid = cluster.get("elasticjobs", "digits")["metadata"]["uid"]
    for one in shown:
        text = json.dumps(one).replace("-UID", f"-{uid.partition('-')[0]}")
        text = text.replace('"UID"', f'"{uid}"')
        if one["kind"] in ("Pod", "Service", "Secret", "ServiceAccount"):
            plural = f"{one['kind'].lower()}s"
            expected = json.loads(text)
            found = cluster.get(plural, expected["metadata"]["name"])
            expected.pop("stringData", None)
            assert contains(found, expected), one["kind"]


def contains(found: Any, expected: Any) -> bool:
    """Whether what the server has is what was shown, and beyond it only defaults."""
    if isinstance(expected, dict):
        pairs = (
            (found.get(key), value) for key, value in expected.items() if value not in ({}, [])
        )
        return isinstance(found, dict) and all(contains(*pair) for pair in pairs)
    if isinstance(expected, list):
        return len(found) >= len(expected) and all(map(contains, found, expected))
    return bool(found == expected)


def test_what_the_server_does_not_take_gets_a_sentence(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    cluster = Cluster(control_plane, namespace, tmp_path)
    path = saved(tmp_path, manifest())
    access = ("--namespace", namespace, "--kubeconfig", str(cluster.plane.kubeconfig))
    assert run(path, *access).returncode == 0
    again = run(path, *access)
    assert again.returncode == ExitCode.USAGE
    assert f"namespace {namespace} already has an ElasticJob of this name." in again.stderr
    away = run(path, "--kubeconfig", str(tmp_path / "none"))
    assert away.returncode == ExitCode.USAGE
    assert "cannot be read" in away.stderr
