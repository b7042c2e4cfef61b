"""Names of places: what is a URL, what is refused, and what nobody may see."""

import sys
from pathlib import Path

import pytest

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.engine.client import SaverClient
from dlrover.checkpoint.machine.policies import KeepLast
from dlrover.checkpoint.storage.stores import location_of, open_store
from dlrover.errors import ConfigurationError

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket//runs/a/", "s3://bucket/runs/a"),
        ("S3://bucket", "s3://bucket"),
        ("sftp://me:secret@host:22/run", "sftp://host:22/run"),
        ("sftp://me@host/run", "sftp://me@host/run"),
        ("abfs://container@account.dfs.core.windows.net/run",) * 2,
        ("/data/run", "/data/run"),
    ],
)
def test_a_place_has_one_name_without_its_password(url, location):
    assert location_of(url) == location


def test_a_password_is_not_on_the_command_line_of_the_saver():
    store = open_store("memory://me:secret@host/run")
    client = SaverClient(store, "x", keep=KeepLast(1), linger=0.0, env={})
    assert "memory://host/run" in client._command
    assert not any("secret" in word for word in client._command)
    client.close()
    assert "secret" in store.url
    error = store._said(OSError("cannot log in as me:secret@host."))
    assert error == "cannot log in as host"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nonsense://bucket/run", "nonsense://bucket/run cannot be used: Protocol not known"),
        ("memory://run", "memory://run is memory of this process only"),
        (Path("s3://bucket/run"), "s3:/bucket/run looks like a URL with one slash only"),
    ],
)
def test_places_that_cannot_be_used_are_refused_in_a_sentence(place, message):
    with pytest.raises(ConfigurationError, match=message):
        Checkpointer(place)


def test_without_fsspec_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        ConfigurationError, match=r"needs the package fsspec: pip install 'dlrover\[remote\]>="
    ):
        open_store("s3://bucket/run")
