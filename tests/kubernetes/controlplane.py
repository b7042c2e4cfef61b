"""A real control plane: etcd, API server with RBAC, controller manager and scheduler, on free ports."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.services import free_port

ADMIN = "admin-token"
START_TIMEOUT = 60.0
"""Seconds."""
CONTROLLERS = "*,-nodeipam,-route,-cloud-node-lifecycle,-service,-attachdetach,-ttl"


class ControlPlane:
    """Ends with the process that started it, however that one ends."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self.directory = directory
        self.kubeconfig = directory / "kubeconfig"
        self.knows_jobs = False
        """Whether the definitions of this release are installed."""
        self._programs = programs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # A process ends with the thread that started it: one thread starts them all.
        self._starter = ThreadPoolExecutor(max_workers=1)
        self._etcd_port, self._peer_port, self.port = (free_port() for _ in range(3))
        self._connections = Connections(self.port)

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def etcd(self) -> str:
        return f"http://127.0.0.1:{self._etcd_port}"

    def start(self) -> None:
        directory = self.directory
        (directory / "certificates").mkdir(parents=True)
        key = directory / "service-accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (directory / "tokens.csv").write_text(f"{ADMIN},admin,admin,system:masters\n")
        self._start_etcd()
        self.start_api_server()
        self.write_kubeconfig(self.kubeconfig)
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={key}",
            f"--root-ca-file={directory}/certificates/apiserver.crt",
            "--use-service-account-credentials=false",
            f"--controllers={CONTROLLERS}",
            "--kube-api-qps=1000",  # it gives each account its token, before which no pod is admitted
            "--kube-api-burst=1000",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=8s",
            *_quiet(),
        )
        self._start("kube-scheduler", f"--kubeconfig={self.kubeconfig}", *_quiet())
        self.wait_for_account("default")

    def stop(self) -> None:
        for name in reversed(list(self._processes)):
            self.kill(name)
        self._starter.shutdown()
        self._connections.close()

    def rest(self) -> None:
        """Stop computing until `wake`: idle it takes four hundredths of a core."""
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Go on after `rest`; without one nothing happens."""
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
        self._wait_for(lambda: self.call("GET", "/readyz", plain=True))

    @contextlib.contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Stop one of the processes meanwhile."""
        process = self._processes[name]
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def start_api_server(self) -> None:
        directory = self.directory
        key = directory / "service-accounts.key"
        self._start(
            "kube-apiserver",
            f"--etcd-servers={self.etcd}",
            f"--cert-dir={directory}/certificates",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            f"--service-cluster-ip-range=127.{64 + self.port % 64}.0.0/16",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=RBAC",
            f"--token-auth-file={directory}/tokens.csv",
            "--endpoint-reconciler-type=none",
            "--default-not-ready-toleration-seconds=2",
            "--default-unreachable-toleration-seconds=2",
        )
        self._wait_for(lambda: self.call("GET", "/readyz", plain=True))

    def restart_api_server(self) -> None:
        self.kill("kube-apiserver")
        self.start_api_server()

    def compact(self) -> None:
        """Forget all history in etcd: who watches from an older version gets 410 Gone."""
        base = f"{self.etcd}/v3/kv"
        newest = _post(f"{base}/range", {"key": "AA=="})["header"]["revision"]
        _post(f"{base}/compaction", {"revision": newest, "physical": True})

    def write_kubeconfig(self, path: Path, port: int = 0, token: str = ADMIN) -> Path:
        """A kubeconfig for the server, or for a proxy in front of it at ``port``."""
        cluster = {
            "server": f"https://127.0.0.1:{port or self.port}",
            "insecure-skip-tls-verify": True,
        }
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
        }
        path.write_text(json.dumps(content))
        return path

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, plain: bool = False
    ) -> Any:
        """One call as the administrator; for the fixtures, which are not to rest on what they test."""
        content = self._connections.call(method, path, body)
        return content if plain else json.loads(content)

    def make(self, manifest: dict[str, Any], namespace: str) -> Any:
        """Create an object, in a tenth of the time that kubectl takes."""
        version, plural = manifest["apiVersion"], f"{manifest['kind'].lower()}s"
        base = f"/api/{version}" if version == "v1" else f"/apis/{version}"
        return self.call("POST", f"{base}/namespaces/{namespace}/{plural}", manifest)

    def kubectl(self, *arguments: str, namespace: str = "default", text: str = "") -> str:
        """Run kubectl; its output. Raises `subprocess.CalledProcessError` if it fails."""
        command = [self._programs / "kubectl", f"--kubeconfig={self.kubeconfig}", "-n", namespace]
        done = subprocess.run(
            [*command, *arguments], input=text, text=True, check=True, capture_output=True
        )
        return done.stdout

    def wait_for_account(self, namespace: str, name: str = "default") -> None:
        """Wait for a service account and its token: without them no pod of it is admitted."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}"

        def probe() -> None:
            if not self.call("GET", path).get("secrets"):
                raise OSError("it has no token yet")

        self._wait_for(probe)

    def logs(self) -> str:
        """The ends of all logs."""
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"==> {path.name}\n{path.read_text()[-1500:]}" for path in logs)

    def _start_etcd(self) -> None:
        peer = f"http://127.0.0.1:{self._peer_port}"
        self._start(
            "etcd",
            f"--data-dir={self.directory}/etcd",
            f"--listen-client-urls={self.etcd}",
            f"--advertise-client-urls={self.etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )

    def _start(self, name: str, *arguments: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            started = self._starter.submit(
                subprocess.Popen,
                ["setpriv", "--pdeathsig", "KILL", self._programs / name, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
            )
            self._processes[name] = started.result()

    def _wait_for(self, probe: Any) -> None:
        until = time.monotonic() + START_TIMEOUT
        while True:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended:\n{self.logs()}")
            try:
                probe()
            except OSError as error:  # connection refused, or an error answer
                if time.monotonic() > until:
                    raise RuntimeError(
                        f"The control plane does not come up:\n{self.logs()}"
                    ) from error
                time.sleep(0.1)
            else:
                return


def available() -> str:
    """Why no control plane can run here, or nothing."""
    missing = [name for name in ("setpriv", "openssl") if shutil.which(name) is None]
    return f"{' and '.join(missing)} missing" if missing else ""


class Connections:
    """Connections to a server that calls of any thread share: most of a short call is its TLS handshake."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._context = ssl._create_unverified_context()
        self._idle: list[http.client.HTTPSConnection] = []

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """One call as the administrator; raises `urllib.error.HTTPError` for an answer that is an error."""
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was quicker
                one = self._idle.pop()
                try:
                    return self._ask(one, method, path, body)
                except (ConnectionError, ssl.SSLError):  # the server closed it in the meantime
                    continue
        return self._ask(
            http.client.HTTPSConnection("127.0.0.1", self._port, timeout=10, context=self._context),
            method,
            path,
            body,
        )

    def _ask(
        self,
        connection: http.client.HTTPSConnection,
        method: str,
        path: str,
        body: dict[str, Any] | None,
    ) -> bytes:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        if body is not None:
            kind = "merge-patch+json" if method == "PATCH" else "json"
            headers["Content-Type"] = f"application/{kind}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read()
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        if answer.status >= 400:
            url = f"https://127.0.0.1:{self._port}{path}"
            raise urllib.error.HTTPError(
                url, answer.status, answer.reason, answer.headers, io.BytesIO(content)
            )
        return content

    def close(self) -> None:
        """Close those that are idle."""
        while self._idle:
            self._idle.pop().close()


def _quiet() -> list[str]:
    return ["--leader-elect=false", "--port=0", "--secure-port=0"]


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, data=json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read())
