"""The API server's address and the credentials for it, from the pod's service account or a kubeconfig."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import json
import math
import ssl
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dlrover import config
from dlrover.errors import ConfigurationError, InfrastructureError, kind_of

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Directory in a pod with the service account's token, the server's CA certificate and the namespace."""
TOKEN_LIFE = 60.0
"""Seconds before a token file is read again, because the kubelet renews it."""
PLUGIN_TIMEOUT = 60.0
"""Seconds allowed for a kubeconfig's credential plugin."""


class Token:
    """A constant bearer token; if empty, requests carry no token."""

    def __init__(self, value: str) -> None:
        self._value = value

    def current(self) -> str | None:
        """Return the token if it is known without blocking."""
        return self._value

    def renew(self) -> str:
        """Read the token again; may block."""
        return self._value


class FileToken(Token):
    """A token in a file that another process keeps fresh."""

    def __init__(self, path: Path) -> None:
        super().__init__("")
        self._path = path
        self._until = 0.0

    def current(self) -> str | None:
        """Return the token if it was read recently."""
        return self._value if time.monotonic() < self._until else None

    def renew(self) -> str:
        """Read the file."""
        try:
            self._value = self._path.read_text().strip()
        except OSError as error:
            raise InfrastructureError(
                f"The token {self._path} cannot be read: {error.strerror}."
            ) from error
        self._until = time.monotonic() + TOKEN_LIFE
        return self._value


class PluginToken(Token):
    """A token from a credential plugin (``exec`` in a kubeconfig)."""

    def __init__(self, plugin: Mapping[str, Any], where: str) -> None:
        super().__init__("")
        self._plugin = plugin
        self._where = where
        self._until = 0.0

    def current(self) -> str | None:
        """Return the token until it expires."""
        return self._value if time.time() < self._until else None

    def renew(self) -> str:
        """Run the plugin."""
        plugin = self._plugin
        env = config.environ() | {v["name"]: v["value"] for v in plugin.get("env") or ()}
        asked: dict[str, Any] = {
            "apiVersion": plugin.get("apiVersion"),
            "kind": "ExecCredential",
            "spec": {},
        }
        env["KUBERNETES_EXEC_INFO"] = json.dumps(asked)
        command = [plugin.get("command", ""), *(plugin.get("args") or ())]
        try:
            answer = subprocess.run(
                command, env=env, check=True, stdout=subprocess.PIPE, timeout=PLUGIN_TIMEOUT
            )
            status = json.loads(answer.stdout)["status"]
            expires = status.get("expirationTimestamp")
            until = _seconds(expires) if expires else math.inf
            self._value = status["token"]
        except (
            OSError,
            subprocess.SubprocessError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise InfrastructureError(
                f"{self._where}: the credential plugin {command[0]} gave no token: {error}."
            ) from error
        self._until = until
        return self._value


class Access:
    """An API server and the credentials for it."""

    def __init__(self, server: str, namespace: str, tls: ssl.SSLContext, token: Token) -> None:
        self.server = server.rstrip("/")
        self.namespace = namespace
        """The default namespace."""
        self.tls = tls
        self.token = token


def find_access(kubeconfig: str = "") -> Access:
    """Return the access from ``kubeconfig``, else from the pod, ``KUBECONFIG``, or the user's kubeconfig.

    Raises:
        ConfigurationError: there is none, or the file cannot be used.
    """
    env = config.environ()
    if not kubeconfig and env.get("KUBERNETES_SERVICE_HOST") and not env.get("KUBECONFIG"):
        return _in_cluster(env)
    path = kubeconfig or env.get("KUBECONFIG", "").split(":")[0]
    if not path:
        path = str(Path(env.get("HOME", "/root")) / ".kube" / "config")
    return _from_kubeconfig(Path(path))


def _in_cluster(env: Mapping[str, str]) -> Access:
    folder = SERVICE_ACCOUNT
    host, port = env["KUBERNETES_SERVICE_HOST"], env.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    try:
        tls = _trusting((folder / "ca.crt").read_text())
        namespace = (folder / "namespace").read_text().strip()
    except OSError as error:
        raise kind_of(error)(
            f"{folder} has no service account: {error}; the pod needs automountServiceAccountToken."
        ) from error
    return Access(f"https://{host}:{port}", namespace, tls, FileToken(folder / "token"))


def _from_kubeconfig(path: Path) -> Access:
    try:
        content = yaml.safe_load(path.read_text())
        context = _named(content, "context", content.get("current-context") or "")
        cluster = _named(content, "cluster", context["cluster"])
        user = _named(content, "user", context["user"]) if context.get("user") else {}
        server = cluster["server"]
        _refuse_unsupported(cluster, user)
        tls = _tls(cluster, user, path.parent)
    except (ssl.SSLError, yaml.YAMLError, KeyError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"The kubeconfig {path} cannot be used: {_said(error)}."
        ) from error
    except OSError as error:
        raise kind_of(error)(
            f"The kubeconfig {path} cannot be read: {error.strerror}; --kubeconfig or KUBECONFIG "
            "names another one."
        ) from error
    return Access(server, context.get("namespace") or "default", tls, _token(user, path))


def _refuse_unsupported(cluster: Mapping[str, Any], user: Mapping[str, Any]) -> None:
    for section in (cluster, user):
        for key in ("proxy-url", "tls-server-name", "auth-provider", "username"):
            if section.get(key):
                raise ValueError(
                    f"it sets {key}, which is not supported; accepted are token, tokenFile, exec and client-certificate"
                )


def _trusting(authority: str) -> ssl.SSLContext:
    """Return a TLS context that trusts a cluster's authority, or the system's if ``authority`` is empty."""
    tls = ssl.create_default_context(cadata=authority or None)
    # Python 3.13 and newer reject many clusters' certificates, which lack some extensions.
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return tls


def _named(content: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    for entry in content.get(f"{kind}s") or ():
        if entry["name"] == name:
            found: dict[str, Any] = entry[kind] or {}
            return found
    raise ValueError(f"it has no {kind} {name!r}")


def _token(user: Mapping[str, Any], path: Path) -> Token:
    if user.get("tokenFile"):
        return FileToken(path.parent / user["tokenFile"])
    if user.get("exec"):
        return PluginToken(user["exec"], f"The kubeconfig {path}")
    return Token(user.get("token") or "")


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    authority = _pem(cluster, "certificate-authority", folder)
    tls = _trusting(authority.decode())
    if cluster.get("insecure-skip-tls-verify"):
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    certificate, key = _pem(user, "client-certificate", folder), _pem(user, "client-key", folder)
    if certificate and key:  # ssl loads a certificate only from a file
        with tempfile.NamedTemporaryFile() as file:
            file.write(certificate + b"\n" + key)
            file.flush()
            tls.load_cert_chain(file.name)
    return tls


def _pem(section: Mapping[str, Any], key: str, folder: Path) -> bytes:
    if section.get(f"{key}-data"):
        try:
            return base64.b64decode(section[f"{key}-data"], validate=True)
        except binascii.Error as error:
            raise ValueError(f"{key}-data is not base64") from error
    return (folder / section[key]).read_bytes() if section.get(key) else b""


def _said(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _seconds(timestamp: str) -> float:
    return dt.datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()
