"""The Ray engine's decisions, without Ray: names, resources, sentences, manifests, command lines."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from dlrover.cli.cluster import onray as manifests
from dlrover.cli.run import arguments
from dlrover.errors import ConfigurationError
from dlrover.kubernetes.resources import validation
from dlrover.ray import places
from dlrover.ray.machine import job as jobs, words
from dlrover.spec.job import Entry, JobSpec, LaunchSpec
from dlrover.spec.jobdir import AgentConfig, MasterConfig
from dlrover.spec.node import FIRST_SERVER, LaunchNode


def job(**resources: float) -> jobs.RayJob:
    agent = AgentConfig(launch=LaunchSpec(entry=Entry.SCRIPT, target="train.py"))
    return jobs.RayJob(
        name="j",
        master=MasterConfig(job=JobSpec(name="j")),
        roles={"": jobs.RayRole(agent=agent, resources=resources)},
        token="t",
    )


def test_a_later_master_reads_everything_about_a_node_from_its_name() -> None:
    node = LaunchNode(11, 3, ("host",), 1.5, 0.25)
    name = jobs.node_name("a/b", node)
    [found] = jobs.found_nodes("a/b", ["a/b/master", "a/node/1/1/1.0/1.0", name])
    assert (found.node_id, found.node_rank, found.handle) == (11, 3, name)
    assert (found.memory_factor, found.cpu_factor) == (1.5, 0.25)
    assert jobs.job_of(jobs.master_name("a/b")) == "a/b"
    assert jobs.job_of(name) == ""


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("train", "train-20260102-030405-a1b2"),  # the last start of the program
        ("train-20260101", "train-20260101-030405-ffff"),
        ("rl-rollout", "rl-rollout-10-abcdef"),
        ("rl-rollout-b", "rl-rollout-b-1-123456"),
        ("rl-rollout-9-abcdef", "rl-rollout-9-abcdef"),
        ("rl-tr", ""),
    ],
)
def test_a_beginning_of_a_name_means_the_last_start_of_one_job(name: str, means: str) -> None:
    known = [
        "rl-trainer-2-fedcba", "rl-rollout-9-abcdef", "rl-rollout-10-abcdef", "rl-rollout-b-1-123456",
        "train-20260102-030405-a1b2", "train-20260101-030405-ffff", "train-b", "grpo-a", "grpo-b",
    ]  # fmt: skip
    assert jobs.meant(name, known) == means
    with pytest.raises(ConfigurationError, match=r"^Job grpo may be grpo-a or grpo-b of the Ray"):
        jobs.meant("grpo", known)


@pytest.mark.parametrize("name", ["..", ".", "../../home", "a/b", "/etc", ".hidden"])
def test_a_jobs_directory_is_one_part_of_a_path_whatever_its_name(name: str) -> None:
    assert Path("/state/ray", jobs.directory_of(name)).resolve().parent == Path("/state/ray")
    assert jobs.directory_of("train-1.b") == "train-1.b"


def test_roles_share_no_directory_on_a_machine_as_their_agents_differ() -> None:
    roles = job().roles
    spec = MasterConfig(job=JobSpec(name="j", servers=1))
    both = msgspec.structs.replace(job(), master=spec, roles=roles | {"ps": roles[""]})
    worker, other, server = map(both.nodes_place, (0, 1, FIRST_SERVER))
    assert worker == other != server


def test_a_state_directory_that_another_user_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    found = [tmp_path / "file" / "state", tmp_path / "foreign"]
    monkeypatch.setattr(places.config, "state_dirs", lambda _env: found)
    made = places.make("j", {"../token": b"secret"})
    assert made.path == tmp_path / "foreign" / "jobs" / "j"
    assert made.token.read_bytes() == b"secret"
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    with pytest.raises(ConfigurationError, match="DLROVER_STATE_DIR"):
        places.make("j", {})


def test_an_actor_comes_back_to_its_directory_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [tmp_path / "full", tmp_path / "other"]
    monkeypatch.setattr(places.config, "state_dirs", lambda _env: found)
    content = {"token": b"secret", "job.json": b"{}"}
    there = places.make("j", content).path

    def full(path: Path, *_: object, **__: object) -> None:
        if path.is_relative_to(found[0]):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(places.files, "write_atomically", full)
    assert places.make("j", content).path == there, "its journal is there"
    assert places.make("j", content | {"job.json": b"{1}"}).path != there


def test_a_job_comes_back_from_its_bytes() -> None:
    assert jobs.decode(jobs.encode(job(CPU=2))) == job(CPU=2)
    with pytest.raises(ConfigurationError, match="is not UTF-8"):
        jobs.encode(jobs.RayJob(**{**_fields(job()), "directory": "\udcff"}))


def _fields(one: jobs.RayJob) -> dict[str, object]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def test_a_larger_node_gets_a_larger_bundle() -> None:
    one = job(CPU=2, GPU=1, memory=1000, own=3)
    name = jobs.node_name("j", LaunchNode(0, 0, (), 1.5005, 0.5))
    assert jobs.bundle_of(one, name) == {"CPU": 1.0, "GPU": 1, "memory": 1500.0, "own": 3}


def test_servers_have_resources_of_their_own() -> None:
    one = job(CPU=1)
    server = jobs.RayRole(agent=one.roles[""].agent, resources={"CPU": 7})
    two = jobs.RayJob(**{**_fields(one), "roles": {**one.roles, "ps": server}})
    assert two.role(FIRST_SERVER).resources == {"CPU": 7}
    assert two.role(0).resources == {"CPU": 1}


def test_hosts_to_avoid_are_ray_nodes() -> None:
    ids = ["a" * 56, "b" * 56, "c" * 56]
    hosts = [jobs.host_name("my-host", ids[2]), jobs.host_name("gone", "d" * 56)]
    assert jobs.elsewhere(hosts, ids) == {jobs.LABEL: f"!in({ids[2]})"}
    assert jobs.elsewhere(hosts[1:], ids) == {}


@pytest.mark.parametrize("text", ["CPU", "=1", "CPU=x", "CPU=-1", "CPU=inf", "GPU=1.5", "CPU=1,,"])
def test_malformed_resources_are_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--ray-resources"):
        jobs.parse_resources(text)


def test_resources_have_rays_names() -> None:
    amounts = jobs.parse_resources("cpu=4, GPU=0.5,memory=2147483648,tpu=1")
    assert amounts == {"CPU": 4, "GPU": 0.5, "memory": 1 << 31, "tpu": 1}
    assert jobs.in_words(amounts) == "CPU 4, GPU 0.5, memory 2Gi, tpu 1"


def test_a_pending_node_says_what_it_waits_for() -> None:
    assert jobs.waits({"CPU": 4}, {"CPU": 2}, {"CPU": 6}) == (
        "placement group pending: needs CPU 4, the cluster has CPU 2 free of 6"
    )
    assert jobs.waits({"CPU": 4}, {"CPU": 5}, {"CPU": 6}).endswith("all of it free")


@pytest.mark.parametrize(
    ("wanted", "count", "most", "words"),
    [
        ({"CPU": 2}, 2, None, ""),
        ({"CPU": 2}, 3, None, "3 nodes need CPU 6, CPU 2 each, and the cluster can have CPU 4"),
        ({"CPU": 2}, 3, {"CPU": 100}, ""),
        ({"GPU": 1}, 1, {"CPU": 100}, "1 node needs GPU 1, and the cluster can have GPU 0"),
        ({"CPU": 3}, 1, None, "a node needs CPU 3, and no node of the cluster has that much"),
    ],
)
def test_what_a_cluster_can_never_have_is_known_at_once(wanted, count, most, words) -> None:
    assert jobs.impossible(wanted, count, [{"CPU": 2}, {"CPU": 2}], most) == words


def test_roles_that_a_cluster_can_never_run_together_are_named() -> None:
    nodes = [{"CPU": 2}, {"CPU": 2, "GPU": 1}]

    def found(
        *roles: tuple[str, int, dict[str, float]], most: dict[str, float] | None = None
    ) -> str:
        return jobs.too_much(roles, nodes, most)

    trainer, rollout = ("trainer", 1, {"CPU": 2, "GPU": 1}), ("rollout", 3, {"CPU": 1})
    assert found(trainer, ("rollout", 2, {"CPU": 1})) == ""
    assert found(trainer, rollout) == (
        "the roles need CPU 5, and the cluster can have CPU 4: trainer 1 x CPU 2, rollout 3 x CPU 1"
    )
    assert found(trainer, rollout, most={"CPU": 8}) == ""
    assert (
        found(("reward", 1, {"GPU": 2}))
        == "role reward: 1 node needs GPU 2, and the cluster can have GPU 1"
    )


def test_rays_reason_is_one_line_without_ids() -> None:
    message = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: NodeActor\n\tactor_id: 1f\n"
        "\tnode_ip: 10.0.0.1\nThe actor died because its node has died. Node Id: ab\n\tthe actor's node was terminated: "
        "health check failed."
    )
    assert words.why_died(message) == (
        "The actor died because its node has died. Node Id: ab the actor's node was terminated: health check failed"
    )
    assert words.is_removal(words.why_died(message))
    assert words.why_died("") == "Ray gives no reason"
    assert not words.is_removal("Ray gives no reason")


def test_another_version_is_one_sentence() -> None:
    message = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.11.7\n"
        "This process on node 1 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    )
    assert words.why_refused("h:1", message) == (
        "--ray-address h:1: the cluster runs Ray 2.50.0 Python 3.11.7 and this environment has Ray 2.60.0 Python "
        "3.11.7; both must be the same."
    )


def test_what_a_server_of_another_version_cannot_read_is_one_sentence() -> None:
    message = (
        'Initialization failure from server:\nTraceback (most recent call last):\n  File "proxier.py", line 765, in Datapath\n'
        "AttributeError: 'JobConfig' object has no attribute '_lineage'\n"
    )
    assert words.why_refused("ray://h:1", message, "Ray 2.50.1 and Python 3.11.7") == (
        "--ray-address ray://h:1: the cluster cannot begin to serve this command (AttributeError: 'JobConfig' object has no"
        " attribute '_lineage'); it must run Ray 2.50.1 and Python 3.11.7, as this environment does."
    )


@pytest.mark.parametrize(
    ("body", "version"),
    [
        (b"\n\x00\x12\x062.60.0 \x01", "2.60.0"),
        (b"\n\x00\x12\x0a3.0.0.dev0", "3.0.0.dev0"),
        (b"\n\x00 \x01", ""),
        (b"\x12\x1e2.60.0", ""),
        (b"", ""),
    ],
)
def test_the_version_of_a_cluster_is_read_from_its_answer(body: bytes, version: str) -> None:
    assert words.version_in(body) == version


def test_a_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from dlrover.ray import cluster

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"dlrover\[ray\]"):
        cluster.connect("")


@pytest.mark.parametrize("version", ["2.9.3", "1.13.0", "2.49.2"])
def test_a_ray_that_is_too_old_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    from dlrover.ray import cluster

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__=version))
    said = rf"^--platform ray needs Ray 2\.50 or later, and this environment has Ray {version}: pip install"
    with pytest.raises(ConfigurationError, match=said):
        cluster.connect("")


@pytest.mark.parametrize("version", ["2.50.0", "2.60.1", "3.0.0.dev0", "unknown"])
def test_a_ray_of_this_time_is_used(version: str) -> None:
    words.check_version(version, "pip install")


def test_an_address_where_nothing_listens_is_named() -> None:
    from dlrover.ray import cluster

    with pytest.raises(ConfigurationError, match="no Ray cluster can be reached"):
        cluster.check_port("127.0.0.1:9")


# ---- command lines


def options(*words: str):
    return arguments.parse([*words, __file__], {"SECRET": "s"})


def test_nodes_on_ray_count_as_started_by_dlrover() -> None:
    found = options(
        "--platform", "ray", "--nnodes", "2:4", "--nproc-per-node", "gpu", "--ray-resources", "CPU=8,GPU=2",
        "--ray-env", "A=1,SECRET", "--servers", "1",
    )  # fmt: skip
    assert (found.local_nodes, found.job.min_nodes, found.job.max_nodes) == (4, 2, 4)
    assert found.launch.nproc_per_node == 2
    assert found.ray.env == {"A": "1", "SECRET": "s"}
    assert found.ray.resources == {"CPU": 8, "GPU": 2}
    assert options("--platform", "ray", "--nproc-per-node", "3").ray.resources == {"CPU": 3}
    assert options().ray is None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--platform", "slurm"], "slurm"),
        (["--ray-address", "h:1"], "--ray-address h:1: needs --platform ray"),
        (["--platform", "ray", "--local-nodes", "2"], "--local-nodes"),
        (["--platform", "ray", "--ray-env", "NONE"], "NONE"),
        (["--platform", "ray", "--ray-working-dir", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_options_are_named(words: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        options(*words)


# ---- manifests


def manifest(command: list[str], **container: object) -> dict:
    requests = {"cpu": "2", "memory": "1Gi", "nvidia.com/gpu": "4"}
    main = {"name": "main", "image": "i", "command": command, "resources": {"limits": requests}}
    template = {"spec": {"containers": [{**main, **container}]}}
    spec = {"replicaSpecs": {"worker": {"replicas": 3, "minReplicas": 2, "template": template}}}
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "m"},
        "spec": spec,
    }


def test_a_manifest_becomes_the_same_job_on_ray() -> None:
    command = ["sh", "-c", "dlrover-run --nproc-per-node=gpu --max-restarts 2 /app/train.py --lr 1"]
    content = manifest(command, env=[{"name": "A", "value": "1"}], workingDir="/app")
    found = manifests.ray_job(validation.parse(content), {})
    spec, worker = found.master.job, found.role(0)
    assert (spec.min_nodes, spec.max_nodes, spec.managed_nodes, spec.max_restarts) == (2, 3, 3, 2)
    assert (found.name, found.master.platform, found.foreground) == ("m", "ray", False)
    assert worker.resources == {"CPU": 2, "memory": 1 << 30, "GPU": 4}
    assert (worker.agent.launch.target, worker.agent.launch.args) == (
        "/app/train.py",
        ("--lr", "1"),
    )
    assert worker.agent.launch.nproc_per_node == 4
    assert worker.env["A"] == "1"
    assert found.directory == "/app"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (manifest(["python", "train.py"]), "its command must be dlrover-run"),
        (
            manifest(["dlrover-run", "t.py"], env=[{"name": "A", "valueFrom": {"fieldRef": {}}}]),
            "variable A has valueFrom",
        ),
    ],
)
def test_what_only_kubernetes_can_do_is_named(content: dict, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        manifests.ray_job(validation.parse(content), {})
