"""The container files: pinned, without root, without secrets, and of this release. No image is built here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import dlrover

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "containers").glob("*Dockerfile"))

container_files = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a container file and what follows each, on one line."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def faults(text: str) -> Iterator[str]:
    """What a container file does that none of ours may do."""
    found = instructions(text)
    arguments = dict(value.split("=", 1) for word, value in found if word == "ARG")
    for word, value in found:
        if word == "FROM":
            name = re.sub(r"\$\{(\w+)\}", lambda m: arguments.get(m[1], ""), value.split()[0])
            if not re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", name):
                yield f"FROM {name} is not a full version"
        if word == "ADD":
            yield f"ADD {value}"
        if re.search(r"https?://|curl|wget|apt-get|--privileged", value):
            yield f"{word} fetches: {value}"
        if word in ("ENV", "ARG") and re.search(r"TOKEN|SECRET|PASSWORD|API_?KEY", value):
            yield f"a secret: {word} {value}"
        if word == "RUN" and "pip install" in value and "--constraint constraints.txt" not in value:
            yield f"versions are open: {value}"
    users = [value for word, value in found if word == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        yield f"USER {users[-1:]} is not a number other than root's"


@container_files
def test_a_container_file_is_pinned_without_root_and_without_secrets(path: Path) -> None:
    assert list(faults(path.read_text())) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("python:3.12.12-slim-bookworm", "python:latest"), "FROM python:latest"),
        (("python:3.12.12-slim-bookworm", "python:3.12"), "FROM python:3.12"),
        (("USER 65532:65532", "USER root"), "USER ['root']"),
        (("USER 65532:65532", "USER 0:0"), "USER ['0:0']"),
        (("USER 65532:65532\n", ""), "USER []"),
        (("PYTHONUNBUFFERED=1", "DLROVER_TOKEN=x"), "a secret"),
        ((" --constraint constraints.txt", ""), "versions are open"),
        (("COPY src src", "ADD src src"), "ADD"),
    ],
)
def test_a_wrong_container_file_would_be_found(change: tuple[str, str], fault: str) -> None:
    text = FILES[0].read_text()
    assert change[0] in text
    found = list(faults(text.replace(*change)))
    assert any(one.startswith(fault) for one in found), found


@container_files
def test_its_tag_is_the_version_of_the_package_and_its_sources_are_there(path: Path) -> None:
    text = path.read_text()
    (tag,) = re.findall(r" -t [\w-]+:(\S+) ", text)
    assert tag == dlrover.__version__
    assert f"-f {path.relative_to(ROOT)} " in text
    for word, value in instructions(text):
        if word == "COPY" and not value.startswith("--from"):
            for source in value.split()[:-1]:
                assert (ROOT / source).exists(), source
    assert "--platform linux/amd64,linux/arm64" in text


def test_a_builder_gets_what_the_files_copy_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    copied = {
        source
        for path in FILES
        for word, value in instructions(path.read_text())
        if word == "COPY" and not value.startswith("--from")
        for source in value.split()[:-1]
    }
    assert {line[1:] for line in lines if line.startswith("!")} == copied


@container_files
def test_pips_configuration_is_lent_to_a_build_and_not_kept(path: Path) -> None:
    found = instructions(path.read_text())
    (run,) = [value for word, value in found if word == "RUN"]
    assert run.startswith("--mount=type=secret,id=pip,target=/etc/pip.conf ")
    assert not [value for word, value in found if word == "COPY" and "pip.conf" in value]


def test_all_images_of_one_release_have_one_base() -> None:
    bases = {
        line
        for path in FILES
        for line in re.findall(r"^ARG PYTHON=.*", path.read_text(), re.MULTILINE)
    }
    assert len(FILES) == 2
    assert len(bases) == 1


def test_the_operator_has_no_root_no_capabilities_and_a_root_file_system_to_read() -> None:
    deployment = yaml.safe_load((ROOT / "deploy/operator/deployment.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (user,) = {
        value.partition(":")[0]
        for path in FILES
        for word, value in instructions(path.read_text())
        if word == "USER"
    }
    assert pod["securityContext"]["runAsUser"] == int(user)
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
