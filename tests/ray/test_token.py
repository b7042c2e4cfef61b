"""A cluster that asks for a token or has another version of Ray, as a server that does no more stands for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from dlrover.errors import ConfigurationError
from dlrover.ray import cluster
from dlrover.ray.machine import words

TOKEN = "a-token-of-tests"
VARIABLES = (
    "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_K8S_TOKEN_AUTH", "RAY_USE_TLS",
)  # fmt: skip
REMEDY = "; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the cluster's token or RAY_AUTH_TOKEN_PATH to a file with it."


VERSION = "7.7.7"


class Alive(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers as a cluster of version 7.7.7."""

    def service(self, details: grpc.HandlerCallDetails) -> object:
        return grpc.unary_unary_rpc_method_handler(lambda *_: b"\n\x00\x12\x057.7.7 \x01")


class Guard(grpc.ServerInterceptor):  # type: ignore[misc]
    """Lets requests with the token through."""

    def intercept_service(
        self, go_on: Callable[..., object], details: grpc.HandlerCallDetails
    ) -> object:
        if ("authorization", f"Bearer {TOKEN}") in details.invocation_metadata:
            return go_on(details)
        return grpc.unary_unary_rpc_method_handler(
            lambda _, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        )


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(cluster, "_version", lambda: VERSION)
    server = grpc.server(ThreadPoolExecutor(1), handlers=(Alive(),), interceptors=(Guard(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({}, "the cluster asks for a Ray token, and this environment has none"),
        ({"RAY_AUTH_TOKEN_PATH": "/no/file"}, "the cluster asks for a Ray token, and this environment has none"),
        ({"RAY_AUTH_TOKEN": "wrong"}, "the cluster refuses the Ray token of this environment"),
        (
            {"RAY_AUTH_TOKEN": TOKEN, "RAY_AUTH_MODE": "disabled"},
            "the cluster asks for a Ray token, and RAY_AUTH_MODE is disabled here",
        ),
    ],
)  # fmt: skip
def test_a_missing_or_wrong_token_is_said_before_ray_is_asked(
    address: str, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], why: str, scheme: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        cluster.check_port(f"{scheme}{address}")
    assert str(caught.value) == f"--ray-address {scheme}{address}: {why}{REMEDY}"


def test_a_token_is_found_where_ray_finds_it(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / ".ray" / "auth_token"
    home.parent.mkdir()
    home.write_text(f"{TOKEN}\n")
    cluster.check_port(address)
    home.write_text("wrong")
    other = tmp_path / "token"
    other.write_text(TOKEN)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
    cluster.check_port(address)
    other.write_text("wrong")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    cluster.check_port(address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    monkeypatch.setenv("RAY_ENABLE_K8S_TOKEN_AUTH", "true")  # Kubernetes has the token
    cluster.check_port(address)


@pytest.mark.parametrize("token", ["caf\xe9", "two\nlines"])
def test_a_malformed_token_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with pytest.raises(
        ConfigurationError, match="is malformed: it must be one line of printable ASCII"
    ):
        cluster.check_port(address)


def test_a_token_is_sent_to_no_cluster_with_tls_unencrypted(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    monkeypatch.setenv("RAY_USE_TLS", "1")
    cluster.check_port(address)  # it does not ask


def test_another_version_of_ray_is_said_before_ray_is_asked(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setattr(cluster, "_version", lambda: "7.7.6")
    with pytest.raises(ConfigurationError) as caught:
        cluster.check_port(address)
    assert str(caught.value) == (
        f"--ray-address {address}: the cluster runs Ray 7.7.7 and this environment has Ray 7.7.6; both must be the same."
    )


def test_a_token_behind_another_error_of_ray_is_found() -> None:
    error = ConnectionError("Failed to connect to Ray cluster at h:1")
    assert not cluster.is_about_tokens(error)
    error.__cause__ = RuntimeError(
        "Failed to connect to GCS: InvalidAuthToken: Authentication token is missing or incorrect"
    )
    assert cluster.is_about_tokens(error)
    assert words.why_unauthenticated("", "token", has_token=False).startswith(
        "The Ray cluster: the cluster asks for a Ray token, and this environment has none; set "
    )
