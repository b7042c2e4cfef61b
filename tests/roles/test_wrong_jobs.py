"""Jobs of several roles that cannot be: each is refused in one sentence, with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dlrover.accelerators import Vendor
from dlrover.cli import roles
from dlrover.cli.cluster import rolesonkubernetes
from dlrover.cli.main import app
from dlrover.errors import ConfigurationError
from dlrover.kubernetes.resources import validation
from dlrover.roles import Job
from dlrover.roles.loading import load, of_options, tls_of, to_options
from dlrover.roles.spec import EntryForm, Failover, RoleKind, RolesConfig
from dlrover.spec.job import Limits
from dlrover.spec.jobdir import TlsFiles
from tests.support import certificates

PROGRAM = "class Work:\n    def run(self): ...\n\ndef main(): ...\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(PROGRAM)
    return tmp_path


def refused(folder: Path, text: str, suffix: str = "yaml") -> str:
    file = folder / f"job.{suffix}"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load(str(file))
    return str(caught.value).replace(f"{folder}/", "")


YAML = """
name: grpo
roles:
  trainer: {entry: work.py --lr 0.1, kind: elastic, instances: [1, 2], processes: 2, depends_on: {rollout: restart}}
  rollout:
    entry: work:Work
    instances: 2
    env: {SEED: 1}
    config: {temperature: 0.7}
    resources: {cpu: 500m, memory: 1Gi}
    failover: role
    max_restarts: 3
  main: {entry: work.main, kind: driver, depends_on: [trainer, rollout]}
"""


def test_yaml_and_python_say_the_same(folder: Path) -> None:
    (folder / "job.yaml").write_text(YAML)
    found = load(str(folder / "job.yaml"))
    (folder / "job.py").write_text(
        "from dlrover.roles import Job\n"
        "job = (Job('grpo')\n"
        " .role('trainer', 'work.py --lr 0.1', kind='elastic', instances=(1, 2), processes=2,"
        " depends_on={'rollout': 'restart'})\n"
        " .role('rollout', 'work:Work', instances=2, env={'SEED': '1'}, config={'temperature': 0.7},"
        " resources={'cpu': 0.5, 'memory': '1Gi'}, failover='role', max_restarts=3)\n"
        " .role('main', 'work.main', kind='driver', depends_on=['trainer', 'rollout']))\n"
    )
    assert load(str(folder / "job.py")) == found
    options = {role.name: to_options(role, str(folder)) for role in found.roles}
    assert of_options("grpo", options, folder) == found
    assert options["trainer"]["entry"] == "work.py --lr 0.1"
    trainer, rollout, main = found.roles
    assert trainer.entry.args == ("--lr", "0.1")
    assert (trainer.least, trainer.most, trainer.kind) == (1, 2, RoleKind.ELASTIC)
    assert (rollout.size.cpu, rollout.size.memory) == (0.5, 1 << 30)
    assert (rollout.failover, rollout.env, rollout.config) == (
        Failover.ROLE,
        {"SEED": "1"},
        {"temperature": 0.7},
    )
    assert [role.entry.form for role in found.roles] == [
        EntryForm.SCRIPT,
        EntryForm.OBJECT,
        EntryForm.FUNCTION,
    ]
    assert (found.driver, main.depends_on) == ("main", {"trainer": "wait", "rollout": "wait"})


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        ("a: {entry: work.py, depends_on: b}\n  b: {entry: work.py, depends_on: a}",
         "The roles need each other in a circle: a -> b -> a; take one depends_on away."),
        ("a: {entry: work.py, depends_on: a}",
         "The roles need each other in a circle: a -> a; take one depends_on away."),
        ("a: {entry: work.py, kind: driver}\n  b: {entry: work.py, kind: driver}",
         "The roles a and b are both drivers; a job has at most one."),
        ("a: {entry: gone.py}", "role a: entry gone.py: the script does not exist (looked in"),
        ("a: {entry: 'gone:Work'}", "role a: entry gone: there is no module gone (looked in"),
        ("a: {entry: 'work:Wrok'}", "role a: entry: module work has no Wrok. Did you mean Work?"),
        ("a: {entry: work.mian}", "role a: entry: module work has no mian. Did you mean main?"),
        ("a: {entry: python}", "role a: entry 'python': must be a script as 'train.py --lr 0.1', an object"),
        ("a: {entry: work.py, instance: 2}",
         "job.yaml: role a: the key instance is unknown. Did you mean instances?"),
        ("a: {entry: work.py, colour: red}",
         "job.yaml: role a: the key colour is unknown. Known keys are entry, kind, instances,"),
        ("a: {entry: work.py, instances: 0}",
         "role a: instances (0, 0): must be N or (MIN, MAX) with 1 <= MIN <= MAX."),
        ("a: {entry: work.py, instances: two}", "role a: instances two: must be N or (MIN, MAX)."),
        ("a: {entry: work.py, kind: worker}", "role a: kind worker: must be one of elastic, simple, driver."),
        ("a: {entry: work.py, failover: node}",
         "role a: failover node: must be one of instance, role, job."),
        ("a: {entry: work.py, spares: 1}", "role a: spares 1: must be 0, or more for an elastic role."),
        ("a: {entry: work.py, processes: 2}", "role a: processes 2: must be 1, or more for an elastic role."),
        *((f"a: {{entry: work.py, window: {wrong}}}",
           f"role a: window {wrong.removeprefix('.')}: must be a number of seconds above 0.") for wrong in ("0.0", ".nan", ".inf")),
        ("a: {entry: work.py, shutdown_timeout: -1}",
         "role a: shutdown_timeout -1: must be 0 or more seconds."),
        ("a: {entry: work.py, depends_on: roll}",
         "role a: depends_on roll: there is no such role; the job has no other role."),
        ("a: {entry: work.py, depends_on: [mian]}\n  main: {entry: work.main, kind: driver}",
         "role a: depends_on mian: there is no such role; must be one of main. Did you mean main?"),
        ("a: {entry: work.py, env: {A=B: c}}", "role a: env 'A=B': a name has no '=', ',' or space, and no"),
        ('a: {entry: work.py, env: {A: "c\\0"}}', "role a: env 'A': a name has no '=', ',' or space, and no text has a NUL"),
        ("a: {entry: work.py, config: {stop: !!set {1, 2}}}",
         "role a: config {'stop': {1, 2}}: takes values that JSON has ({1, 2} is of type set)."),
        ("a: {entry: work.py, config: {deep: [{clip: .inf}]}}",
         "role a: config {'deep': [{'clip': inf}]}: takes values that JSON has (inf is not finite)."),
        ("a: {entry: work.py, config: {3: a}}",
         "role a: config {3: 'a'}: takes values that JSON has (the key 3 is not a text)."),
        ("a: {entry: work.py, config: {image: !!binary eA==}}",
         "role a: config {'image': b'x'}: takes values that JSON has (b'x' is of type bytes)."),
        ("a: {entry: work.py, depends_on: {a: never}}", "role a: depends_on never: must be wait or restart."),
        ("a: {entry: work.py, resources: {gpus: 1}}",
         "role a: resources gpus: must be cpu, memory or gpu."),
        ("a: {entry: work.py, resources: {gpu: 1.5}}",
         "role a: resources gpu 1.5: must be a whole number, or 1 or less."),
        ("a: {entry: work.py, resources: {memory: much}}",
         "role a: resources memory much: must be a number of bytes, as 2Gi."),
        ("a: {entry: work.py, kind: driver, instances: 2}",
         "role a: kind driver: a driver is a script or a function with one instance."),
        ("a: {entry: 'work:Work'}",
         "All roles of job x are objects that others call, so it would never end; add a driver."),
        ("a/b: {entry: work.py}", "role a/b: a name has letters, digits, - and _, begins with a letter"),
    ],
)  # fmt: skip
def test_each_fault_is_one_sentence(folder: Path, roles: str, says: str) -> None:
    assert refused(folder, f"name: x\nroles:\n  {roles}\n").startswith(says)


def test_python_files_that_make_no_job(folder: Path) -> None:
    assert "defines no job" in refused(folder, "jobs = 1\n", "py")
    wrong = "from dlrover.roles import Job\njob = Job('x').role('a', 'work.py', instance=2)\n"
    assert refused(folder, wrong, "py").endswith(
        "unexpected keyword argument 'instance'. Did you mean instances?"
    )
    assert "job.py:1: ZeroDivisionError" in refused(folder, "1 / 0\n", "py")


def test_more_than_the_machine_has_is_said_at_once_for_each_role(folder: Path) -> None:
    job = Job("x", directory=folder)
    job.role("rollout", "work.py", instances=4, resources={"cpu": 2})
    job.role("trainer", "work.py", resources={"cpu": 1.5})
    job.role("free", "work.py")
    with pytest.raises(ConfigurationError) as caught:
        roles.check_size(job.spec(), 8, 1 << 30, 0)
    assert str(caught.value) == (
        "resources: the roles need 9.5 cores, and this machine has 8: rollout 4 x 2, trainer 1 x 1.5."
    )
    roles.check_size(job.spec(), 10, 1 << 30, 0)


def test_more_gpus_than_the_machine_has_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("x", directory=folder)
    job.role("rollout", "work.py", instances=2, resources={"gpu": 0.5}, collocate="gpu")
    job.role("trainer", "work.py", resources={"gpu": 3}, collocate="gpu")
    job.role("free", "work.py")
    roles.check_size(job.spec(), 1, 1, 3)
    for files, has in (((), 0), (("/dev/nvidia0", "/dev/nvidia1"), 2)):
        monkeypatch.setattr(Vendor, "device_files", lambda _, *__, found=files: found)
        with pytest.raises(ConfigurationError) as caught:
            roles.check_here(job.spec())
        assert str(caught.value) == (
            f"resources: the roles need 3 GPUs, and this machine has {has}: rollout 2 x 0.5, trainer 1 x 3."
        )


def test_roles_of_one_group_take_turns_with_what_they_need(folder: Path) -> None:
    job = Job("x", directory=folder)
    for name in ("rollout", "trainer"):
        job.role(name, "work.py", resources={"memory": "6Gi"}, collocate="gpu")
    roles.check_size(job.spec(), 1, 8 << 30, 0)
    job.role("reward", "work.py", resources={"memory": "3Gi"})
    with pytest.raises(ConfigurationError, match="need 9Gi of memory, and this machine has 8Gi"):
        roles.check_size(job.spec(), 1, 8 << 30, 0)


def test_the_command_exits_with_2(folder: Path) -> None:
    (folder / "job.yaml").write_text("name: x\nroles: {a: {entry: work.py}}\n")
    wrong = {
        "turns": "a: {entry: work.py, collocate: g}",
        "half": "a: {entry: work.py, resources: {gpu: 0.5}}",
        "upper": "A: {entry: work.py}",
    }
    for name, role in wrong.items():
        (folder / f"{name}.yaml").write_text(f"name: x\nroles: {{{role}}}\n")
    turns, half, upper = (str(folder / f"{name}.yaml") for name in wrong)
    (below := folder / "below").mkdir()
    job, ray = str(folder / "job.yaml"), ("--platform", "ray")
    pods, image = ("--platform", "kubernetes"), ("--image", "train:1")
    for words, says in (
        ([str(folder / "gone.yaml")], "the file does not exist"),
        ([job, "--platform", "slurm"], "slurm: must be local, ray or kubernetes"),
        ([job, "--image", "train:1"], "--image train:1: needs --platform kubernetes"),
        ([job, *pods, "--ray-address", "h:1"], "--ray-address h:1: needs --platform ray"),
        ([job, "--tls"], "--tls: needs --platform kubernetes"),
        ([job], "needs tls_cert, tls_key and tls_ca; not set: tls_cert, tls_key"),
        ([job, *pods], "--platform kubernetes needs --image"),
        ([job, *pods, *image, "--kubeconfig", str(below)], "cannot be read"),
        ([turns, *pods, *image], "role a: collocate g: with --platform kubernetes"),
        ([half, *pods, *image], "role a: resources gpu 0.5: Kubernetes gives a pod whole GPUs"),
        ([upper, *pods, *image], "role A: the ElasticJob x-A cannot have that name"),
        ([job, "--ray-address", "h:1"], "--ray-address h:1: needs --platform ray"),
        ([job, *ray, "--ray-address", "ray://h:1"], "runs on a machine of the cluster"),
        ([job, *ray, "--ray-working-dir", str(folder / "no")], "there is no such directory"),
        ([job, *ray, "--ray-working-dir", str(below)], "is not below it"),
        ([turns, *ray], "role a: collocate g: with --platform ray"),
    ):
        result = CliRunner().invoke(app, ["roles", *words], env={"DLROVER_TLS_CA": "ca.crt"})
        assert isinstance(result.exception, ConfigurationError)
        assert (says in str(result.exception), result.exception.exit_code) == (True, 2)


def test_files_for_tls_are_checked_before_the_job_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = certificates.made(folder)
    monkeypatch.chdir(folder)
    env = {name: Path(path).name for name, path in certificates.settings(files).items()}
    assert tls_of(env) == files
    assert tls_of({"DLROVER_TLS_SERVER_NAME": "x"}) == TlsFiles()
    with pytest.raises(ConfigurationError, match="tls_ca"):
        tls_of(env | {"DLROVER_TLS_CA": "work.py"})
    with pytest.raises(ConfigurationError, match="tls_cert"):
        tls_of(env | {"DLROVER_TLS_KEY": "work.py"})


def test_a_job_on_kubernetes_cannot_bring_a_certificate_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    job = Job("x", directory=folder)
    job.role("a", "work.py")
    made = rolesonkubernetes.manifest(job.spec(), "train:1", "", {})
    env = certificates.settings(certificates.made(folder))
    with pytest.raises(ConfigurationError, match=r"set spec\.master\.tls instead"):
        rolesonkubernetes.coordinate(validation.parse(made), env, "", 0)


def test_a_pod_of_a_role_has_time_to_store_what_is_in_memory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    job = Job("x", directory=folder)
    job.role("a", "work.py", shutdown_timeout=40)
    spec = job.spec()
    made = validation.parse(rolesonkubernetes.manifest(spec, "train:1", "", {}))
    content = RolesConfig(job=spec, platform="kubernetes")
    of_role = rolesonkubernetes.job_of(made, spec.role("a"), content, 0, {})
    pod = of_role["spec"]["replicaSpecs"]["worker"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 40 + Limits().release_grace
