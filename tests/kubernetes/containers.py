"""The processes of a pod's containers, and the status that follows from them; for the test's kubelet."""

from __future__ import annotations

import datetime as dt
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil


class Container:
    """One container's process."""

    def __init__(self, spec: dict[str, Any], folder: Path) -> None:
        self.spec = spec
        self.name = spec["name"]
        self.folder = folder
        self.restarts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.env: dict[str, str] = {}
        self.beside: list[subprocess.Popen[bytes]] = []
        self.started = ""
        self.ended: dict[str, Any] | None = None
        self.last: dict[str, Any] | None = None
        self.reason = ""

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}-{self.restarts}.log"

    def start(self, command: list[str], env: dict[str, str]) -> None:
        self.started, self.ended, self.env = now(), None, env
        with self.log.open("wb") as log:
            try:
                self.process = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *command],
                    env=env,
                    cwd=self.spec.get("workingDir") or self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                log.write(f"{error}\n".encode())
                self.ended = self._terminated(127, "StartError")

    def execute(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Run another command beside the first one, with which it ends."""
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=self.env,
            cwd=self.spec.get("workingDir") or self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.beside.append(process)
        return process

    def poll(self) -> None:
        if self.ended is None and self.process is not None and self.process.poll() is not None:
            code = self.process.returncode
            exit_code = 128 - code if code < 0 else code
            self.ended = self._terminated(exit_code, "Completed" if code == 0 else "Error")
            for process in self.beside:
                process.kill()

    def signal(self, number: int) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        if number == signal.SIGKILL:  # a container's end is the end of all of its processes
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.send_signal(number)

    def close(self) -> None:
        """Kill what runs, and wait for its end."""
        self.signal(signal.SIGKILL)
        for process in (self.process, *self.beside):
            if process is not None:
                process.kill()
                process.wait()

    def _terminated(self, code: int, reason: str) -> dict[str, Any]:
        message = ""
        if code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            message = self.log.read_text(errors="replace")[-2000:]
        return {
            "exitCode": code,
            "reason": self.reason or reason,
            "message": message,
            "startedAt": self.started,
            "finishedAt": now(),
        }

    def status(self) -> dict[str, Any]:
        state = (
            {"terminated": self.ended} if self.ended else {"running": {"startedAt": self.started}}
        )
        return {
            "name": self.name,
            "image": self.spec.get("image", ""),
            "imageID": "",
            "ready": self.ended is None,
            "restartCount": self.restarts,
            "state": state,
            "lastState": {"terminated": self.last} if self.last else {},
        }


class Pod:
    """One pod: its containers, and what was last said about it."""

    def __init__(self, obj: dict[str, Any], folder: Path, address: str) -> None:
        self.obj = obj
        self.uid = obj["metadata"]["uid"]
        self.name = obj["metadata"]["name"]
        self.folder = folder
        self.address = address
        self.started = now()
        self.containers = [Container(spec, folder) for spec in obj["spec"]["containers"]]
        self.said: Any = None
        self.failed = ""
        """The kubelet's own reason for its end, as ``Evicted``."""
        self.deadline: float | None = None
        """When what still runs is killed; None: it is not being ended."""

    @property
    def phase(self) -> str:
        if self.failed:
            return "Failed"
        ends = [container.ended for container in self.containers]
        if None in ends or self._restarts(ends):
            return "Running"
        return "Failed" if any(end["exitCode"] for end in ends) else "Succeeded"

    def _restarts(self, ends: list[Any]) -> bool:
        policy = self.obj["spec"]["restartPolicy"]
        failed = any(end["exitCode"] for end in ends if end)
        return self.deadline is None and (policy == "Always" or (policy == "OnFailure" and failed))

    def to_restart(self, container: Container) -> bool:
        return container.ended is not None and not self.failed and self._restarts([container.ended])

    @property
    def running(self) -> bool:
        return any(container.ended is None for container in self.containers)

    def close(self) -> None:
        for container in self.containers:
            container.close()

    def status(self) -> dict[str, Any]:
        phase = self.phase
        ready = "True" if phase == "Running" and self.running else "False"
        kinds = {
            "PodScheduled": "True",
            "Initialized": "True",
            "ContainersReady": ready,
            "Ready": ready,
        }
        return {
            "phase": phase,
            "reason": self.failed or None,
            "message": f"The test's kubelet: {self.failed}" if self.failed else None,
            "hostIP": "127.0.0.1",
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self.started,
            "conditions": [
                {"type": kind, "status": value, "lastTransitionTime": self.started}
                for kind, value in kinds.items()
            ],
            "containerStatuses": [container.status() for container in self.containers],
        }


def now() -> str:
    return dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro() -> str:
    return dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
