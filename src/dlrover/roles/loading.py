"""Reads a job of several roles from a Python or YAML file, and its settings."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import shlex
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dlrover import config, extras
from dlrover.errors import ConfigurationError, DLRoverError, kind_of
from dlrover.roles.builder import Job
from dlrover.roles.spec import EntryForm, RolesJob, RoleSpec, check
from dlrover.spec.jobdir import TlsFiles
from dlrover.spec.words import did_you_mean

OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(Job.role).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)
"""Options of a role in a YAML file: those of `Job.role`."""
TOP = ("name", "roles", "directory")


def load(file: str) -> RolesJob:
    """Return the job in a file, checked: ``job = Job(...)`` in Python, or the same as YAML.

    Raises:
        ConfigurationError: the file cannot be read, or its roles cannot be one job.
    """
    path = Path(file)
    if not path.is_file():
        raise ConfigurationError(f"{file}: the file does not exist; give a .py or .yaml file.")
    if path.suffix == ".py":
        job = _from_python(path)
    elif path.suffix in (".yaml", ".yml"):
        job = _from_yaml(path)
    else:
        raise ConfigurationError(f"{file}: must be a .py or .yaml file.")
    check(job)
    return job


def _from_python(path: Path) -> RolesJob:
    directory = str(path.parent.absolute())
    sys.path.insert(0, directory)
    try:
        found = runpy.run_path(str(path)).get("job")
    except DLRoverError:
        raise
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        line = f":{frames[-1].lineno}" if frames else ""
        words = f"{type(error).__name__}: {_with_nearest(str(error))}"
        raise ConfigurationError(f"{path}{line}: {words}") from error
    finally:
        sys.path.remove(directory)
    if not isinstance(found, Job):
        raise ConfigurationError(f"{path}: defines no job; it needs a line as job = Job('name').")
    return found.spec()


def _with_nearest(error: str) -> str:
    """Return an error; where a call of `Job.role` has an unknown option, with the nearest one on every Python."""
    error = re.sub(
        r"\. Did you mean '\w+'\?$", "", error
    )  # Python 3.13 and later find one of all arguments
    wrong = re.search(r"unexpected keyword argument '(\w+)'$", error)
    return f"{error}.{did_you_mean(wrong[1], OPTIONS)}" if wrong else error


def _from_yaml(path: Path) -> RolesJob:
    with extras.needed(f"{path}", "roles"):
        import yaml  # noqa: PLC0415 - an extra
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        words = " ".join(str(error).split())
        raise kind_of(error)(f"{path} cannot be read: {words}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("roles"), dict):
        raise ConfigurationError(
            f"{path}: must have name and roles, a mapping from names to roles."
        )
    _check_keys(str(path), content, TOP)
    directory = path.parent / str(content.get("directory", ""))
    return _read(str(path), str(content.get("name", path.stem)), content["roles"], directory)


def of_options(name: str, roles: Mapping[str, Any], directory: Path) -> RolesJob:
    """Return the job of these roles, each a mapping of options as in YAML, checked.

    Raises:
        ConfigurationError: the roles cannot be one job, or an entry point is not in ``directory``.
    """
    job = _read("spec.roles", name, roles, directory)
    check(job)
    return job


def _read(where: str, name: str, roles: Mapping[str, Any], directory: Path) -> RolesJob:
    job = Job(name, directory=directory)
    for role_name, role in roles.items():
        of_role = f"{where}: role {role_name}"
        if not isinstance(role, dict) or "entry" not in role:
            raise ConfigurationError(f"{of_role}: must have an entry, as entry: train.py.")
        _check_keys(of_role, role, ("entry", *OPTIONS))
        options: dict[str, Any] = {key: value for key, value in role.items() if key != "entry"}
        try:
            job.role(role_name, role["entry"], **options)
        except (TypeError, AttributeError) as error:
            raise ConfigurationError(f"{of_role}: a value has the wrong type: {error}.") from error
    return job.spec()


def to_options(role: RoleSpec, directory: str) -> dict[str, Any]:
    """Return the options of a role that `of_options` reads, without those that have their defaults."""
    entry = role.entry
    words = [entry.target, *entry.args]
    if entry.form is EntryForm.SCRIPT:
        words[0] = os.path.relpath(entry.target, directory)
    amounts = {"cpu": role.size.cpu, "memory": role.size.memory, "gpu": role.gpus}
    found = msgspec.to_builtins(role)
    found |= {
        "instances": role.most if role.least == role.most else [role.least, role.most],
        "resources": {kind: f"{amount:.15g}" for kind, amount in amounts.items() if amount},
    }
    defaults = {key: one.default for key, one in inspect.signature(Job.role).parameters.items()}
    options = {
        key: value
        for key, value in found.items()
        if key in OPTIONS and value != defaults[key] and value not in ({}, "")
    }
    return {"entry": shlex.join(words), **options}


def _check_keys(where: str, content: dict[Any, Any], known: Iterable[str]) -> None:
    known = list(known)
    for key in content:
        if key not in known:
            hint = did_you_mean(str(key), known) or f" Known keys are {', '.join(known)}."
            raise ConfigurationError(f"{where}: the key {key} is unknown.{hint}")


def tls_of(env: Mapping[str, str]) -> TlsFiles:
    """Return the TLS settings of a job of several roles, once all that it needs here is found to be there.

    Raises:
        ConfigurationError: some of the three files are set, and others are not; one is not what it must be; the
            package cryptography is missing.
    """
    found = config.settings(env).tls
    files = {"tls_cert": found.cert, "tls_key": found.key, "tls_ca": found.ca}
    missing = [name for name, path in files.items() if not path]
    if 0 < len(missing) < len(files):
        raise ConfigurationError(
            f"A job of several roles with TLS needs tls_cert, tls_key and tls_ca; not set: {', '.join(missing)}."
        )
    if missing:
        return TlsFiles()
    from dlrover.checkpoint.saver import certificates  # noqa: PLC0415 - loads ssl, and the next one grpc
    from dlrover.rpc import wire  # noqa: PLC0415

    cert, key, ca = (str(Path(path).absolute()) for path in files.values())
    result = TlsFiles(cert, key, ca, found.server_name)
    wire.server_credentials(result)
    wire.channel_credentials(result)
    certificates.make()
    return result
