"""What Events say about pods: looked at beside all else, and seldom."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api import notices
from dlrover.kubernetes.api.client import ELASTIC_JOBS, EVENTS, PODS, Resource
from dlrover.kubernetes.operator.operator import Operator
from dlrover.kubernetes.resources import names
from dlrover.kubernetes.resources.types import Manifest
from tests.kubernetes.manifests import job
from tests.kubernetes.memory import MemoryServer, stop, until

WHY = 'MountVolume.SetUp failed for volume "data" : configmap "data" not found'


class Server(MemoryServer):
    """It counts what it is asked about Events, and may not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.refuses = False

    async def list(
        self, resource: Resource, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> tuple[list[Manifest], str]:
        if resource is EVENTS:
            self.asked.append(fields.rpartition(",")[2])
            await self.answers.wait()
            if self.refuses:
                raise InfrastructureError("The Kubernetes API server does not answer.")
        return await super().list(resource, namespace, labels, fields)

    def say(self, pod: Manifest, reason: str, message: str, at: str) -> None:
        about = {"kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        kind = "Warning" if reason.startswith("Failed") else "Normal"
        event = {"reason": reason, "message": message, "type": kind, "lastTimestamp": at}
        named = {"name": f"{about['name']}.{at}", "namespace": "default"}
        self.put(EVENTS, {"metadata": named, "involvedObject": about, **event})

    def prepares(self, name: str) -> Manifest:
        """Let a machine prepare the pod of a job's master; return the pod."""
        pod = names.master_name(name)
        scheduled = {"type": "PodScheduled", "status": "True"}
        self.change(PODS, pod, status={"phase": "Pending", "conditions": [scheduled]})
        return self.there(PODS, pod)

    def status(self, name: str) -> dict[str, Any]:
        return self.there(ELASTIC_JOBS, name).get("status") or {}

    def said(self, name: str) -> str:
        return str(self.status(name).get("message", ""))

    def has(self, name: str) -> bool:
        return PODS.path("default", names.master_name(name)) in self.objects


def submit(server: Server, name: str) -> None:
    manifest = job()
    manifest["metadata"] |= {"name": name, "namespace": "default"}
    server.put(ELASTIC_JOBS, manifest)


def test_jobs_are_handled_while_the_server_does_not_answer_about_events() -> None:
    async def story() -> None:
        server = Server()
        server.answers.clear()
        running = asyncio.create_task(Operator(server, "default", "dlrover:1").run())
        submit(server, "digits")
        await until(lambda: server.has("digits"))
        server.prepares("digits")
        await until(lambda: server.asked)
        await until(lambda: server.said("digits") == "The master is starting.")
        server.remove(PODS, names.master_name("digits"))
        await until(lambda: server.status("digits")["master"]["starts"] == 2)
        await stop(running)

    asyncio.run(story())


@pytest.mark.parametrize("refuses", [False, True])
def test_jobs_of_a_namespace_look_at_its_events_together(refuses: bool) -> None:
    async def story() -> None:
        server = Server()
        server.refuses = refuses
        running = asyncio.create_task(Operator(server, "default", "dlrover:1").run())
        for number in range(10):
            submit(server, f"digits-{number}")
        for number in range(10):
            await until(lambda number=number: server.has(f"digits-{number}"))
            server.prepares(f"digits-{number}")
        await until(
            lambda: all(server.said(f"digits-{n}") == "The master is starting." for n in range(10))
        )
        await stop(running)
        assert server.asked == ["type=Warning"]

    asyncio.run(story())


def test_what_follows_a_warning_is_looked_at_only_if_there_is_one() -> None:
    async def story() -> None:
        server = Server()
        submit(server, "digits")
        named = {"name": names.master_name("digits"), "namespace": "default"}
        pod = server.put(PODS, {"metadata": named})
        uid, background = pod["metadata"]["uid"], set[asyncio.Task[None]]()

        async def seen() -> str:
            looking = notices.Notices(server, "default", background)
            looking.look()
            looking.look()  # not before the first look has ended
            await asyncio.gather(*background)
            looking.look()  # nor just after it
            assert not background
            return looking.known.get(uid, "")

        server.say(pod, "Scheduled", "", "1")
        assert await seen() == ""
        server.say(pod, "FailedMount", WHY, "2")
        assert await seen() == f"FailedMount: {WHY}"
        server.say(pod, "Pulling", "", "3")
        assert await seen() == ""
        assert server.asked == ["type=Warning", *["type=Warning", "reason=Pulling"] * 2]

    asyncio.run(story())
