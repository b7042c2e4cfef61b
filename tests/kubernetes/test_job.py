"""Whole jobs on a real control plane: the operator, the master and dlrover-run are real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrover.dashboard.actions import StacksAction
from dlrover.dashboard.pods import PodJob
from dlrover.errors import ConfigurationError
from dlrover.kubernetes.resources import names
from dlrover.rpc.brain import BrainClient
from dlrover.spec.outcome import Goodput, IncidentCost, Outcome
from tests.brain import jobs as brain_jobs, processes
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import Cluster
from tests.kubernetes.kubelet import Kubelet
from tests.support.browser import Browser, chromium
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

STEPS, HELD_AT = 60, 20
SCRIPT = f"""
import json, os, pathlib, sys, time
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
folder = pathlib.Path(sys.argv[1])
own, word = folder / f"rank-{{rank}}", folder / "word"
sys.stdout.buffer.write(b"x" * 400_000 + b"\\n<b>bold</b> \\xff\\x1b[31mred\\n")
sys.stdout.flush()
done = int(own.read_text()) if own.exists() else 0
with open(folder / "starts", "a") as starts:
    starts.write(json.dumps({{"rank": rank, "world": world, "step": done, "pod": os.environ["POD_NAME"]}}) + "\\n")
for step in range(done, {STEPS}):
    while step == {HELD_AT} and (folder / "hold").exists():
        time.sleep(0.1)
        if rank == "0" and word.exists():
            print(word.read_text(), flush=True)
            word.unlink()
    time.sleep(0.1)
    temporary = own.with_suffix(".new")
    temporary.write_text(str(step + 1))
    temporary.replace(own)
"""


class Job:
    """A job of a script that counts its steps, and resumes where its rank's file says."""

    def __init__(self, cluster: Cluster, kubelet: Kubelet, folder: Path) -> None:
        self.cluster = cluster
        self.kubelet = kubelet
        self.folder = folder / "steps"
        self.folder.mkdir()
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)

    def submit(self, replicas: int, spares: dict[str, Any] | None = None, **container: Any) -> None:
        command = ["dlrover-run", f"--nnodes={replicas}", str(self.script), str(self.folder)]
        main = {"name": "main", "image": "training:1", "command": command, **container}
        worker = {"replicas": replicas, "template": {"spec": {"containers": [main]}}}
        manifest = {
            "apiVersion": names.API_VERSION,
            "kind": "ElasticJob",
            "metadata": {"name": "digits"},
            "spec": {"replicaSpecs": {"worker": worker}, "spares": spares or {}},
        }
        self.cluster.create(manifest)

    def starts(self) -> list[dict[str, Any]]:
        path = self.folder / "starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self) -> int:
        """Steps that the slowest rank has done; 0 until each has done one."""
        done = [int(path.read_text()) for path in self.folder.glob("rank-?")]
        starts = self.starts()
        return min(done) if starts and len(done) >= int(starts[-1]["world"]) else 0

    def workers(self) -> list[str]:
        """The workers' pods that run."""
        return sorted(
            pod["metadata"]["name"]
            for pod in self.cluster.list("pods")
            if "-edljob-" in pod["metadata"]["name"]
            and pod["status"]["phase"] == "Running"
            and not pod["metadata"].get("deletionTimestamp")
        )

    def delete(self, pod: str) -> None:
        self.cluster.plane.call("DELETE", self.cluster.path("pods", pod))

    def log(self) -> str:
        """What everybody wrote."""
        said = [f"==> {name}\n{self.kubelet.log(name)}" for name in sorted(self.kubelet.pods)]
        logs = sorted(self.kubelet.folder.rglob("master.log"))
        said += [f"==> {path}\n{path.read_text()[-6000:]}" for path in logs]
        return "\n".join([*said, json.dumps(self.cluster.status, indent=1)])

    async def until(self, condition: Callable[[], bool], timeout: float = 90.0) -> None:
        late = time.monotonic() + timeout
        while not await asyncio.to_thread(condition):
            ended = self.cluster.status.get("phase") in ("Failed", "Rejected")
            if ended or time.monotonic() > late:
                pytest.fail(self.log())
            await asyncio.sleep(0.1)

    async def succeeds(self) -> dict[str, Any]:
        """Wait for the job's success; how far its training is."""
        await self.until(lambda: self.cluster.status.get("phase") == "Succeeded")
        assert self.steps() == STEPS
        training: dict[str, Any] = self.cluster.status["training"]
        assert "goodput" not in training, "the script makes no step that counts"
        return training


@pytest.fixture
def job(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, kubelet: Callable[..., Kubelet]
) -> Job:
    cluster = Cluster(control_plane, namespace, tmp_path)
    return Job(cluster, kubelet(nodes=2), tmp_path)


def test_a_job_outlives_the_loss_of_a_worker(job: Job) -> None:
    async def story() -> None:
        async with job.cluster.operator():
            job.submit(2)
            await job.until(lambda: job.steps() > 5)
            victim = job.workers()[0]
            job.delete(victim)
            training = await job.succeeds()
            assert training["restarts"] == 1
        assert victim not in job.workers()
        pods = {start["pod"] for start in job.starts()}
        assert len(pods) == 3, "one worker was replaced"
        assert {start["world"] for start in job.starts()} == {"2"}

    asyncio.run(story())


@contextlib.contextmanager
def dashboard(job: Job, *options: str) -> Iterator[Browser]:
    """A browser with the dashboard of the job's namespace."""
    cluster, log = job.cluster, job.folder / "dashboard"
    kubeconfig = ["--kubeconfig", str(cluster.plane.kubeconfig)]
    command = [sys.executable, "-m", "dlrover.cli.main", "dashboard", "--port", "0", *kubeconfig]
    env = {"DLROVER_STATE_DIR": str(job.folder / "state"), "DLROVER_BRAIN_TOKEN": processes.TOKEN}
    with (
        chromium() as browser,
        log.open("wb") as out,
        subprocess.Popen(
            [*command, "--kubernetes", cluster.namespace, *options],
            stdout=out,
            stderr=out,
            env=os.environ | env,
        ) as server,
    ):
        try:
            browser.open(until(lambda: re.search(r"http://\S+token=\S+", log.read_text()), 60)[0])
            yield browser
            assert [c for c in browser.complaints() if "ERR_" not in c] == []
        finally:
            server.terminate()


def shows(browser: Browser, place: str, text: str, timeout: float = 60.0) -> None:
    """Wait for a text in the page's first element of that kind."""
    wanted = json.dumps(text)
    browser.until(
        f"document.querySelector('{place}')?.innerText.includes({wanted})", timeout=timeout
    )


def opens(browser: Browser, name: str) -> None:
    """The page of a job of the list is live, and its buttons act."""
    browser.until(f"[...document.querySelectorAll('.main-cell a')].some(a => a.text === '{name}')")
    row = browser.run("return document.querySelector('tr.open').innerText")
    assert "2 workers" in row
    assert "ago" in row or "just now" in row
    browser.click(name)
    browser.until("document.querySelectorAll('#nodes tbody tr').length >= 2", timeout=60)
    shows(browser, "#events", "Round 1 is complete")
    browser.click("Stacks")
    shows(browser, "dialog[open] pre", "train.py")
    browser.click("Close")
    browser.click("master.log")
    shows(browser, ".tail", "Round 1 is complete")
    browser.click("Scale …")
    browser.run("document.getElementById('wanted').value = '0'")
    browser.click("Scale")
    browser.until("document.querySelector('#say').innerText.includes('asks for 0 workers')")


def has_logs(browser: Browser, job: Job) -> None:
    """Each worker's output is on the page, and its agent's log; what is hostile in it is text."""
    pod = next(start["pod"] for start in job.starts() if start["rank"] == "0")
    choose = "openLog(arguments[0])"
    browser.run(choose, f"pods/{pod}/agent-{pod.rpartition('-')[2]}.log")
    shows(browser, ".tail", "dlrover.agent")
    browser.run(choose, f"pods/{pod}")
    shows(browser, ".tail", "xxx\n<b>bold</b> \ufffdred")
    shows(browser, ".log-head", "the end of the file")
    (job.folder / "word").write_text("a word for rank 0")
    shows(browser, ".tail", "red\na word for rank 0")
    browser.run(
        "const f = document.querySelector('.log input'); f.value = 'word for'; f.oninput({target: f})"
    )
    browser.until("document.querySelector('.tail').innerText.trim() === 'a word for rank 0'")
    browser.run(choose, "pods/nosuch")
    shows(browser, ".card .warning", "nosuch is gone, and its log with it: choose another log")


async def remembers(client: BrainClient, uid: str) -> None:
    """The Brain has a job that was made from the ElasticJob."""
    origin = brain_jobs.register("digits-0", name="digits", origin=uid)
    await client.report(origin)
    await client.report(brain_jobs.samples("digits-0", brain_jobs.shape(1), throughput=55.0))
    await client.plan("digits-0", brain_jobs.shape(1))
    await client.report(brain_jobs.end("digits-0", outcome=OUTCOME))


def tells_the_end(browser: Browser, job: Job) -> None:
    """The page of an ended job has what the cluster still knows, and the logs that are there."""
    shows(browser, ".banner.good", "All workers succeeded.")
    shows(browser, ".banner:not(.good)", "its journal went with its pod")
    shows(browser, ".overview", "87.5 %")
    shows(browser, ".overview", "2 workers")
    shows(browser, "#incidents", "rank 1 was killed")
    shows(browser, "#plans", "1 → 2")
    assert not browser.run("return document.querySelector('button.danger')")
    browser.run("openLog(arguments[0])", f"pods/{job.starts()[0]['pod']}")
    shows(browser, ".tail", "<b>bold</b>")
    shows(browser, ".log-head", "The pod has succeeded: this is the end of its log.")
    browser.run("location.hash = '#/'")
    shows(browser, "section[aria-label^=Kubernetes] tr.open", "succeeded")
    browser.click("digits-0")
    shows(browser, ".banner:not(.good)", "what the Brain's history has of the job")
    shows(browser, "#plans", "1 → 2")


OUTCOME = Outcome(
    exit_code=0,
    reason="All workers succeeded.",
    goodput=Goodput(
        goodput_ratio=0.875,
        wall_seconds=80.0,
        job_seconds=40.0,
        nodes=2,
        seconds={"productive": 70.0, "recomputed_steps": 10.0},
        incidents=(
            IncidentCost(
                since=1.7e9,
                until=1.7e9 + 10,
                over=True,
                title="rank 1 was killed by SIGKILL",
                node=1,
                round=1,
                seconds={"recomputed_steps": 10.0},
                steps_lost=2,
            ),
        ),
    ),
)


def test_a_job_outlives_the_loss_of_its_master(job: Job) -> None:
    """The dashboard shows its page all the time: it comes from the master's pod, whichever that is.

    After the end it comes from the ElasticJob, the pods that are left, and the Brain.
    """
    master = names.master_name("digits")
    (job.folder / "hold").touch()

    async def story(browser: Browser, address: str) -> None:
        async with job.cluster.operator():
            job.submit(2)
            await job.until(lambda: job.steps() > 5)
            before = job.workers()
            await asyncio.to_thread(opens, browser, f"{job.cluster.namespace}/digits")
            await asyncio.to_thread(has_logs, browser, job)
            async with BrainClient(address, processes.TOKEN) as client:
                uid = job.cluster.get("elasticjobs", "digits")["metadata"]["uid"]
                await remembers(client, uid)
            inside = job.kubelet.pods[master].containers[0].beside
            browser.run("location.hash = '#/'")
            await job.until(lambda: all(one.poll() is not None for one in inside))
            browser.run("history.back()")
            own = PodJob(job.cluster.kubeconfig, job.cluster.namespace, "digits")
            with pytest.raises(ConfigurationError, match="pods/exec"):
                await own.act(StacksAction())  # the operator may not do that
            with pytest.raises(ConfigurationError, match="right to get pods/log"):
                await anext(own.log(f"pods/{before[0]}"))
            other = PodJob(job.cluster.kubeconfig, job.cluster.namespace, "other")
            with pytest.raises(ConfigurationError, match="is none of job other"):
                await anext(other.log(f"pods/{before[0]}"))
            # A wrong number in the manifest is not the next master's either.
            await job.until(lambda: job.cluster.told.get("Rejected") == 1)
            job.delete(master)
            back = "document.querySelector('#events')?.innerText.includes('The master is back')"
            await asyncio.to_thread(
                browser.until, f"{back} && document.querySelector('.danger')", timeout=60
            )
            (job.folder / "hold").unlink()
            await job.succeeds()
            ended = "document.querySelector('.banner')?.innerText"
            await asyncio.to_thread(browser.until, f"{ended} && !document.querySelector('.danger')")
            browser.run("location.reload()")
            await asyncio.to_thread(tells_the_end, browser, job)
        assert {start["pod"] for start in job.starts()} == set(before), "no worker noticed"
        assert len(job.starts()) == 2

    with (
        processes.brain(f"sqlite:///{job.folder.parent}/brain.db") as brain,
        dashboard(job, "--brain", brain.address) as browser,
    ):
        asyncio.run(story(browser, brain.address))


def test_a_worker_that_ran_out_of_memory_comes_back_with_more(job: Job) -> None:
    async def story() -> None:
        async with job.cluster.operator():
            job.submit(2, resources={"requests": {"memory": "1Gi"}, "limits": {"memory": "1Gi"}})
            await job.until(lambda: job.steps() > 5)
            job.kubelet.kill("digits-edljob-worker-0", "OOMKilled")
            await job.until(lambda: "digits-edljob-worker-2" in job.workers())
            new = job.cluster.get("pods", "digits-edljob-worker-2")
            assert new["spec"]["containers"][0]["resources"]["limits"]["memory"] == "2Gi"
            other = job.cluster.get("pods", "digits-edljob-worker-1")
            assert other["spec"]["containers"][0]["resources"]["limits"]["memory"] == "1Gi"
            await job.succeeds()

    asyncio.run(story())


@pytest.mark.parametrize(
    "seed",
    [0, 1, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(2, 10))],
)
def test_a_job_outlives_whatever_is_deleted(job: Job, seed: int) -> None:
    """A worker, two workers, the master, the operator: in random order, at random moments."""
    chance = random.Random(seed)

    async def strike(victim: str, operator: contextlib.AsyncExitStack) -> None:
        if victim == "operator":
            await operator.aclose()
            await asyncio.sleep(chance.uniform(0.0, 2.0))
            await operator.enter_async_context(job.cluster.operator())
        elif victim == "master":
            job.delete(names.master_name("digits"))
        else:
            for pod in job.workers()[: 1 if victim == "worker" else 2]:
                job.delete(pod)

    async def story() -> None:
        async with contextlib.AsyncExitStack() as operator:
            await operator.enter_async_context(job.cluster.operator())
            job.submit(2)
            await job.until(lambda: job.steps() > 3)
            for victim in chance.sample(["worker", "workers", "master", "operator"], 4):
                await strike(victim, operator)
                await asyncio.sleep(chance.uniform(0.0, 3.0))
            await job.succeeds()
        assert {start["world"] for start in job.starts()} == {"2"}

    asyncio.run(story())


DIGITS = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata:
  name: digits
  labels: {some-label: some-value}
spec:
  distributionStrategy: AllreduceStrategy
  optimizeMode: cluster
  replicaSpecs:
    worker:
      replicas: 5
      template:
        spec:
          restartPolicy: Always
          containers:
            - name: main
              image: dlrover:pytorch-example
              imagePullPolicy: Always
              command:
                - /bin/bash
                - -c
                - "dlrover-run --network-check --nnodes=1:10 --nproc_per_node=1 --max_restarts=10
                  PROGRAM --out OUT --step-time 0.05"
              resources:
                limits: {cpu: 2, memory: 3Gi}
                requests: {cpu: 2, memory: 3Gi}
"""


@pytest.mark.torch
@pytest.mark.timeout(480)
@pytest.mark.heavy
def test_the_digits_example_trains_on_five_pods_one_of_which_is_deleted(job: Job) -> None:
    """A manifest of the original's, but for the program."""
    out = job.folder / "out"
    program = Path(__file__).parents[2] / "examples" / "01_digits_ddp" / "train.py"
    text = DIGITS.replace("PROGRAM", str(program)).replace("OUT", str(out))

    def steps() -> int:
        path = out / "losses.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    async def story() -> None:
        async with job.cluster.operator():
            job.cluster.create(yaml.safe_load(text))
            await job.until(lambda: steps() >= 30, timeout=200)
            job.delete(job.workers()[2])
            await job.until(lambda: job.cluster.status.get("phase") == "Succeeded", timeout=240)
        assert job.cluster.status["training"]["restarts"] >= 1

    asyncio.run(story())


@pytest.mark.parametrize(
    ("container", "said"),
    [
        (
            {"volumeMounts": [{"name": "nowhere", "mountPath": "/data"}]},
            'its pod was refused: Pod "digits-edljob-worker-0" is invalid: spec.containers[0].volumeMounts[0]'
            '.name: Not found: "nowhere"',
        ),
        ({"command": ["dlrover-run", "nosuch.py"]}, "training script nosuch.py does not exist"),
    ],
    ids=["template", "script"],
)
def test_what_cannot_pass_ends_the_job_with_its_first_master(
    job: Job, container: dict[str, Any], said: str
) -> None:
    async def story() -> None:
        async with job.cluster.operator():
            job.submit(1, **container)
            await job.cluster.until(lambda: job.cluster.status.get("phase") == "Failed", 60.0)
        status = job.cluster.status
        (failed,) = [c for c in status["conditions"] if c["type"] == "Failed"]
        assert failed["reason"] == "Usage"
        assert said in failed["message"]
        assert status["master"]["starts"] == 1

    asyncio.run(story())


def test_a_quota_on_the_nodes_is_told_with_the_job(job: Job) -> None:
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "2"}}}
    path = job.cluster.path("resourcequotas")
    job.cluster.plane.call("POST", path, quota)

    def message() -> str:
        return str(job.cluster.status.get("message", ""))

    async def story() -> None:
        async with job.cluster.operator():
            job.submit(2)
            await job.until(lambda: "exceeded quota: small" in message())
            assert message().startswith("Pod digits-edljob-worker-")
            await job.until(
                lambda: any(
                    event["reason"] == "PodNotCreated" and "exceeded quota" in event["message"]
                    for event in job.cluster.list("events")
                )
            )
            assert "exceeded quota: small" in job.kubelet.log(names.master_name("digits"))
            job.cluster.plane.call("DELETE", f"{path}/small")
            await job.succeeds()
        assert "waits" not in job.cluster.status["training"]

    asyncio.run(story())
